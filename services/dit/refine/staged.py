"""Records that are kept off the device: in host memory or in files, and staged for the device one layer ahead.

Two records on the device serve all layers by turns: while one is read, the next layer is copied into the other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from h3stream.errors import DeviceMemoryError
from services.dit.refine.lane import CopyLane
from services.dit.refine.pinned import Block, HostPool, pinned_memory
from services.dit.refine.record import RecordLayout
from services.dit.refine.scratch import ScratchDirectory

THREAD_NAME = "frozen-cache"
WAYS_OUT = (
    "What would do: room on that disk; backend ram, or vram for a cache that is not shared; contents hidden with "
    "precision int4, the smallest; no cache, which is slower and exact; or on_no_room exact, which does without where "
    "there is no room"
)
"""For a cache that its disk does not take."""


@dataclass
class Traffic:
    """Bytes that records have moved."""

    written: int = 0
    """Off the device."""
    read: int = 0
    """To the device."""


class Records(Protocol):
    """The records of a store, which calls in the order that `stores.py` sees to."""

    fallback_reason: str
    """Why host memory is not page-locked although that was asked for; empty if it is."""
    num_device_bytes: int
    num_host_bytes: int
    traffic: Traffic

    def slot(self, layer: int) -> Tensor:
        """The layer's record on the device: to be filled while building, as `next_record` left it while reading."""
        ...

    def keep(self, layer: int) -> None:
        """Keeps the record that was just filled."""
        ...

    def settle(self) -> None:
        """Returns once all that was kept is in its place. Raises DeviceMemoryError if it could not be put there."""
        ...

    def rewind(self) -> None:
        """Reading begins: layer 0 is on its way to the device."""
        ...

    def next_record(self, layer: int) -> Tensor:
        """The layer's record on the device, as soon as it is there; the one after it is on its way from here on."""
        ...

    def park(self) -> None:
        """Gives back what only reading and writing need on the device; they take it again."""
        ...

    def free(self) -> None:
        """Gives everything back."""
        ...


class HostRecords:
    """Records in blocks of host memory, one behind the other."""

    def __init__(self, layout: RecordLayout, num_layers: int, device: torch.device, pool: HostPool) -> None:
        self.traffic = Traffic()
        self._size, self._num_layers = layout.num_bytes, num_layers
        self._device = device
        self._lane = CopyLane(device)
        self._staging: list[Tensor] = []
        self._stage()
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._blocks = pool.take(num_layers * layout.num_bytes)
        self._block_bytes = pool.block_bytes
        self.fallback_reason = pool.fallback_reason if not all(block.is_pinned for block in self._blocks) else ""
        self.num_host_bytes = sum(block.memory.nbytes for block in self._blocks)
        self._give_back = weakref.finalize(self, _give_back, self._lane, pool, self._blocks)
        self._give_back.atexit = False  # the process's memory goes with it

    def slot(self, layer: int) -> Tensor:
        """See `Records.slot`."""
        self._stage()
        self._lane.wait(self._copied[layer % 2])
        return self._staging[layer % 2]

    def keep(self, layer: int) -> None:
        """See `Records.keep`."""
        with self._lane.copies(self._lane.mark()):
            for host, device, block in self._pieces(layer):
                host.copy_(device, non_blocking=block.is_pinned)
            self._copied[layer % 2] = self._lane.done()
        self.traffic.written += self._size

    def settle(self) -> None:
        """See `Records.settle`."""
        self._lane.synchronize()

    def rewind(self) -> None:
        """See `Records.rewind`."""
        self._stage()
        self._fetch(0)

    def next_record(self, layer: int) -> Tensor:
        """See `Records.next_record`."""
        if layer + 1 < self._num_layers:
            self._fetch(layer + 1)
        return self.slot(layer)

    def park(self) -> None:
        """See `Records.park`."""
        self._lane.synchronize()
        self._staging = []
        self.num_device_bytes = 0

    def free(self) -> None:
        """See `Records.free`."""
        self._give_back()
        self._staging = []
        self.num_device_bytes = self.num_host_bytes = 0

    def _stage(self) -> None:
        """Takes the two records on the device unless they are there."""
        if not self._staging:
            self._staging = _staging(self._size, self._device)
            self.num_device_bytes = 2 * self._size

    def _fetch(self, layer: int) -> None:
        # The other record was read last: whatever the computation still has to do with it is behind the mark.
        with self._lane.copies(self._lane.mark()):
            for host, device, block in self._pieces(layer):
                device.copy_(host, non_blocking=block.is_pinned)
            self._copied[layer % 2] = self._lane.done()
        self.traffic.read += self._size

    def _pieces(self, layer: int) -> Iterator[tuple[Tensor, Tensor, Block]]:
        """Pieces of a layer's place in the blocks, each with its piece of the staged record."""
        staged = self._staging[layer % 2]
        block_bytes = self._block_bytes
        position, done = layer * self._size, 0
        while done < self._size:
            index, start = divmod(position + done, block_bytes)
            count = min(self._size - done, block_bytes - start)
            block = self._blocks[index]
            yield block.memory[start : start + count], staged[done : done + count], block
            done += count


