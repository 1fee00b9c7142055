"""Caches that outlive their refinement, by request: few, bounded, and never on the device.

The least recently used goes first: for the next one, for the bound on their bytes, or because memory is short.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from core.budget import gib
from services.dit.refine.frozen_cache import FrozenCache
from services.dit.refine.identity import CacheContent, CacheKind

log = logging.getLogger(__name__)

NUM_SLOTS = 2
"""Both branches of one guided refinement fit, or two clips."""


@dataclass(eq=False)
class SharedCache:
    """A cache, with where it lives and what it was built of."""

    kind: CacheKind
    content: CacheContent
    backend: str
    cache: FrozenCache


class SharedCaches:
    """The shared caches of a worker, whose verbs run one at a time. One that is taken is the taker's."""

    def __init__(self, max_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        """max_bytes: of all caches kept between refinements."""
        self._max_bytes = max_bytes
        self._num_slots = num_slots
        self._kept: list[SharedCache] = []
        """The least recently used first."""

    @property
    def num_bytes(self) -> int:
        """Of all that are kept."""
        return sum(kept.cache.num_bytes for kept in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, kind: CacheKind) -> SharedCache | None:
        """The cache of that kind, which stays where it is."""
        return next((kept for kept in self._kept if kept.kind == kind), None)

    def take(self, kinds: Sequence[CacheKind]) -> list[SharedCache | None]:
        """Takes out the caches of these kinds, None where there is none, and leaves slots free for all of them."""
        taken = [self.find(kind) for kind in kinds]
        self._kept = [kept for kept in self._kept if kept not in taken]
        while len(self._kept) > max(0, self._num_slots - len(kinds)):
            self.evict("its slot is needed")
        return taken

    def give_back(self, shared: SharedCache) -> None:
        """Keeps a cache, as the one used last, without what it holds on the device; one without a build is freed."""
        cache = shared.cache
        if not cache.is_valid:
            cache.free()
            return
        cache.park()
        if cache.num_bytes > self._max_bytes:
            log.info(
                "shared frozen cache in %s not kept: its %s exceed the bound of %s",
                shared.backend,
                gib(cache.num_bytes),
                gib(self._max_bytes),
            )
            cache.free()
            return
        while len(self._kept) >= self._num_slots:
            self.evict("its slot is needed")
        while self.num_bytes + cache.num_bytes > self._max_bytes:
            self.evict("the shared caches have reached their bound")
        self._kept.append(shared)

    def evict(self, why: str, backend: str = "") -> bool:
        """Frees the least recently used; false if there is none.  backend: of those that live there alone."""
        shared = next((kept for kept in self._kept if not backend or kept.backend == backend), None)
        if shared is None:
            return False
        self._kept.remove(shared)
        log.info("shared frozen cache of %s in %s freed: %s", gib(shared.cache.num_bytes), shared.backend, why)
        shared.cache.free()
        return True

    def clear(self, why: str) -> None:
        """Frees all of them."""
        while self.evict(why):
            pass
