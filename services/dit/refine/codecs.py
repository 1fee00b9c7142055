"""How rows of the frozen cache are stored: bf16, fp8 or int4. Arithmetic is never done in any of them.

Every row is encoded by itself, so the blocks of rows that the work is done in change no bit of it.
Source: docs/reference/audio-refine.md §6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from core.cache_policy import INT4_GROUP, row_bytes
from h3stream.errors import UnsupportedError

ENCODE_ROWS = 16384
"""Rows encoded at once: 150,000 of 5,376 channels would take 5 GB of temporaries, so many at once take 0.6 GB."""
DEVICE_DECODE_ROWS = 16384
"""Rows decoded at once on a GPU, where each block costs a few launches."""
HOST_DECODE_ROWS = 512
"""Rows decoded at once on a CPU, whose caches then hold a block until it is done."""
INT4_MAX = 7
FP8_MAX = 448.0
SMALLEST_MAX = 1e-8
"""Rows of zeros are scaled as if this were their largest value."""


class Codec(Protocol):
    """Rows to their stored form and back."""

    precision: str

    def payload(self, rows: int, width: int, **where: Any) -> Tensor:
        """An empty buffer of rows. where: keywords of torch.empty, e.g. the device."""
        ...

    def scales(self, rows: int, width: int, **where: Any) -> Tensor | None:
        """An empty buffer of what rows are scaled by; None if they are not."""
        ...

    def bytes_per_row(self, width: int) -> int:
        """Bytes of a row of so many channels, its scales included."""
        ...

    def encode(self, x: Tensor, payload: Tensor, scales: Tensor | None) -> None:
        """Writes rows `[N, width]` of any floating dtype into buffers of as many rows."""
        ...

    def decode(self, payload: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """Writes stored rows into `out`, `[N, width]` in the compute dtype, without temporaries of its size."""
        ...


def make_codec(precision: str) -> Codec:
    """The codec of that name. Raises UnsupportedError if this machine's torch cannot do it."""
    if precision == "fp8":
        return Fp8()
    return Int4() if precision == "int4" else Bf16()


