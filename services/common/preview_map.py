"""The linear map from video latents to colours, as it travels from the VAE worker to the DiT worker."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.geometry import VIDEO_LATENT_CHANNELS
from h3stream.errors import InvalidRequestError
from h3stream.v1 import types_pb2

NUM_COLOURS = 3


@dataclass(frozen=True)
class PreviewMap:
    """Colours in [0, 1], before clamping, of a normalised latent `z [24]`: `weights @ z + bias`."""

    weights: tuple[float, ...]
    """`[3, 24]`, row-major: a row for each of red, green and blue."""
    bias: tuple[float, ...]
    """`[3]`."""

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for anything but as many finite numbers as it takes."""
        expected = NUM_COLOURS * VIDEO_LATENT_CHANNELS, NUM_COLOURS
        if (found := (len(self.weights), len(self.bias))) != expected:
            raise InvalidRequestError(f"the preview map has {found} weights and biases; it must have {expected}")
        if not all(map(math.isfinite, (*self.weights, *self.bias))):
            raise InvalidRequestError("the preview map has values that are not finite numbers")

    def to_proto(self) -> types_pb2.PreviewMap:
        """The wire form, which holds binary32."""
        return types_pb2.PreviewMap(weights=self.weights, bias=self.bias)

    @classmethod
    def from_proto(cls, message: types_pb2.PreviewMap) -> PreviewMap:
        """The map of a message. Raises InvalidRequestError if it is none."""
        return cls(tuple(message.weights), tuple(message.bias))
