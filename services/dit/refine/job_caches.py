"""The frozen caches of one refinement: its own, gone when it ends, or shared ones, taken out and given back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from core.budget import ModelSize, gib
from core.cache_policy import Choice, resident_bytes, staging_bytes, working_bytes
from services.dit.refine.codecs import make_codec
from services.dit.refine.frozen_cache import NUM_TENSORS, FrozenCache
from services.dit.refine.identity import CacheContent, CacheKind
from services.dit.refine.plan import RefinePlan, cache_sizes
from services.dit.refine.refiner import StepReport
from services.dit.refine.room import CacheRooms
from services.dit.refine.shared_caches import SharedCache
from services.dit.refine.stores import Store, StoreShape

log = logging.getLogger(__name__)

HELD = "the shared cache of an earlier refinement is there"


@dataclass(frozen=True)
class BranchFacts:
    """What tells one branch's cache from another's."""

    kind: CacheKind
    content: CacheContent | None
    """None where caches are not shared: then nothing is compared."""


class JobCaches:
    """One cache for each branch, from the plan to the end of the refinement; `close` must follow."""

    def __init__(
        self,
        rooms: CacheRooms,
        model: ModelSize,
        device: torch.device,
        plan: RefinePlan,
        branches: Sequence[BranchFacts],
    ) -> None:
        """Finds places for them. Nothing is allocated before the first build.

        plan: without caches.  Raises DeviceMemoryError where there is no room, UnsupportedError for what cannot be.
        """
        spec = plan.spec.cache
        make_codec(spec.precision)  # one that this machine's torch has not is refused before any step
        self._rooms = rooms
        self._spec = spec
        self._model = model
        self._device = device
        self._shared: list[SharedCache] = []
        """Those to be given back, with what they are built of once they are."""
        self._was_rebuilt = False
        self.is_warm = False
        """Whether the first step used what an earlier refinement has built."""
        kinds = [branch.kind for branch in branches]
        taken: list[SharedCache | None] = [None] * len(kinds)
        if spec.shared:
            taken = rooms.shared.take(kinds)
        try:
            self.plan = self._placed(plan, taken)
            self.caches = [
                self._cache(branch, found) for branch, found in zip(branches, taken, strict=True)
            ]  # fmt: skip
        except BaseException:
            for found in taken:
                if found is not None:
                    rooms.shared.give_back(found)
            raise
        self._carried_over = [(cache, cache.mark().num_builds) for cache in self.caches if cache.is_valid]
        self._log_plan()

    def note_step(self, step: int, report: StepReport) -> None:
        """A step was done.  step: 1 for the first."""
        if step > 1:
            self._was_rebuilt = self._was_rebuilt or report.mode == "build"
        elif report.mode != "exact":
            self.is_warm = any(cache.mark().num_builds == num_builds for cache, num_builds in self._carried_over)

    def close(self) -> None:
        """Frees them, or gives them back where they are shared and hold what their identity says."""
        backend = self.plan.backend
        before = self._rooms.reading(backend)
        num_bytes = sum(cache.num_bytes for cache in self.caches)
        for shared in self._shared:
            if self._was_rebuilt:  # at another noise level than the first, which the identity names
                shared.cache.free()
            self._rooms.shared.give_back(shared)
        if not self._spec.shared:
            for cache in self.caches:
                cache.free()
        self._rooms.release()
        verb = "given back" if self._spec.shared else "freed"
        log.info(
            "frozen cache of %s in %s %s: before, %s; after, %s",
            gib(num_bytes),
            backend,
            verb,
            before,
            self._rooms.reading(backend),
        )

    def _placed(self, plan: RefinePlan, taken: list[SharedCache | None]) -> RefinePlan:
        """The plan with the caches' place: where the shared ones are that were found, else where there is room."""
        held = next((found.backend for found in taken if found is not None and self._may_lie_in(found.backend)), "")
        for index, found in enumerate(taken):
            if found is not None and found.backend != held:
                found.cache.free()  # it is elsewhere than this one shall be
                taken[index] = None
        new = [split for split, found in zip(plan.splits, taken, strict=True) if found is None]
        choice = Choice(held, HELD)
        if new:
            sizes = cache_sizes(new, plan.transient_bytes, self._spec, self._model)
            choice = self._rooms.choose(self._spec, sizes, held or self._spec.backend)
        total = cache_sizes(plan.splits, plan.transient_bytes, self._spec, self._model).cache_bytes
        return plan.placed(choice, total)

    def _may_lie_in(self, backend: str) -> bool:
        """Whether this refinement may have its caches there."""
        is_allowed = self._spec.allow_disk or backend != "disk"
        return is_allowed and self._spec.backend in ("auto", backend)

    def _cache(self, branch: BranchFacts, found: SharedCache | None) -> FrozenCache:
        if found is None:
            cache = FrozenCache(
                partial(self._new_store, self.plan.backend),
                contents=self._spec.contents,
                is_text_live=self._spec.text == "live",
            )
        else:
            cache = found.cache
            assert branch.content is not None, "a shared cache has an identity"
            if reason := found.content.change_to(branch.content):
                cache.invalidate(reason)
        cache.begin_refinement(self._spec.refresh_interval)
        if branch.content is not None:
            self._shared.append(SharedCache(branch.kind, branch.content, self.plan.backend, cache))
        return cache

    def _new_store(self, backend: str, num_rows: int) -> Store:
        contents = self._spec.contents
        return self._rooms.new_store(
            backend,
            StoreShape(
                num_layers=self._model.num_layers,
                num_tensors=NUM_TENSORS[contents],
                rows=num_rows,
                width=self._model.hidden if contents == "hidden" else self._model.inner,
                precision=self._spec.precision,
                device=self._device,
            ),
        )

    def _log_plan(self) -> None:
        plan, spec = self.plan, self._spec
        consequence = {
            "vram": "",
            "ram": f", about {gib(resident_bytes(plan.cache_bytes))} of it resident",
            "disk": f", all written by every build: {plan.cache_bytes} bytes",
        }[plan.backend]
        log.info(
            "frozen cache: %s, %s, text %s; %d of %d rows frozen, %d blocks; %s in %s%s, since %s; a build takes %s of "
            "device memory beside it, a cached step %s; %s",
            spec.contents,
            spec.precision,
            spec.text,
            sum(split.num_frozen for split in plan.splits),
            sum(split.num_rows for split in plan.splits),
            plan.num_blocks,
            gib(plan.cache_bytes),
            plan.backend,
            consequence,
            plan.reason,
            gib(plan.transient_bytes),
            gib(
                working_bytes(plan.num_rows, spec.contents, self._model)
                + staging_bytes(plan.backend, plan.cache_bytes, self._model)
            ),
            "warm" if self._carried_over else "cold",
        )
