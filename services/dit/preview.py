"""Stills of what is being sampled: one latent frame of the clean estimate, through a linear map, as a JPEG.

A still reads latents and writes nothing and draws no random number: a clip is the same with and without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from core.geometry import SPATIAL_COMPRESSION, VIDEO_LATENT_CHANNELS
from h3stream.request import PreviewSpec
from services.common.preview_map import NUM_COLOURS, PreviewMap

log = logging.getLogger(__name__)

MEDIA_TYPE = "image/jpeg"
_QUANTISER = "4"
"""Of 2 (best) to 31; a still of 256 x 146 pixels is about 3 KB."""


@dataclass(frozen=True)
class Still:
    """An encoded picture."""

    data: bytes
    """The JPEG file."""
    width: int
    """In pixels."""
    height: int
    """In pixels."""


class StillMaker:
    """Makes the stills of one clip, until one fails: a clip never fails for its stills."""

    def __init__(self, spec: PreviewSpec, preview_map: PreviewMap, device: torch.device) -> None:
        """spec: with a `max_side` of at least 1.  device: where the latents will be."""
        self.unavailable_reason = ""
        """Why there are no stills any more; empty while there are."""
        self._spec = spec
        self._weights = torch.tensor(preview_map.weights, device=device).view(NUM_COLOURS, VIDEO_LATENT_CHANNELS)
        self._bias = torch.tensor(preview_map.bias, device=device).view(NUM_COLOURS, 1, 1)

    def probe(self) -> None:
        """Finds out whether this machine can encode a still, before the first is due."""
        self._make(lambda: torch.zeros(VIDEO_LATENT_CHANNELS, 1, 1, device=self._weights.device))

    def after(self, step: int, num_steps: int, estimate: Callable[[], Tensor]) -> Still | None:
        """The still behind a forward; None if none is due, or none can be made.

        step: forwards done, of num_steps.  estimate: gives the latent frame `[24, H, W]` to show, float32.
        """
        if self.unavailable_reason or (step % self._spec.every_steps and step != num_steps):
            return None
        return self._make(estimate)

    def _make(self, estimate: Callable[[], Tensor]) -> Still | None:
        try:
            return make_still(estimate(), self._weights, self._bias, self._spec.max_side)
        except Exception as error:  # an encoder's errors are of many kinds, and none is worth a clip
            self.unavailable_reason = f"stills cannot be made here: {error}"
            log.warning("no more stills of this clip", exc_info=True)
            return None


@torch.inference_mode()
def make_still(latent: Tensor, weights: Tensor, bias: Tensor, max_side: int) -> Still:
    """A still of one latent frame.

    latent: `[24, H, W]` float32, normalised.  weights: `[3, 24]`.  bias: `[3, 1, 1]`.
    max_side: longer side of the still, which is never larger than the canvas.
    """
    colours = (torch.einsum("kc,chw->khw", weights, latent) + bias).cpu()
    size = still_size(colours.shape[1], colours.shape[2], max_side)
    resized = functional.interpolate(colours[None], size, mode="bilinear", antialias=True)[0]
    picture = (resized.nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    data = encode_jpeg(picture.permute(1, 2, 0).contiguous().numpy())
    return Still(data, width=size[1], height=size[0])


def still_size(latent_height: int, latent_width: int, max_side: int) -> tuple[int, int]:
    """(height, width) of a still in pixels: of the canvas's shape, its longer side at most `max_side` pixels."""
    longer = max(latent_height, latent_width)
    side = min(max_side, longer * SPATIAL_COMPRESSION)
    height, width = (max(1, round(size * side / longer)) for size in (latent_height, latent_width))
    return height, width


def encode_jpeg(picture: npt.NDArray[np.uint8]) -> bytes:
    """The JPEG file of a picture `[height, width, 3]`. Raises what PyAV raises where there is no encoder."""
    encoder = av.CodecContext.create("mjpeg", "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.height, encoder.width = picture.shape[:2]
    encoder.pix_fmt = "yuvj420p"  # JPEG's full range
    encoder.time_base = Fraction(1)
    encoder.thread_count = 1
    encoder.options = {"qmin": _QUANTISER, "qmax": _QUANTISER}
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuvj420p")
    return b"".join(bytes(packet) for packet in (*encoder.encode(frame), *encoder.encode(None)))
