"""Stores of the frozen cache: rows of every layer are written once, then read layer by layer, pass after pass.

Which rows, and when a build is valid, is `frozen_cache.py`'s to decide. Where records lie changes no bit of what is
read: every store encodes and decodes on the compute device, and moves nothing but encoded bytes.
Source: docs/reference/audio-refine.md §6, §7.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from h3stream.errors import UnsupportedError
from services.dit.refine.codecs import make_codec
from services.dit.refine.pinned import HostPool
from services.dit.refine.record import RecordLayout
from services.dit.refine.staged import DiskRecords, HostRecords, Records, Traffic

BACKENDS = ("vram", "ram", "disk")


@dataclass(frozen=True)
class StoreShape:
    """Sizes of a store."""

    num_layers: int
    num_tensors: int
    """Tensors of a layer: 1, the input of attention, or 2, K and V."""
    rows: int
    width: int
    """Channels of a row."""
    precision: str
    device: torch.device
    """The compute device."""


@dataclass
class StoreStats:
    """What a store holds, and what it has moved so far."""

    num_bytes: int
    """Bytes of all rows as they are stored."""
    num_device_bytes: int
    """Bytes that it takes on the compute device; on a CPU, all that are not kept elsewhere."""
    num_host_bytes: int
    """Bytes that it takes in host memory beside those."""
    num_bytes_written: int = 0
    """Bytes that builds have moved off the device."""
    num_bytes_moved: int = 0
    """Bytes that passes have moved to the device."""


class Store(Protocol):
    """Encoded rows of every layer."""

    backend: str
    """Where they are: "vram", "ram" or "disk"."""

    @property
    def fallback_reason(self) -> str:
        """Why host memory is not page-locked although that was asked for; empty if it is."""

    @property
    def stats(self) -> StoreStats:
        """What it holds and has moved."""

    def write(self, layer: int, tensor: int, x: Tensor) -> None:
        """Encodes and keeps rows `[N, width]` of the device: every tensor of every layer, in order.

        The first tensor of layer 0 begins a build anew, and with it what was stored is gone.
        """
        ...

    def seal(self) -> None:
        """The build is complete: from here on it can be read. Raises DeviceMemoryError if it could not be kept."""
        ...

    def start(self) -> None:
        """A pass over the layers begins, whether or not the last one came to its end."""
        ...

    def read(self, layer: int, tensor: int, out: Tensor) -> None:
        """Decodes rows into `out`, `[N, width]` in the compute dtype: every tensor of every layer, in order.

        With a layer's first tensor the next layer's copy to the device begins.
        """
        ...

    def park(self) -> None:
        """Gives back what only reading and writing need on the device; the next pass or build takes it again."""
        ...

    def free(self) -> None:
        """Gives all memory and files back. Twice changes nothing."""
        ...


def make_store(
    backend: str, shape: StoreShape, *, directory: Path | None, pinned: bool, pool: HostPool | None = None
) -> Store:
    """A store of that kind, which takes all its memory at once.

    directory: below which "disk" makes one of its own.  pinned: whether host memory should be page-locked.  pool: gives
    host memory, in place of one of the store's own that keeps nothing back.
    Raises torch.OutOfMemoryError if the device cannot hold it, DeviceMemoryError if the host or the disk cannot.
    """
    layout = RecordLayout(make_codec(shape.precision), shape.num_tensors, shape.rows, shape.width)
    records: Records
    if backend == "vram":
        records = DeviceRecords(layout, shape.num_layers, shape.device)
    elif backend == "ram":
        records = HostRecords(
            layout, shape.num_layers, shape.device, pool or HostPool(pinned=pinned, max_spare_bytes=0)
        )
    elif backend == "disk":
        if directory is None:
            raise UnsupportedError("the cache's backend is disk, but this server has no directory for it")
        records = DiskRecords(layout, shape.num_layers, shape.device, directory, pinned=pinned)
    else:
        raise UnsupportedError(f"the cache's backend is {backend!r}; there are {', '.join(BACKENDS)}")
    return RecordStore(backend, shape, layout, records)


class RecordStore:
    """A store over records, wherever these are kept; sees to the order of the calls."""

    def __init__(self, backend: str, shape: StoreShape, layout: RecordLayout, records: Records) -> None:
        self.backend = backend
        self._shape = shape
        self._codec = make_codec(shape.precision)
        self._layout = layout
        self._records = records
        self._num_reads = shape.num_layers * shape.num_tensors
        self._written = 0  # tensors of the present build
        self._is_sealed = False
        self._read: int | None = None  # tensors of the present pass
        self._is_freed = False
        self._num_bytes = self._num_reads * shape.rows * self._codec.bytes_per_row(shape.width)

    @property
    def fallback_reason(self) -> str:
        """See `Store.fallback_reason`."""
        return self._records.fallback_reason

    @property
    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        records, traffic = self._records, self._records.traffic
        return StoreStats(
            num_bytes=self._num_bytes,
            num_device_bytes=records.num_device_bytes,
            num_host_bytes=records.num_host_bytes,
            num_bytes_written=traffic.written,
            num_bytes_moved=traffic.read,
        )

    def write(self, layer: int, tensor: int, x: Tensor) -> None:
        """See `Store.write`."""
        index = self._index("write", layer, tensor)
        assert tuple(x.shape) == (self._shape.rows, self._shape.width), f"{list(x.shape)} rows to write: {self._shape}"
        if index == 0:
            self._written, self._is_sealed, self._read = 0, False, None
        assert not self._is_sealed, f"layer {layer}, tensor {tensor} is written after the build was sealed"
        assert index == self._written, f"tensor {index} is written, but {self._written} is next"
        self._codec.encode(x, *self._layout.views(self._records.slot(layer), tensor))
        if tensor == self._shape.num_tensors - 1:
            self._records.keep(layer)
        self._written += 1

    def seal(self) -> None:
        """See `Store.seal`."""
        assert not self._is_freed, "seal of a store that was freed"
        assert not self._is_sealed, "the build is sealed already"
        assert self._written == self._num_reads, f"a build of {self._written} of {self._num_reads} tensors is sealed"
        self._records.settle()
        self._is_sealed = True

    def start(self) -> None:
        """See `Store.start`."""
        assert not self._is_freed, "start of a store that was freed"
        assert self._is_sealed, "a pass begins over a build that is not sealed"
        self._records.rewind()
        self._read = 0

    def read(self, layer: int, tensor: int, out: Tensor) -> None:
        """See `Store.read`."""
        index = self._index("read", layer, tensor)
        assert self._read is not None, f"layer {layer}, tensor {tensor} is read before a pass was started"
        assert index == self._read, f"tensor {index} is read, but {self._read} is next"
        assert tuple(out.shape) == (self._shape.rows, self._shape.width), f"room for {list(out.shape)}: {self._shape}"
        record = self._records.next_record(layer) if tensor == 0 else self._records.slot(layer)
        self._codec.decode(*self._layout.views(record, tensor), out)
        self._read += 1

    def park(self) -> None:
        """See `Store.park`."""
        assert not self._is_freed, "park of a store that was freed"
        self._read = None
        self._records.park()

    def free(self) -> None:
        """See `Store.free`."""
        if not self._is_freed:
            self._is_freed = True
            self._records.free()

    def _index(self, verb: str, layer: int, tensor: int) -> int:
        """Place of a tensor in the order of all."""
        assert not self._is_freed, f"{verb} of a store that was freed"
        assert 0 <= layer < self._shape.num_layers, f"layer {layer} of {self._shape.num_layers}"
        assert 0 <= tensor < self._shape.num_tensors, f"tensor {tensor} of {self._shape.num_tensors}"
        return layer * self._shape.num_tensors + tensor


class DeviceRecords:
    """Records stay where they are encoded: nothing is copied, and none is read ahead."""

    fallback_reason = ""
    num_host_bytes = 0

    def __init__(self, layout: RecordLayout, num_layers: int, device: torch.device) -> None:
        self.traffic = Traffic()
        self.num_device_bytes = num_layers * layout.num_bytes
        # One by one: layers of a shared device find room where all of them in one piece would not.
        self._records = [torch.empty(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(num_layers)]

    def slot(self, layer: int) -> Tensor:
        """See `Records.slot`."""
        return self._records[layer]

    def keep(self, layer: int) -> None:
        """See `Records.keep`."""

    def settle(self) -> None:
        """See `Records.settle`."""

    def rewind(self) -> None:
        """See `Records.rewind`."""

    def next_record(self, layer: int) -> Tensor:
        """See `Records.next_record`."""
        return self._records[layer]

    def park(self) -> None:
        """See `Records.park`: these lie on the device for good."""

    def free(self) -> None:
        """See `Records.free`."""
        self._records.clear()
        self.num_device_bytes = 0
