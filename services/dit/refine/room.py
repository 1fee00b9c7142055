"""Room for frozen caches: asked for before anything is allocated, measured, and made at the shared caches' cost.

The rules of where a cache shall live are those of `core/cache_policy.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from core.budget import gib
from core.cache_policy import CacheRoom, Choice, NoRoomError, build_request, choose_backend
from h3stream.errors import DeviceMemoryError, UnsupportedError
from h3stream.refine import FrozenCacheSpec
from services.dit.refine.memory import available_host_bytes, free_device_bytes, resident_host_bytes
from services.dit.refine.pinned import HostPool
from services.dit.refine.scratch import sweep
from services.dit.refine.shared_caches import SharedCaches
from services.dit.refine.stores import Store, StoreShape, make_store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSizes:
    """What a refinement's caches need."""

    cache_bytes: int
    """Of those that are not there yet."""
    smallest_bytes: int
    """Of the same rows as small as they can be stored."""
    transient_bytes: int
    """Device memory that a build takes beside them."""


class CacheRooms:
    """The places where a worker's frozen caches may live, and those that outlive their refinement."""

    def __init__(
        self,
        device: torch.device,
        *,
        directory: Path | None,
        pinned: bool,
        max_shared_bytes: int,
        free_device: Callable[[], int] | None = None,
        available_host: Callable[[], int] = available_host_bytes,
    ) -> None:
        """directory: below which caches on disk are made.  pinned: whether host memory is page-locked for a GPU.

        free_device, available_host: what is free now, in bytes; None: what the device tells.
        """
        self.shared = SharedCaches(max_shared_bytes)
        self._device = device
        self._directory = directory
        self._pinned = pinned and device.type == "cuda"
        self._pool = HostPool(pinned=self._pinned)
        self._free_device = free_device or partial(free_device_bytes, device)
        self._available_host = available_host
        if directory is not None:
            sweep(directory)

    def choose(self, spec: FrozenCacheSpec, sizes: CacheSizes, backend: str) -> Choice:
        """Where new caches shall live; shared ones make room before anything fails, least recently used first.

        backend: as asked for.  Raises DeviceMemoryError where no allowed place has room, UnsupportedError for a disk
        that this worker has not.
        """
        if backend == "disk" and self._directory is None:
            raise UnsupportedError(
                "the cache's backend is disk, but this worker has no directory for it; choose auto, vram or ram"
            )
        while True:
            room = self._measured(spec, sizes)
            request = build_request(backend, room, spec.vram_margin_gb)
            try:
                choice = choose_backend(backend, room)
            except NoRoomError as error:
                if self._evicted():
                    continue
                raise DeviceMemoryError(str(error)) from error
            is_short = choice.backend == "ram" and room.available_host_bytes < request.host_bytes
            if (is_short or (choice.backend == "disk" and backend == "auto")) and self._evicted():
                continue
            break
        if choice.backend == "vram" and room.free_device_bytes < request.device_bytes:
            self.release()
            log.warning(
                "a build asks for %s of device memory, and %s are free",
                gib(request.device_bytes),
                gib(self._free_device()),
            )
        if choice.backend == "ram" and self._pinned and (reason := self._unpinned_reason()):
            return Choice("ram", f"{choice.reason}; in ordinary host memory: {reason}")
        return choice

    def new_store(self, backend: str, shape: StoreShape) -> Store:
        """A store there. Raises as `make_store` does."""
        return make_store(backend, shape, directory=self._directory, pinned=self._pinned, pool=self._pool)

    def release(self) -> None:
        """Gives what the allocator keeps on the device back to it: other processes need it."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reading(self, backend: str) -> str:
        """The memory that a cache there shows in, for the log."""
        if backend == "vram":
            return f"{gib(self._free_device())} of device memory free"
        reading = f"{gib(resident_host_bytes())} resident, {gib(self._available_host())} of host memory available"
        if spare := self._pool.spare_bytes:
            reading += f", {gib(spare)} of what is resident kept page-locked for the next cache"
        return reading

    def clear(self, why: str) -> None:
        """Frees all that no refinement is using: shared caches, and what is kept for the next ones."""
        self.shared.clear(why)
        self._pool.trim()
        self.release()

    def _measured(self, spec: FrozenCacheSpec, sizes: CacheSizes) -> CacheRoom:
        return CacheRoom(
            cache_bytes=sizes.cache_bytes,
            smallest_bytes=sizes.smallest_bytes,
            transient_bytes=sizes.transient_bytes,
            free_device_bytes=self._free_device(),
            available_host_bytes=self._available_host() + self._pool.spare_bytes,
            allow_disk=spec.allow_disk and self._directory is not None,
            is_shared=spec.shared,
        )

    def _evicted(self) -> bool:
        """Whether a shared cache has made room in host memory."""
        return self.shared.evict("its memory is needed", "ram")

    def _unpinned_reason(self) -> str:
        """Why host memory cannot be page-locked; found out with one block, empty if it can."""
        self._pool.give_back(self._pool.take(1))
        return self._pool.fallback_reason
