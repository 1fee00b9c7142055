"""A request to a checked clip and its plan, decided before anything is queued or loaded."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from core.artifacts import (
    COMPARISON,
    DEFAULT_ARTIFACTS,
    FINAL,
    LATENTS,
    REFINED_ARTIFACTS,
    SERVER_ARTIFACTS,
    artifact_violations,
)
from core.budget import AAC_BIT_RATE, expected_stream_bytes
from core.clock import emission_table
from core.geometry import chunk_table, num_audio_latents, num_samples, num_video_latents
from core.refine import RefineValues, refine_violations
from core.request import (
    ADAPTER_NAME,
    MAX_ADAPTERS,
    STREAMING_STRENGTH,
    Violation,
    clip_violations,
    clip_warnings,
    preview_violations,
    prompt_violations,
)
from h3stream.adapters import AdapterChoice, AdapterUse
from h3stream.codec import clip_spec_to_proto, preview_spec_to_proto, refine_spec_to_proto
from h3stream.errors import UnsupportedError
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec, GenerateRequest, PreviewSpec
from h3stream.v1 import video_pb2
from orchestrator.model_info import ModelInfo
from services.common.refusal import refuse

STREAMING_FIELDS = ("sink", "window", "kv_storage")
"""Fields of a request that only a clip with a KV cache has."""
REFINED_FROM = (FINAL, LATENTS)
"""Artifacts that a refinement of the clip starts from."""
NO_PREVIEW = PreviewSpec(max_side=0, every_steps=1)
"""No stills."""


class AdapterFacts(Protocol):
    """What admission must know of an adapter in the registry."""

    @property
    def name(self) -> str:
        """What requests call it."""

    @property
    def default_strength(self) -> float:
        """Strength it has where a request does not say."""

    @property
    def is_streaming(self) -> bool:
        """Whether it is the adapter that streaming needs."""

    @property
    def trained_steps(self) -> int | None:
        """Noise forwards it was trained for; None if unknown."""

    @property
    def trained_video_shift(self) -> float | None:
        """Shift of the video sigma grid it was trained with; None if unknown."""

    @property
    def trained_audio_shift(self) -> float | None:
        """Shift of the audio sigma grid it was trained with; None if unknown."""


Registry = Mapping[str, AdapterFacts]
"""Adapters by their names."""


def resolve(request: GenerateRequest, model: ModelInfo, adapters: Sequence[AdapterFacts]) -> ClipSpec:
    """The checked clip of a request: what it leaves out is filled in, what it says is not changed.

    adapters: the registry.  Raises InvalidRequestError with every violation, UnsupportedError if nothing here can
    stream.
    """
    registry = {adapter.name: adapter for adapter in adapters}
    is_dense = request.mode == "dense"
    defaults = model.default_dense_clip if is_dense else model.default_clip
    values: dict[str, Any] = _trained_into(request.adapters, registry) if is_dense else {}
    values |= {
        field.name: value
        for field in dataclasses.fields(ClipSpec)
        if (value := getattr(request, field.name)) is not None and not (is_dense and field.name in STREAMING_FIELDS)
    }
    if values.get("window") == "all":
        values["window"] = None
    # All that are named, known or not, so that a violation's position is the request's.
    values["adapters"] = tuple(_use(choice, registry, is_dense) for choice in request.adapters)
    clip = dataclasses.replace(defaults, **values)
    refuse(
        [
            *prompt_violations(request.prompt),
            *clip_violations(clip),
            *(_dense_violations(request) if is_dense else ()),
            *_registry_violations(request.adapters, registry, is_dense),
            *option_violations(request, clip, registry),
        ]
    )
    if is_dense:
        return clip
    if not any(adapter.is_streaming for adapter in adapters):
        raise UnsupportedError(
            "this server has no streaming adapter, so it can make dense clips only: ask for mode dense, or start it "
            "with --adapter PATH of the RAVEN adapter or with that file in the model directory's adapters folder"
        )
    further = tuple(use for use in clip.adapters if not registry[use.name].is_streaming)
    return dataclasses.replace(clip, adapters=further)


def option_violations(request: GenerateRequest, clip: ClipSpec, registry: Registry) -> Iterator[Violation]:
    """What is wrong with what a request asks for beside its clip."""
    yield from artifact_violations(request.artifacts)
    if request.preview is not None:
        yield from preview_violations(request.preview)
    yield from _refinement_violations(request.refine_audio, clip, registry, "refine_audio")
    yield from deadline_violations(request.deadline_s)


def deadline_violations(deadline_s: float | None) -> Iterator[Violation]:
    """What is wrong with a deadline, which is finite."""
    if deadline_s is not None and deadline_s <= 0:
        description = f"deadline_s is {deadline_s:g}; it must be above 0, or left out for none"
        yield Violation("deadline_s", description, "OUT_OF_RANGE")


def make_plan(
    clip: ClipSpec,
    model: ModelInfo,
    adapters: Sequence[AdapterFacts],
    video_bits_per_second: int,
    artifacts: Sequence[str] = (),
    preview: PreviewSpec = NO_PREVIEW,
    refinement: RefineSpec | None = None,
    branch: video_pb2.Branch | None = None,
) -> video_pb2.Plan:
    """What a checked clip makes, in full.

    adapters: the registry.  artifacts: those asked for; empty: the default.  preview: the stills on the way.
    refinement: checked and complete; None: the sound stays as it is.  branch: what it goes on from, complete; None: it
    begins at its beginning.
    """
    chunks = chunk_table(clip.num_frames)
    is_dense = clip.mode == "dense"
    warnings = [*clip_warnings(clip), *_schedule_warnings(clip, adapters)]
    if model.notice:
        warnings.append(("MODEL_NOTICE", model.notice))
    kept = [*(artifacts or DEFAULT_ARTIFACTS)]
    if refinement is not None:
        added = [name for name in REFINED_FROM if name not in kept]
        if added:
            message = (
                f"the sound is refined from {' and '.join(REFINED_FROM)}, so {' and '.join(added)} will be kept too"
            )
            warnings.append(("ARTIFACTS_ADDED", message))
        kept += [*added, *refined_artifacts(refinement)]
    plan = video_pb2.Plan(
        clip=clip_spec_to_proto(clip),
        chunks=[
            video_pb2.ChunkPlan(
                video_start=chunk.video_start,
                video_stop=chunk.video_stop,
                audio_start=chunk.audio_start,
                audio_stop=chunk.audio_stop,
                num_frames_emitted=num_frames,
            )
            for chunk, num_frames in zip(chunks, emission_table(clip.num_frames), strict=True)
        ],
        num_video_latents=num_video_latents(clip.num_frames),
        num_audio_latents=num_audio_latents(clip.num_frames),
        num_samples=num_samples(clip.num_frames),
        num_noise_forwards=clip.steps if is_dense else clip.steps * len(chunks),
        num_clean_forwards=0 if is_dense else len(chunks) - 1,
        expected_stream_bytes=expected_stream_bytes(clip.num_frames, video_bits_per_second, AAC_BIT_RATE),
        warnings=[video_pb2.Warning(reason=reason, message=message) for reason, message in warnings],
        artifacts=kept,
        preview=preview_spec_to_proto(preview),
    )
    if branch is not None:
        plan.branch.CopyFrom(branch)
        plan.num_noise_forwards -= clip.steps * branch.from_chunk
    if refinement is not None:
        plan.refine_audio.CopyFrom(refine_spec_to_proto(refinement))
    return plan


def resolve_refinement(spec: RefineSpec, clip: ClipSpec, adapters: Sequence[AdapterFacts], prefix: str) -> RefineSpec:
    """The checked refinement of a clip: what it leaves out is filled in, what it says is not changed.

    adapters: the registry.  prefix: what the names of its fields begin with.  Raises InvalidRequestError with every
    violation.
    """
    registry = {adapter.name: adapter for adapter in adapters}
    refuse(_refinement_violations(spec, clip, registry, prefix))
    return _completed(spec, clip, registry)


def make_refine_plan(
    clip: ClipSpec, model: ModelInfo, refinement: RefineSpec, video_bits_per_second: int
) -> video_pb2.Plan:
    """What a job makes that refines the sound of a clip.

    refinement: checked and complete.  video_bits_per_second: of its rendition; 0 where that holds the sound alone.
    """
    plan = make_plan(clip, model, (), video_bits_per_second, refinement=refinement)
    del plan.artifacts[:]
    plan.artifacts.extend((*refined_artifacts(refinement), *SERVER_ARTIFACTS))
    plan.num_noise_forwards = plan.num_clean_forwards = 0  # the clip's, which are done
    return plan


def refined_artifacts(refinement: RefineSpec) -> list[str]:
    """Files that a refinement leaves."""
    return [name for name in REFINED_ARTIFACTS if name != COMPARISON or refinement.compare]


def _completed(spec: RefineSpec, clip: ClipSpec, registry: Registry) -> RefineSpec:
    """A refinement with its seed and strengths filled in; an adapter that is not in the registry gets any strength."""
    uses = [_use(choice, registry, is_dense=True) for choice in spec.adapters]
    choices = tuple(AdapterChoice(use.name, use.strength) for use in uses)
    return dataclasses.replace(spec, seed=clip.seed if spec.seed is None else spec.seed, adapters=choices)


def _refinement_violations(
    spec: RefineSpec | None, clip: ClipSpec, registry: Registry, prefix: str
) -> Iterator[Violation]:
    if spec is None:
        return
    # Every strength is filled in by now, which the type of a choice cannot say.
    yield from refine_violations(cast(RefineValues, _completed(spec, clip, registry)), clip.num_frames, prefix)
    for violation in _registry_violations(spec.adapters, registry, is_dense=True):
        yield Violation(f"{prefix}.{violation.field}", f"{prefix}.{violation.description}", violation.reason)


def _use(choice: AdapterChoice, registry: Registry, is_dense: bool) -> AdapterUse:
    """An adapter with its strength filled in; one that is not in the registry gets any that is valid."""
    known = registry.get(choice.name)
    if known is not None and known.is_streaming and not is_dense:
        return AdapterUse(choice.name, STREAMING_STRENGTH)
    default = STREAMING_STRENGTH if known is None else known.default_strength
    return AdapterUse(choice.name, default if choice.strength is None else choice.strength)


def _dense_violations(request: GenerateRequest) -> Iterator[Violation]:
    for name in STREAMING_FIELDS:
        if (value := getattr(request, name)) is not None:
            description = f"{name} is {value}; a dense clip has no KV cache, so it must be left out"
            yield Violation(name, description, "NOT_IN_DENSE")


def _registry_violations(choices: Sequence[AdapterChoice], registry: Registry, is_dense: bool) -> Iterator[Violation]:
    if len(choices) > MAX_ADAPTERS:
        return  # told by their number alone
    for index, choice in enumerate(choices):
        known = registry.get(choice.name)
        if known is None:
            if ADAPTER_NAME.fullmatch(choice.name):  # else it is told that it is no name
                nearest = difflib.get_close_matches(choice.name, registry, n=1)
                hint = f"the nearest is {nearest[0]}; " if nearest else ""
                names = f"this server has {', '.join(sorted(registry))}" if registry else "this server has no adapters"
                description = f"adapters[{index}].name is {choice.name!r}; {hint}{names}"
                yield Violation(f"adapters[{index}].name", description, "UNKNOWN_ADAPTER")
        elif known.is_streaming and not is_dense and choice.strength not in (None, STREAMING_STRENGTH):
            description = (
                f"adapters[{index}].strength is {choice.strength}; {choice.name} is what makes streaming possible and "
                "is always on at strength 1, so it must be 1 or left out"
            )
            yield Violation(f"adapters[{index}].strength", description, "STREAMING_STRENGTH")


def _trained_schedule(adapter: AdapterFacts) -> dict[str, int | float]:
    """What is known of the schedule that an adapter was trained for, by the fields of a clip."""
    schedule = {
        "steps": adapter.trained_steps,
        "video_shift": adapter.trained_video_shift,
        "audio_shift": adapter.trained_audio_shift,
    }
    return {name: value for name, value in schedule.items() if value is not None}


def _trained_into(choices: Sequence[AdapterChoice], registry: Registry) -> dict[str, int | float]:
    """The schedule that the adapters named were trained for, as far as they know it; empty if they contradict."""
    schedule: dict[str, int | float] = {}
    for adapter in (registry[choice.name] for choice in choices if choice.name in registry):
        for name, trained in _trained_schedule(adapter).items():
            if schedule.setdefault(name, trained) != trained:
                return {}
    return schedule


def _schedule_warnings(clip: ClipSpec, adapters: Sequence[AdapterFacts]) -> Iterator[tuple[str, str]]:
    """(reason, message) for each adapter of a clip that was trained for other steps or shifts than the clip's."""
    named = {use.name for use in clip.adapters}
    for adapter in adapters:
        if adapter.name not in named and not (adapter.is_streaming and clip.mode == "streaming"):
            continue
        schedule = _trained_schedule(adapter)
        wrong = [name for name, trained in schedule.items() if not math.isclose(trained, getattr(clip, name))]
        if wrong:
            trained = " and ".join(f"{name} {schedule[name]:g}" for name in wrong)
            asked = " and ".join(f"{name} {getattr(clip, name):g}" for name in wrong)
            message = f"adapter {adapter.name} was trained with {trained}, but this clip has {asked}"
            yield "ADAPTER_SCHEDULE_MISMATCH", message