class RecordFiles:
    """A file per kind of tensor, `[layers, ...]`: payloads and scales, of which layers are read and written whole."""

    def __init__(self, directory: Path, layout: RecordLayout, num_layers: int) -> None:
        """Takes all room on the disk at once. Raises OSError if there is not enough."""
        self._parts = layout.parts
        self._files: list[int] = []
        try:
            for part in layout.parts:
                path = directory / part.name
                self._files.append(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
                os.posix_fallocate(self._files[-1], 0, num_layers * part.num_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, layer: int, record: Tensor) -> None:
        """Writes a record of host memory. Raises OSError."""
        for file, part in zip(self._files, self._parts, strict=True):
            rest = record[part.start : part.stop].numpy().data
            position = layer * part.num_bytes
            while rest:
                count = os.pwrite(file, rest, position)
                rest, position = rest[count:], position + count

    def read(self, layer: int, record: Tensor) -> None:
        """Fills a record of host memory. Raises OSError, also if the file has become too short."""
        for file, part in zip(self._files, self._parts, strict=True):
            rest = record[part.start : part.stop].numpy().data
            position = layer * part.num_bytes
            while rest:
                count = os.preadv(file, [rest], position)
                if count == 0:
                    raise OSError(f"layer {layer} of {part.name} ends {len(rest)} bytes early")
                rest, position = rest[count:], position + count

    def close(self) -> None:
        """Closes the files. Twice changes nothing."""
        while self._files:
            os.close(self._files.pop())


class DiskRecords:
    """Records in files, which a thread of their own writes behind the build and reads ahead of the pass.

    Files are read and not mapped: what goes wrong with a disk is then an error of the pass, where a mapped page that
    cannot be read would end the process, and the process's memory stays what it holds itself.
    """

    def __init__(
        self,
        layout: RecordLayout,
        num_layers: int,
        device: torch.device,
        parent: Path,
        *,
        pinned: bool,
        make_files: type[RecordFiles] = RecordFiles,
    ) -> None:
        """parent: below which the directory is made.  Raises DeviceMemoryError if the disk has no room."""
        self.traffic = Traffic()
        self.fallback_reason = ""
        self._size, self._num_layers = layout.num_bytes, num_layers
        self._device = device
        self._lane = CopyLane(device)
        self._host = [] if device.type == "cpu" else self._host_records(layout.num_bytes, pinned=pinned)
        self._staging: list[Tensor] = []
        self._stage()
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._pending: list[Future[None] | None] = [None, None]
        self.num_host_bytes = 0 if device.type == "cpu" else 2 * layout.num_bytes
        try:
            directory = ScratchDirectory(parent)
        except OSError as error:
            raise DeviceMemoryError(f"no directory for the cache below {parent}: {error}. {WAYS_OUT}") from error
        try:
            self._files = make_files(directory.path, layout, num_layers)
        except BaseException as error:
            directory.remove()
            if isinstance(error, OSError):
                size = num_layers * layout.num_bytes
                message = f"no room for {size} bytes of cached rows below {parent}: {error.strerror}. {WAYS_OUT}"
                raise DeviceMemoryError(message) from error
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        self._remove = weakref.finalize(self, _remove, self._thread, self._files, directory)

    def slot(self, layer: int) -> Tensor:
        """See `Records.slot`."""
        self._stage()
        self._await(layer % 2)
        return self._staging[layer % 2]

    def keep(self, layer: int) -> None:
        """See `Records.keep`."""
        slot = layer % 2
        if self._host is not self._staging:
            with self._lane.copies(self._lane.mark()):
                self._host[slot].copy_(self._staging[slot], non_blocking=True)
                self._copied[slot] = self._lane.done()
        self._pending[slot] = self._thread.submit(self._write, layer)
        self.traffic.written += self._size

    def settle(self) -> None:
        """See `Records.settle`."""
        for slot in (0, 1):
            self._await(slot)

    def rewind(self) -> None:
        """See `Records.rewind`."""
        self.settle()  # what a pass that was given up had on its way
        self._stage()
        self._fetch(0)

    def next_record(self, layer: int) -> Tensor:
        """See `Records.next_record`."""
        record = self.slot(layer)
        if layer + 1 < self._num_layers:
            self._fetch(layer + 1)
        return record

    def park(self) -> None:
        """See `Records.park`."""
        self.settle()
        self._lane.synchronize()
        self._host = [] if self._host is self._staging else self._host
        self._staging = []
        self.num_device_bytes = 0

    def free(self) -> None:
        """See `Records.free`."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._lane.synchronize()
        self._remove()
        self._staging = self._host = []
        self.num_device_bytes = self.num_host_bytes = 0

    def _stage(self) -> None:
        """Takes the two records on the device unless they are there; on a CPU the files are read into them."""
        if not self._staging:
            self._staging = _staging(self._size, self._device)
            self._host = self._host or self._staging
            self.num_device_bytes = 2 * self._size

    def _host_records(self, num_bytes: int, *, pinned: bool) -> list[Tensor]:
        if pinned:
            try:
                return [pinned_memory(num_bytes) for _ in range(2)]
            except RuntimeError as error:
                self.fallback_reason = f"page-locked memory could not be allocated: {error}"
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]

    def _await(self, slot: int) -> None:
        """Returns once the thread is done with a staged record; copies on the device wait for each other."""
        pending, self._pending[slot] = self._pending[slot], None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                raise DeviceMemoryError(f"the cache's files fail: {error.strerror or error}. {WAYS_OUT}") from error
        self._lane.wait(self._copied[slot])

    def _write(self, layer: int) -> None:
        copied = self._copied[layer % 2]
        if copied is not None:
            copied.synchronize()
        self._files.write(layer, self._host[layer % 2])

    def _fetch(self, layer: int) -> None:
        self._pending[layer % 2] = self._thread.submit(self._load, layer, self._lane.mark())
        self.traffic.read += self._size

    def _load(self, layer: int, after: torch.cuda.Event | None) -> None:
        slot = layer % 2
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()
        self._files.read(layer, self._host[slot])
        if self._host is not self._staging:
            with self._lane.copies(after):
                self._staging[slot].copy_(self._host[slot], non_blocking=True)
                self._copied[slot] = self._lane.done()


def _staging(num_bytes: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]


def _give_back(lane: CopyLane, pool: HostPool, blocks: list[Block]) -> None:
    lane.synchronize()
    pool.give_back(blocks)


def _remove(thread: ThreadPoolExecutor, files: RecordFiles, directory: ScratchDirectory) -> None:
    thread.shutdown(wait=False, cancel_futures=True)  # whatever it had to do held the records, which are gone
    files.close()
    directory.remove()
