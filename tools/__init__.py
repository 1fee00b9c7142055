"""Makers and converters of model directories."""
