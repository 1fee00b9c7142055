"""Refining a clip's sound as a verb of the worker: plan, caches, steps, and the exact steps to compare them with.

Source: docs/reference/audio-refine.md §1, §7 to §9.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from core.refine import refine_sigmas
from h3stream.errors import DeviceMemoryError
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, poll
from services.dit.adapters import AdapterBank, AdapterMix
from services.dit.model import H3Dit
from services.dit.noise import refine_noise
from services.dit.refine.identity import CacheKind, cache_content
from services.dit.refine.job_caches import BranchFacts, JobCaches
from services.dit.refine.plan import RefinePlan, exact_plan, exact_reason
from services.dit.refine.refiner import Branch, Refiner, StepReport
from services.dit.refine.room import CacheRooms
from services.dit.rows import ChunkLatents

log = logging.getLogger(__name__)

T = TypeVar("T")

BRANCH_NAMES = ("prompt", "negative prompt")
COMPARED = "it is what the cached steps are compared with"
SMALLEST_NORM = 1e-12
"""Distances are relative to no less."""


@dataclass(frozen=True, eq=False)
class RefineInputs:
    """What a refinement starts from, checked, and all on the host."""

    clip: ClipSpec
    """Its size and shifts; how it was sampled does not matter."""
    spec: RefineSpec
    """Every default filled in."""
    latents: ChunkLatents
    """Of the finished clip, float32."""
    branches: tuple[Branch, ...]
    """The prompt and, with guidance, the negative prompt; without caches."""

    @property
    def mix(self) -> AdapterMix:
        """The adapters of every forward."""
        return tuple((choice.name, cast(float, choice.strength)) for choice in self.spec.adapters)


@dataclass(frozen=True, eq=False)
class Refined:
    """What came of it."""

    latents: ChunkLatents
    """float32 on the host; a frozen video is the tensor that was given."""
    exact_audio: Tensor | None
    """Where asked to compare: the sound of exact steps with the same noise."""
    change: float
    """Relative L2 distance of the sound from the one before."""
    against_exact: float
    """Where asked to compare: that from the exact one."""
    sampling_s: float
    """Seconds of the steps."""
    exact_sampling_s: float
    """Of those to compare with."""
    is_warm: bool
    """Whether the first step used a cache of an earlier call."""


@dataclass(frozen=True, eq=False)
class RefineListener:
    """Who is told, as it happens."""

    started: Callable[[RefinePlan], None]
    """Once, before the first step."""
    stepped: Callable[[StepReport, int, int], None]
    """After each step, with the steps done and their number; not of those to compare with."""
    cancelled: Cancelled
    """Polled before every forward."""


class AudioRefinement:
    """Refines clips one at a time over one set of weights, which must be on the device."""

    def __init__(
        self,
        model: H3Dit,
        adapters: AdapterBank,
        device: torch.device,
        rooms: CacheRooms,
        weight_digests: Mapping[str, str],
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._device = device
        self._rooms = rooms
        self._weight_digests = weight_digests

    def run(self, inputs: RefineInputs, listener: RefineListener) -> Refined:
        """Refines a clip. What it allocates is gone when it ends, however it ends; shared caches stay, off the device.

        Raises DeviceMemoryError, UnsupportedError, VerbCancelled, and PhaseError for an answer that is not finite.
        """
        assert inputs.spec.seed is not None, "the clip's seed is filled in"
        poll(listener.cancelled)
        noise = refine_noise(inputs.spec.seed, inputs.clip, self._device)
        plan, caches = self._prepared(inputs, noise)
        try:
            listener.started(plan)
            latents, sampling_s = self._sampled(inputs, plan, caches, noise, listener)
            is_warm = caches is not None and caches.is_warm
        finally:
            if caches is not None:
                caches.close()
            self._rooms.release()
        exact_audio, exact_s = self._compared(inputs, latents, sampling_s, plan, noise, listener.cancelled)
        return Refined(
            latents=latents,
            exact_audio=exact_audio,
            change=relative_distance(latents.audio, inputs.latents.audio),
            against_exact=0.0 if exact_audio is None else relative_distance(latents.audio, exact_audio),
            sampling_s=sampling_s,
            exact_sampling_s=exact_s,
            is_warm=is_warm,
        )

    def _prepared(self, inputs: RefineInputs, noise: ChunkLatents) -> tuple[RefinePlan, JobCaches | None]:
        """What is about to be done, and with which caches; None: every step is exact."""
        clip, spec, size = inputs.clip, inputs.spec, self._model.size
        reason = exact_reason(clip, spec)
        plan = exact_plan(clip, spec, [len(branch.context) for branch in inputs.branches], size, reason)
        if reason:
            log.info("no frozen cache: %s", reason)
            return plan, None
        try:
            caches = JobCaches(self._rooms, size, self._device, plan, self._facts(inputs, plan, noise))
        except DeviceMemoryError as error:
            if spec.cache.on_no_room != "exact":
                raise
            log.warning("no frozen cache: %s", error.message)
            return dataclasses.replace(plan, reason=error.message), None
        return caches.plan, caches

    def _facts(self, inputs: RefineInputs, plan: RefinePlan, noise: ChunkLatents) -> list[BranchFacts]:
        clip, spec = inputs.clip, inputs.spec
        first, *_ = refine_sigmas(spec.steps, spec.audio_denoise, clip.video_shift, clip.audio_shift, spec.scheduler)
        facts = []
        for name, branch, split in zip(BRANCH_NAMES, inputs.branches, plan.splits, strict=False):
            content = None
            if spec.cache.shared:
                content = cache_content(
                    clip,
                    inputs.latents,
                    noise,
                    branch.context,
                    branch.token_tags,
                    first_sigmas=first,
                    mix=inputs.mix,
                    weight_digests=self._weight_digests,
                    compute_dtype=self._model.dtype,
                )
            facts.append(BranchFacts(CacheKind.of(name, clip, split, spec.cache), content))
        return facts

    def _sampled(
        self,
        inputs: RefineInputs,
        plan: RefinePlan,
        caches: JobCaches | None,
        noise: ChunkLatents,
        listener: RefineListener,
    ) -> tuple[ChunkLatents, float]:
        """The refined latents, on the host, and the seconds of the steps."""
        refiner, caches = self._opened(inputs, plan, caches, noise)
        seconds = 0.0
        while refiner.num_done < refiner.num_steps:
            before = "" if caches is None else self._rooms.reading(plan.backend)
            report = self._step(refiner, caches, listener.cancelled)
            seconds += report.block_s + report.outside_s
            log.debug("step %d of %d: %s", refiner.num_done, refiner.num_steps, report)
            if caches is not None:
                caches.note_step(refiner.num_done, report)
            if report.mode == "build":
                log.info(
                    "frozen cache built in step %d (%s): %s; before, %s; after, %s",
                    refiner.num_done,
                    report.reason,
                    f"{report.cache_bytes} bytes in {plan.backend}",
                    before,
                    self._rooms.reading(plan.backend),
                )
            listener.stepped(report, refiner.num_done, refiner.num_steps)
        made = refiner.latents
        return ChunkLatents(made.video.cpu(), made.audio.cpu()), seconds

    def _opened(
        self, inputs: RefineInputs, plan: RefinePlan, caches: JobCaches | None, noise: ChunkLatents
    ) -> tuple[Refiner, JobCaches | None]:
        """The pass, about to take its first step; without the caches where they may be done without."""
        if caches is not None:
            branches = [
                dataclasses.replace(branch, cache=cache)
                for branch, cache in zip(inputs.branches, caches.caches, strict=True)
            ]
            try:
                return self._with_room(lambda: self._refiner(inputs, branches, noise, "")), caches
            except DeviceMemoryError as error:
                if inputs.spec.cache.on_no_room != "exact":
                    raise
                reason = error.message
            return self._with_room(lambda: self._refiner(inputs, inputs.branches, noise, reason)), None
        return self._with_room(lambda: self._refiner(inputs, inputs.branches, noise, plan.reason)), None

    def _refiner(self, inputs: RefineInputs, branches: Sequence[Branch], noise: ChunkLatents, reason: str) -> Refiner:
        """reason: why steps are exact where branches have no cache."""
        return Refiner(
            self._model,
            self._adapters,
            inputs.mix,
            inputs.clip,
            inputs.spec,
            inputs.latents,
            branches,
            self._device,
            exact_reason=reason,
            noise=noise,
        )

    def _step(self, refiner: Refiner, caches: JobCaches | None, cancelled: Cancelled) -> StepReport:
        """The next step; exactly where there is no room for the caches and they may be done without."""
        try:
            return self._with_room(lambda: refiner.step(cancelled))
        except DeviceMemoryError as error:
            if caches is None or caches.plan.spec.cache.on_no_room != "exact":
                raise
            reason = error.message
        log.warning("the frozen cache is given up: %s", reason)
        refiner.give_up_caches(reason)
        self._rooms.release()
        return self._with_room(lambda: refiner.step(cancelled))

    def _with_room(self, attempt: Callable[[], T]) -> T:
        """What an attempt returns: where memory ran out, that of a second one, once the shared caches are gone.

        Raises DeviceMemoryError.
        """
        try:
            return attempt()
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            log.warning("memory ran out, so the shared caches go and the step is run again: %s", error)
        # Outside of the handler, whose exception holds what the attempt has allocated.
        self._rooms.clear("memory ran out")
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the device ran out of memory while refining: {error}. Ways out: a cache in host memory, contents "
                "hidden with precision int4, or no cache; where several GPUs or page-locked memory are at fault, the "
                "worker's settings device and no_pinned_caches"
            ) from error

    def _compared(
        self,
        inputs: RefineInputs,
        latents: ChunkLatents,
        sampling_s: float,
        plan: RefinePlan,
        noise: ChunkLatents,
        cancelled: Cancelled,
    ) -> tuple[Tensor | None, float]:
        """The sound of exact steps and their seconds, where asked to compare."""
        if not inputs.spec.compare:
            return None, 0.0
        if not plan.has_cache:  # they were exact
            return latents.audio, sampling_s
        refiner = self._with_room(lambda: self._refiner(inputs, inputs.branches, noise, COMPARED))
        seconds = 0.0
        while refiner.num_done < refiner.num_steps:
            report = self._with_room(lambda: refiner.step(cancelled))
            seconds += report.block_s + report.outside_s
        return refiner.latents.audio.cpu(), seconds


def relative_distance(ours: Tensor, theirs: Tensor) -> float:
    """L2 distance of two tensors over the norm of the second."""
    distance = (ours.double() - theirs.double()).norm().item()
    return float(distance / max(theirs.double().norm().item(), SMALLEST_NORM))
