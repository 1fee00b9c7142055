"""The parts of a tiny model: random weights of the published classes, each part in its own module."""
