"""What a store keeps of one layer: a record, one run of bytes in which every tensor has its place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.dit.refine.codecs import Codec

ALIGNMENT = 256
"""Bytes to whose multiples the parts of a record begin: what kernels and copies like best."""


@dataclass(frozen=True)
class Part:
    """The place of one buffer in a record."""

    name: str
    """Kind of tensor, e.g. "0.payload": tensor 0's rows."""
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """Byte behind its last."""
        return self.start + self.num_bytes

    def of(self, record: Tensor) -> Tensor:
        """This buffer in a record, a view."""
        return record[self.start : self.stop].view(self.dtype).view(self.shape)


class RecordLayout:
    """Where the buffers of a layer's tensors lie in its record."""

    def __init__(self, codec: Codec, num_tensors: int, rows: int, width: int) -> None:
        self.parts: list[Part] = []
        self._of_tensor: list[tuple[Part, Part | None]] = []
        self.num_bytes = 0
        for tensor in range(num_tensors):
            payload = self._place(f"{tensor}.payload", codec.payload(rows, width, device="meta"))
            scales = codec.scales(rows, width, device="meta")
            self._of_tensor.append((payload, None if scales is None else self._place(f"{tensor}.scales", scales)))

    def views(self, record: Tensor, tensor: int) -> tuple[Tensor, Tensor | None]:
        """Payload and scales of a tensor, views of a record."""
        payload, scales = self._of_tensor[tensor]
        return payload.of(record), None if scales is None else scales.of(record)

    def _place(self, name: str, like: Tensor) -> Part:
        part = Part(name, self.num_bytes, like.nbytes, tuple(like.shape), like.dtype)
        self.parts.append(part)
        self.num_bytes = ALIGNMENT * math.ceil(part.stop / ALIGNMENT)
        return part