class Bf16:
    """Rows in bf16, exact where they are computed in it."""

    precision = "bf16"

    def payload(self, rows: int, width: int, **where: Any) -> Tensor:
        """See `Codec.payload`: bf16 `[N, width]`."""
        return torch.empty(rows, width, dtype=torch.bfloat16, **where)

    def scales(self, rows: int, width: int, **where: Any) -> None:
        """See `Codec.scales`."""

    def bytes_per_row(self, width: int) -> int:
        """See `Codec.bytes_per_row`."""
        return row_bytes(width, self.precision)

    def encode(self, x: Tensor, payload: Tensor, scales: Tensor | None) -> None:
        """See `Codec.encode`."""
        payload.copy_(x)

    def decode(self, payload: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """See `Codec.decode`."""
        out.copy_(payload)


class Fp8:
    """Rows in e4m3, each with a float32 scale."""

    precision = "fp8"

    def __init__(self, runtime: object = torch) -> None:
        """runtime: what has, or lacks, the dtype. Raises UnsupportedError if it lacks it."""
        dtype = getattr(runtime, "float8_e4m3fn", None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(
                "the cache's precision is fp8, but this machine's torch has no float8_e4m3fn; choose bf16 or int4"
            )
        self._dtype = dtype
        self._table = torch.arange(256, dtype=torch.uint8).view(dtype).float()

    def payload(self, rows: int, width: int, **where: Any) -> Tensor:
        """See `Codec.payload`: e4m3 `[N, width]`."""
        return torch.empty(rows, width, dtype=self._dtype, **where)

    def scales(self, rows: int, width: int, **where: Any) -> Tensor:
        """See `Codec.scales`: float32 `[N, 1]`."""
        return torch.empty(rows, 1, dtype=torch.float32, **where)

    def bytes_per_row(self, width: int) -> int:
        """See `Codec.bytes_per_row`."""
        return row_bytes(width, self.precision)

    def encode(self, x: Tensor, payload: Tensor, scales: Tensor | None) -> None:
        """See `Codec.encode`."""
        assert scales is not None, "fp8 rows have scales"
        for rows in _blocks(len(x), ENCODE_ROWS):
            values = _float_copy(x[rows])
            torch.div(_largest(values), FP8_MAX, out=scales[rows])
            payload[rows].copy_(values.div_(scales[rows]).clamp_(-FP8_MAX, FP8_MAX))

    def decode(self, payload: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """See `Codec.decode`."""
        assert scales is not None, "fp8 rows have scales"
        for rows in _blocks(len(out), _decode_rows(out)):
            # e4m3 is exact in every compute dtype, and a product with a float32 scale is rounded once.
            if out.is_cuda:
                out[rows].copy_(payload[rows]).mul_(scales[rows])
            else:
                torch.mul(self._looked_up(payload[rows]), scales[rows], out=out[rows])

    def _looked_up(self, payload: Tensor) -> Tensor:
        """The values of a block in float32, from a table: a CPU casts e4m3 one by one, six times as slowly."""
        codes = payload.view(torch.uint8).int().flatten()
        return self._table.index_select(0, codes).view(payload.shape)


class Int4:
    """Rows in levels from -7 to 7, two to a byte, each group of 128 channels with a float16 scale."""

    precision = "int4"

    def payload(self, rows: int, width: int, **where: Any) -> Tensor:
        """See `Codec.payload`: uint8 `[N, groups * 64]`, the earlier of two channels in the low half of a byte."""
        return torch.empty(rows, _groups(width) * INT4_GROUP // 2, dtype=torch.uint8, **where)

    def scales(self, rows: int, width: int, **where: Any) -> Tensor:
        """See `Codec.scales`: float16 `[N, groups]`."""
        return torch.empty(rows, _groups(width), dtype=torch.float16, **where)

    def bytes_per_row(self, width: int) -> int:
        """See `Codec.bytes_per_row`."""
        return row_bytes(width, self.precision)

    def encode(self, x: Tensor, payload: Tensor, scales: Tensor | None) -> None:
        """See `Codec.encode`."""
        assert scales is not None, "int4 rows have scales"
        for rows in _blocks(len(x), ENCODE_ROWS):
            values = _in_groups(x[rows])  # [n, groups, 128]
            scale = _largest(values).div_(INT4_MAX)
            scales[rows].copy_(scale.squeeze(-1))
            # Levels come of the scale as it is before it is rounded to be stored.
            levels = values.div_(scale).round_().clamp_(-INT4_MAX, INT4_MAX).add_(INT4_MAX).to(torch.uint8)
            low, high = levels.flatten(1).unflatten(1, (-1, 2)).unbind(-1)
            torch.bitwise_or(low, high << 4, out=payload[rows])

    def decode(self, payload: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """See `Codec.decode`."""
        assert scales is not None, "int4 rows have scales"
        width = out.shape[1]
        is_ragged = width % INT4_GROUP != 0
        for rows in _blocks(len(out), _decode_rows(out)):
            levels = _levels(payload[rows])
            padded = out.new_empty(levels.shape) if is_ragged else out[rows]
            groups = padded.unflatten(1, (-1, INT4_GROUP))
            groups.copy_(levels.unflatten(1, (-1, INT4_GROUP))).mul_(scales[rows].float().unsqueeze(-1))
            if is_ragged:
                out[rows].copy_(padded[:, :width])


def _blocks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _decode_rows(out: Tensor) -> int:
    return DEVICE_DECODE_ROWS if out.is_cuda else HOST_DECODE_ROWS


def _float_copy(x: Tensor) -> Tensor:
    """The rows in float32, in memory of their own."""
    return x.to(torch.float32, copy=True)


def _largest(values: Tensor) -> Tensor:
    """Largest magnitude along the last axis, which stays with size 1; never 0. Copies nothing of the values' size."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    return torch.maximum(low.neg_(), high).clamp_(min=SMALLEST_MAX)


def _groups(width: int) -> int:
    return -(-width // INT4_GROUP)


def _in_groups(x: Tensor) -> Tensor:
    """The rows in float32, in memory of their own, the last group filled up with zeros: `[N, groups, 128]`."""
    width = x.shape[1]
    values = x.new_empty(len(x), _groups(width) * INT4_GROUP, dtype=torch.float32)
    values[:, :width].copy_(x)
    values[:, width:].zero_()
    return values.view(len(x), -1, INT4_GROUP)


def _levels(payload: Tensor) -> Tensor:
    """Levels from -7 to 7 of packed rows: int8 `[N, groups * 128]`."""
    pairs = payload.to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)  # either half of a byte in a byte of its own, the low one first
    return pairs.view(torch.int8).sub_(INT4_MAX)
