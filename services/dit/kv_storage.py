"""Where the rows of the KV cache live: on the compute device, or in host memory behind one merged slot.

A storage moves memory; which entries exist and which are kept is `kv_cache.py`'s to decide. Every storage hands out the
same values in the same layout, so the choice never changes a bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from h3stream.errors import DeviceMemoryError
from h3stream.request import KvStorage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KvShape:
    """Sizes of a cache."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    """The compute dtype; nothing is ever cast."""
    device: torch.device
    """The compute device."""
    slot_rows: int
    """Most rows that a forward attends to, its own included."""
    chunk_rows: int
    """Most rows of a chunk."""

    def buffer(self, *sizes: int) -> tuple[int, ...]:
        """Shape of rows of K and V: `[*sizes, h, d]`."""
        return (*sizes, self.num_heads, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's K and V of one layer."""
        return 2 * self.num_heads * self.head_dim * self.dtype.itemsize


@dataclass
class TransferStats:
    """What a storage has moved between host and device, and what it holds on the host."""

    host_bytes: int = 0
    """Bytes of all host buffers, those kept for reuse included."""
    peak_host_bytes: int = 0
    """Most of them at once."""
    to_device_bytes: int = 0
    """Bytes of retained rows copied into the slot."""
    to_device_calls: int = 0
    """Copies into the slot: K and V of an entry are two."""
    to_host_bytes: int = 0
    """Bytes of staged rows."""
    to_host_calls: int = 0
    """Copies of staged rows: K and V of a layer are two."""


class Storage(Protocol):
    """Memory of a KV cache."""

    kind: KvStorage
    """Where the rows really live."""
    fallback_reason: str
    """Why that is not what was asked for; empty if it is."""
    stats: TransferStats

    def slot(self, layer: int, entries: Sequence[int]) -> Tensor:
        """K and V of a layer, `[2, slot_rows, h, d]` on the device, the retained rows in place at the front.

        entries: rows of the retained entries. What lies behind them is free to be written until the next call.
        """
        ...

    def stage(self, layer: int, start: int, stop: int) -> None:
        """Keeps these rows of the slot just handed out."""
        ...

    def commit(self, entries: Sequence[int], keep: Sequence[bool]) -> None:
        """Makes the staged rows an entry and drops those not to be kept.

        entries: rows of the retained entries and the staged one.  keep: which of them stay, in the same order.
        """
        ...

    def discard(self) -> None:
        """Forgets the staged rows."""
        ...


def make_storage(kind: KvStorage, shape: KvShape) -> Storage:
    """The storage of that kind. Raises torch.OutOfMemoryError if the device cannot hold it."""
    return DeviceStorage(shape) if kind == "gpu" else HostStorage(shape, pinned=kind == "cpu_pinned")


class DeviceStorage:
    """Rows stay on the device: each layer has one buffer with all retained rows, in time order.

    A forward writes its own rows behind the retained ones, so nothing is merged or copied per step, staging copies
    nothing, and the memory is exactly the peak (retained + own rows of every layer), taken once. Only an eviction moves
    rows.
    """

    kind: KvStorage = "gpu"
    fallback_reason = ""

    def __init__(self, shape: KvShape) -> None:
        self.stats = TransferStats()
        self._rows = torch.empty(
            shape.buffer(shape.num_layers, 2, shape.slot_rows), dtype=shape.dtype, device=shape.device
        )

    def slot(self, layer: int, entries: Sequence[int]) -> Tensor:
        """See `Storage.slot`."""
        return self._rows[layer]

    def stage(self, layer: int, start: int, stop: int) -> None:
        """See `Storage.stage`: the rows are where they will stay."""

    def commit(self, entries: Sequence[int], keep: Sequence[bool]) -> None:
        """See `Storage.commit`."""
        source = target = 0
        for rows, kept in zip(entries, keep, strict=True):
            if kept:
                self._move(source, target, rows)
                target += rows
            source += rows

    def discard(self) -> None:
        """See `Storage.discard`: rows behind the retained ones mean nothing."""

    def _move(self, source: int, target: int, rows: int) -> None:
        gap = source - target
        for offset in range(0, rows, gap) if gap else ():
            # No piece is longer than the gap, so source and target of a copy never overlap.
            count = min(gap, rows - offset)
            piece = self._rows[:, :, source + offset : source + offset + count]
            self._rows[:, :, target + offset : target + offset + count] = piece


