"""Codecs and containers: frames and samples to packets, packets to fragments."""
