"""Trains the tiny model of `models/tiny`: a procedural world, exact latents of it, and every component of the model."""