class HostStorage:
    """Entries live in host memory; one slot on the device, reused by every layer, holds what a layer attends to."""

    def __init__(self, shape: KvShape, *, pinned: bool) -> None:
        """pinned: page-locked memory, until an allocation fails; from then on ordinary memory, for good."""
        self.kind: KvStorage = "cpu_pinned" if pinned else "cpu"
        self.fallback_reason = ""
        self.stats = TransferStats()
        self._shape = shape
        self._slot = torch.empty(shape.buffer(2, shape.slot_rows), dtype=shape.dtype, device=shape.device)
        self._records: list[Tensor] = []  # each [layers, 2, rows, h, d]
        self._staged: Tensor | None = None
        self._spare: list[Tensor] = []  # buffers of evicted chunks, kept for later ones

    def slot(self, layer: int, entries: Sequence[int]) -> Tensor:
        """See `Storage.slot`."""
        start = 0
        for record, rows in zip(self._records, entries, strict=True):
            for target, source in zip(self._slot, record[layer], strict=True):
                # Asynchronous from pinned memory: later work on the stream waits, and so does a later overwrite.
                target[start : start + rows].copy_(source[:rows], non_blocking=self.kind == "cpu_pinned")
            start += rows
        self.stats.to_device_bytes += start * self._shape.row_bytes
        self.stats.to_device_calls += 2 * len(entries)
        return self._slot

    def stage(self, layer: int, start: int, stop: int) -> None:
        """See `Storage.stage`."""
        rows = stop - start
        if self._staged is None:
            self._staged = self._take(rows)
        for target, source in zip(self._staged[layer], self._slot, strict=True):
            target[:rows].copy_(source[start:stop], non_blocking=self.kind == "cpu_pinned")
        self.stats.to_host_bytes += rows * self._shape.row_bytes
        self.stats.to_host_calls += 2

    def commit(self, entries: Sequence[int], keep: Sequence[bool]) -> None:
        """See `Storage.commit`."""
        assert self._staged is not None, "nothing is staged"
        records, self._staged = [*self._records, self._staged], None
        self._records = [record for record, kept in zip(records, keep, strict=True) if kept]
        self._spare += [record for record, kept in zip(records, keep, strict=True) if not kept]

    def discard(self) -> None:
        """See `Storage.discard`."""
        if self._staged is not None:
            self._spare.append(self._staged)
            self._staged = None

    def _take(self, rows: int) -> Tensor:
        """A buffer for an entry of so many rows."""
        for i, spare in enumerate(self._spare):
            if spare.shape[2] >= rows:
                return self._spare.pop(i)
        # Chunks differ by a few rows: buffers of one size serve any of them. The text comes first and stays for good.
        capacity = max(rows, self._shape.chunk_rows) if self._records else rows
        record = self._allocate(self._shape.buffer(self._shape.num_layers, 2, capacity))
        self.stats.host_bytes += record.nbytes
        self.stats.peak_host_bytes = max(self.stats.peak_host_bytes, self.stats.host_bytes)
        return record

    def _allocate(self, size: tuple[int, ...]) -> Tensor:
        if self.kind == "cpu_pinned":
            try:
                record = torch.empty(size, dtype=self._shape.dtype, pin_memory=True)
                if record.is_pinned():
                    return record
                self.fallback_reason = "the allocator returned memory that is not page-locked"
            except RuntimeError as error:
                self.fallback_reason = f"page-locked memory could not be allocated: {error}"
            self.kind = "cpu"
            log.warning("the KV cache falls back to pageable host memory: %s", self.fallback_reason)
        try:
            return torch.empty(size, dtype=self._shape.dtype)
        except RuntimeError as error:
            raise DeviceMemoryError(f"no host memory for an entry of the KV cache, {list(size)}: {error}") from error
