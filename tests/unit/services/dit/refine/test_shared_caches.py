from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from h3stream.refine import FrozenCacheSpec
from services.dit.refine.frozen_cache import FrozenCache, RowSplit
from services.dit.refine.identity import CacheContent, CacheKind
from services.dit.refine.shared_caches import SharedCache, SharedCaches
from tests import refine_vectors
from tests.refine_vectors import CLIP

POLICY = json.loads((refine_vectors.FIXTURES / "policy.json").read_text())
SHARED = [
    case
    for case in POLICY["lifecycle"]
    if case["name"] != "not a refinement call" and not case["refresh_interval"]
]  # fmt: skip
"""Which calls are no refinements is decided before there is a cache: see the worker's tests. Cached steps are counted
within a refinement: see those of a single cache."""
SIZE = 1000


@dataclass
class FakeStore:
    """Holds bytes until it is freed, and some of them on the device until it is parked."""

    num_bytes: int = SIZE
    num_bytes_written: int = 0
    num_bytes_moved: int = 0
    num_device_bytes: int = 0
    freed: list[bool] = field(default_factory=list)

    @property
    def stats(self) -> FakeStore:
        return self

    def seal(self) -> None:
        self.num_device_bytes = 10

    def start(self) -> None:
        pass

    def park(self) -> None:
        self.num_device_bytes = 0

    def free(self) -> None:
        self.freed.append(True)


class Caller:
    """Refinements of one forward each over shared caches, as the lifecycle's calls are."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.shared = SharedCaches(max_bytes)
        self.stores: list[FakeStore] = []
        self._sigma = 1.0

    def call(self, name: str) -> str:
        name, interrupt, _ = name.partition("!")
        layout, _, variant = name.partition("/")
        kind = self.kind(layout)
        content = CacheContent(
            video="2" if variant == "video2" else "1", conditioning="2" if variant == "text2" else "1"
        )
        (found,) = self.shared.take([kind])
        if found is None:
            cache = FrozenCache(self._new_store, contents="hidden", is_text_live=True)
        else:
            cache = found.cache
            if reason := found.content.change_to(content):
                cache.invalidate(reason)
        cache.begin_refinement(0)
        self._sigma -= 0.01
        mode, reason = cache.decide(kind.split, self._sigma)
        if interrupt:
            cache.begin_build(kind.split)
            cache.free()
            told = "discarded"
        elif mode == "build":
            cache.begin_build(kind.split)
            cache.complete_build(kind.split, self._sigma)
            told = f"build: {reason}"
        else:
            cache.begin_use()
            cache.complete_use(self._sigma)
            told = "cached"
        self.shared.give_back(SharedCache(kind, content, "ram", cache))
        return told

    def kind(self, layout: str) -> CacheKind:
        split = RowSplit.of_clip(CLIP, 9 + ord(layout), is_text_live=True)
        return CacheKind.of("prompt", CLIP, split, FrozenCacheSpec())

    def _new_store(self, rows: int) -> Any:
        self.stores.append(FakeStore())
        return cast(Any, self.stores[-1])


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case["name"])
def test_a_cache_lives_as_the_policy_says(case: dict[str, Any]) -> None:
    caller = Caller()
    assert [caller.call(call) for call in case["calls"]] == case["expect"]


def test_what_is_kept_holds_nothing_on_the_device() -> None:
    caller = Caller()
    caller.call("A")
    assert len(caller.shared) == 1
    assert [store.num_device_bytes for store in caller.stores] == [0]


def test_the_least_recently_used_goes_first_for_the_bound_on_bytes() -> None:
    caller = Caller(max_bytes=2 * SIZE)
    for call in ("A", "B", "A"):
        caller.call(call)
    assert caller.shared.num_bytes == 2 * SIZE
    caller.stores.append(FakeStore(num_bytes=SIZE + 1))
    caller._new_store = lambda rows: caller.stores[-1]  # type: ignore[method-assign]
    caller.call("C")
    assert [bool(store.freed) for store in caller.stores] == [True, True, False]
    assert caller.shared.num_bytes == SIZE + 1


def test_a_cache_beyond_the_bound_is_not_kept_and_evicts_nothing() -> None:
    caller = Caller(max_bytes=SIZE)
    caller.call("A")
    caller.stores.append(FakeStore(num_bytes=SIZE + 1))
    caller._new_store = lambda rows: caller.stores[-1]  # type: ignore[method-assign]
    caller.call("B")
    assert [bool(store.freed) for store in caller.stores] == [False, True]
    assert caller.shared.find(caller.kind("A")) is not None


def test_a_bound_of_nothing_keeps_nothing() -> None:
    caller = Caller(max_bytes=0)
    assert [caller.call("A"), caller.call("A")] == ["build: no cache yet"] * 2
    assert len(caller.shared) == 0


def test_one_place_can_be_cleared_of_its_caches() -> None:
    caller = Caller()
    for call in ("A", "B"):
        caller.call(call)
    kept = caller.shared.find(caller.kind("A"))
    assert kept is not None
    kept.backend = "disk"
    assert caller.shared.evict("memory", "ram")
    assert not caller.shared.evict("memory", "ram")
    assert caller.shared.find(caller.kind("A")) is kept
    caller.shared.clear("the end")
    assert all(store.freed for store in caller.stores)
