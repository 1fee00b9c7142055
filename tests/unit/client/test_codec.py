"""Every message and its dataclass say the same, in both directions."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from h3stream import codec, events, job, refine
from h3stream.adapters import AdapterChoice, AdapterUse
from h3stream.errors import InvalidRequestError
from h3stream.events import Event
from h3stream.request import (
    JOB_PRIORITIES,
    KV_STORAGES,
    SAMPLING_MODES,
    Branch,
    ClipSpec,
    GenerateRequest,
    PreviewSpec,
)
from h3stream.v1 import types_pb2, video_pb2

M = TypeVar("M", bound=Message)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TIME = st.datetimes(datetime(1970, 1, 2), datetime(9999, 1, 1), timezones=st.just(UTC))
PHASE = st.sampled_from(get_args(events.Phase))

MODE = st.sampled_from(SAMPLING_MODES)

CLIP = st.builds(
    ClipSpec, num_frames=INT32, width=INT32, height=INT32, steps=INT32, video_shift=FLOAT, audio_shift=FLOAT,
    sink=INT32, window=st.none() | INT32, kv_storage=st.sampled_from(KV_STORAGES), seed=UINT64, mode=MODE,
    adapters=st.lists(st.builds(AdapterUse, name=TEXT, strength=FLOAT), max_size=2).map(tuple),
)  # fmt: skip
PREVIEW = st.builds(PreviewSpec, max_side=INT32, every_steps=INT32)
NAME = st.text("abc.-", max_size=8)
CHOICES = st.lists(st.builds(AdapterChoice, name=TEXT, strength=st.none() | FLOAT), max_size=2).map(tuple)
REFINE = st.builds(
    refine.RefineSpec, steps=INT32, audio_denoise=FLOAT, video_denoise=FLOAT, sampler=NAME, scheduler=NAME, cfg=FLOAT,
    negative_prompt=TEXT, seed=st.none() | UINT64, adapters=CHOICES,
    audio_range=st.none() | st.builds(refine.TimeRange, start_s=FLOAT, end_s=FLOAT), compare=st.booleans(),
    cache=st.builds(
        refine.FrozenCacheSpec, enabled=st.booleans(), contents=st.sampled_from(get_args(refine.CacheContents)),
        precision=st.sampled_from(get_args(refine.CachePrecision)), text=st.sampled_from(get_args(refine.CacheText)),
        refresh_interval=INT32, backend=st.sampled_from(get_args(refine.CacheBackend)), allow_disk=st.booleans(),
        vram_margin_gb=FLOAT, shared=st.booleans(), on_no_room=st.sampled_from(get_args(refine.OnNoRoom)),
    ),
)  # fmt: skip
BRANCH = st.builds(Branch, job_id=TEXT, from_chunk=INT32, prompt=st.none() | TEXT, seed=st.none() | UINT64)
PRIORITY = st.sampled_from(JOB_PRIORITIES)
REQUEST = st.builds(
    GenerateRequest, prompt=TEXT, num_frames=st.none() | INT32, width=st.none() | INT32, height=st.none() | INT32,
    steps=st.none() | INT32, video_shift=st.none() | FLOAT, audio_shift=st.none() | FLOAT, sink=st.none() | INT32,
    window=st.none() | INT32 | st.just("all"), kv_storage=st.none() | st.sampled_from(KV_STORAGES),
    seed=st.none() | UINT64, cancel_on_disconnect=st.booleans(), mode=st.none() | MODE,
    adapters=CHOICES, preview=st.none() | PREVIEW, artifacts=st.lists(NAME, max_size=2).map(tuple),
    refine_audio=st.none() | REFINE, branch=st.none() | BRANCH, priority=PRIORITY, deadline_s=st.none() | FLOAT,
    idempotency_key=NAME,
)  # fmt: skip
CHUNK = st.builds(
    events.ChunkPlan, video_start=INT32, video_stop=INT32, audio_start=INT32, audio_stop=INT32, num_frames_emitted=INT32
)
PLAN = st.builds(
    events.Plan, clip=CLIP, chunks=st.lists(CHUNK, max_size=3).map(tuple), num_video_latents=INT32,
    num_audio_latents=INT32, num_samples=INT64, num_noise_forwards=INT32, num_clean_forwards=INT32,
    expected_stream_bytes=INT64,
    warnings=st.lists(st.builds(events.PlanWarning, reason=TEXT, message=TEXT), max_size=2).map(tuple),
    preview=PREVIEW, artifacts=st.lists(NAME, max_size=2).map(tuple), refine_audio=st.none() | REFINE,
    branch=st.none() | BRANCH,
)  # fmt: skip
ARTIFACT = st.builds(events.Artifact, name=TEXT, media_type=TEXT, size_bytes=INT64, sha256=TEXT, relative_path=TEXT)
HEALTH = st.builds(
    events.AudioHealth, std=FLOAT, peak=FLOAT, dc_offset=FLOAT, num_clipped_samples=INT64, normalisation_divisor=FLOAT
)
TIMINGS = st.builds(
    events.Timings, first_fragment_s=FLOAT, sampling_s=FLOAT, total_s=FLOAT, num_frames_before_sampling_end=INT32
)
DISTANCE = st.builds(events.AudioDistance, latents=FLOAT, log_mel_db=FLOAT, rms_ratio=FLOAT)
ENVELOPE: dict[str, Any] = {"seq": UINT64, "job_id": TEXT, "media_time_ticks": INT64, "elapsed_s": FLOAT}
EVENT = st.one_of(
    st.builds(events.Accepted, **ENVELOPE, plan=PLAN),
    st.builds(events.PhaseChange, **ENVELOPE, phase=PHASE, chunk_index=INT32),
    st.builds(
        events.Progress, **ENVELOPE, phase=PHASE, chunk_index=INT32, num_chunks=INT32, step=INT32, num_steps=INT32,
        num_frames_emitted=INT32, queue_position=INT32, is_heartbeat=st.booleans(),
    ),
    st.builds(
        events.InitSegment, **ENVELOPE, data=st.binary(), mime_type=TEXT, video_encoder=TEXT, audio_encoder=TEXT
    ),
    st.builds(
        events.Fragment, **ENVELOPE, data=st.binary(), fragment_index=INT32, chunk_index=INT32, start_ticks=INT64,
        duration_ticks=INT64, first_frame=INT32, num_frames=INT32, num_samples_total=INT64, is_keyframe=st.booleans(),
    ),
    st.builds(
        events.Preview, **ENVELOPE, data=st.binary(), media_type=TEXT, width=INT32, height=INT32, chunk_index=INT32,
        step=INT32, num_steps=INT32,
    ),
    st.builds(events.JobWarning, **ENVELOPE, reason=TEXT, message=TEXT),
    st.builds(
        events.StreamComplete, **ENVELOPE, num_fragments=INT32, num_bytes=INT64, num_frames=INT32, num_samples=INT64
    ),
    st.builds(
        events.RefineStarted, **ENVELOPE, spec=REFINE, num_rows=INT64, num_live_rows=INT64, num_blocks=INT32,
        has_cache=st.booleans(), backend=st.sampled_from(get_args(refine.CacheBackend)), reason=TEXT, cache_bytes=INT64,
        transient_bytes=INT64,
    ),
    st.builds(
        events.RefineProgress, **ENVELOPE, step=INT32, num_steps=INT32, mode=TEXT, reason=TEXT, num_forwards=INT32,
        num_blocks_cached=INT32, num_blocks_built=INT32, num_blocks_exact=INT32, num_query_rows=INT64,
        num_key_rows=INT64, num_fed_rows=INT64, num_bytes_moved=INT64, block_s=FLOAT, outside_s=FLOAT,
        cache_bytes=INT64,
    ),
    st.builds(
        events.RefinedInitSegment, **ENVELOPE, data=st.binary(), mime_type=TEXT, video_encoder=TEXT, audio_encoder=TEXT
    ),
    st.builds(
        events.RefinedFragment, **ENVELOPE, data=st.binary(), fragment_index=INT32, chunk_index=INT32,
        start_ticks=INT64, duration_ticks=INT64, first_frame=INT32, num_frames=INT32, num_samples_total=INT64,
        is_keyframe=st.booleans(),
    ),
    st.builds(
        events.RefinedAudio, **ENVELOPE, latents_sha256=TEXT, num_samples=INT64, audio_health=HEALTH,
        audio_health_before=HEALTH, change=DISTANCE, against_exact=st.none() | DISTANCE, speed_ratio=FLOAT,
        sampling_s=FLOAT, is_warm=st.booleans(),
    ),
    st.builds(events.RefineFailed, **ENVELOPE, reason=TEXT, message=TEXT),
    st.builds(
        events.Completed, **ENVELOPE, artifacts=st.lists(ARTIFACT, max_size=2).map(tuple), latents_sha256=TEXT,
        audio_health=HEALTH, timings=TIMINGS,
    ),
)  # fmt: skip
JOB = st.builds(
    job.Job, job_id=TEXT, state=st.sampled_from(get_args(job.JobState)), plan=PLAN, num_events=UINT64,
    num_frames_emitted=INT32, create_time=TIME, end_time=st.none() | TIME,
    error=st.none() | st.builds(job.JobError, reason=TEXT, message=TEXT, phase=PHASE, chunk_index=INT32),
    artifacts=st.lists(ARTIFACT, max_size=2).map(tuple),
    removed_artifacts=st.lists(
        st.builds(job.RemovedArtifact, name=TEXT, remove_time=TIME, message=TEXT), max_size=2
    ).map(tuple),
    source_job_id=TEXT, tenant=TEXT, prompt=TEXT, priority=PRIORITY, queue_position=INT32, num_resumes=INT32,
)  # fmt: skip
CALLER = st.builds(
    job.Caller, tenant=TEXT, scopes=st.lists(NAME, max_size=2).map(tuple),
    limits=st.builds(
        job.TenantLimits, max_running_jobs=INT32, max_queued_jobs=INT32, max_pending_frames=INT64,
        max_stored_bytes=INT64,
    ),
    usage=st.builds(
        job.TenantUsage, num_running_jobs=INT32, num_queued_jobs=INT32, num_pending_frames=INT64,
        num_stored_bytes=INT64,
    ),
)  # fmt: skip
NAMES = st.dictionaries(TEXT, TEXT, max_size=2)
PART = st.builds(
    job.ModelPart, component=TEXT, layout=TEXT, source=TEXT, data_types=TEXT, num_parameters=INT64, num_bytes=INT64
)
ADAPTERS = st.lists(
    st.builds(
        job.AdapterInfo, name=TEXT, file_name=TEXT, sha256=TEXT, format=TEXT, min_rank=INT32, max_rank=INT32,
        min_alpha=FLOAT, max_alpha=FLOAT, num_bound_modules=INT32, num_modules=INT32, num_parameters=INT64,
        default_strength=FLOAT, is_streaming=st.booleans(), partition=TEXT, trained_steps=st.none() | INT32,
        trained_video_shift=st.none() | FLOAT, trained_audio_shift=st.none() | FLOAT,
    ),
    max_size=2,
).map(tuple)  # fmt: skip
SERVER_INFO = st.builds(
    job.ServerInfo, server_version=TEXT, library_versions=NAMES, model_name=TEXT, weight_digests=NAMES,
    default_clip=CLIP, valid_num_frames=st.lists(INT32, max_size=3).map(tuple), max_canvas_pixels=INT64,
    max_prompt_bytes=INT32, max_message_bytes=INT32, max_queued_jobs=INT32, num_lanes=INT32, settings=NAMES,
    default_dense_clip=CLIP, parts=st.lists(PART, max_size=2).map(tuple), adapters=ADAPTERS,
    default_preview=PREVIEW, artifacts=st.lists(NAME, max_size=2).map(tuple),
    default_artifacts=st.lists(NAME, max_size=2).map(tuple), caller=st.none() | CALLER,
    examples=st.lists(TEXT, max_size=2).map(tuple),
)  # fmt: skip


def over_the_wire(message: M) -> M:
    """The message as the other side reads it."""
    return type(message).FromString(message.SerializeToString())


@given(CLIP)
def test_a_clip_comes_back_as_it_was(clip: ClipSpec) -> None:
    assert codec.clip_spec_from_proto(over_the_wire(codec.clip_spec_to_proto(clip))) == clip


@given(REQUEST)
def test_a_request_comes_back_as_it_was(request: GenerateRequest) -> None:
    assert codec.request_from_proto(over_the_wire(codec.request_to_proto(request))) == request
    assert codec.plan_request_from_proto(over_the_wire(codec.plan_request_to_proto(request))) == request


@given(EVENT)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert codec.event_from_proto(over_the_wire(codec.event_to_proto(event))) == event


@given(PLAN)
def test_a_plan_comes_back_as_it_was(plan: events.Plan) -> None:
    assert codec.plan_from_proto(over_the_wire(codec.plan_to_proto(plan))) == plan


@given(JOB)
def test_a_job_comes_back_as_it_was(value: job.Job) -> None:
    assert codec.job_from_proto(over_the_wire(codec.job_to_proto(value))) == value


@given(SERVER_INFO)
def test_a_server_s_facts_come_back_as_they_were(info: job.ServerInfo) -> None:
    assert codec.server_info_from_proto(over_the_wire(codec.server_info_to_proto(info))) == info


@given(SERVER_INFO)
def test_adapters_come_back_as_they_were(info: job.ServerInfo) -> None:
    message = video_pb2.ListAdaptersResponse(adapters=codec.server_info_to_proto(info).adapters)
    assert codec.adapters_from_proto(over_the_wire(message)) == info.adapters


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        *codec.MIRRORED.items(),
        *codec.PAYLOADS.values(),
        (GenerateRequest, video_pb2.GenerateRequest),
    ],
    ids=lambda value: value.__name__,
)
def test_a_dataclass_has_the_fields_of_its_message(cls: type[Any], message: type[Message]) -> None:
    envelope = {field.name for field in dataclasses.fields(Event)} if issubclass(cls, Event) else set()
    expected = {field.name for field in message.DESCRIPTOR.fields}
    if cls is GenerateRequest:
        expected.remove("unlimited_window")  # window "all"
    assert {field.name for field in dataclasses.fields(cls)} - envelope == expected


def test_every_payload_of_an_event_has_its_dataclass() -> None:
    payloads = video_pb2.Event.DESCRIPTOR.oneofs_by_name["payload"].fields
    assert set(codec.PAYLOADS) == {field.name for field in payloads}
    assert {cls for cls, _ in codec.PAYLOADS.values()} == set(Event.__subclasses__())


@pytest.mark.parametrize(
    ("kind", "enum"), [(events.Phase, types_pb2.Phase), (job.JobState, video_pb2.JobState)], ids=["Phase", "JobState"]
)
def test_the_names_of_an_enum_are_those_of_the_contract(kind: Any, enum: Any) -> None:
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    names = {name.removeprefix(prefix).lower() for name in enum.keys()}  # noqa: SIM118 - an enum wrapper, no dict
    assert names - {"unspecified"} | {"unknown"} == set(get_args(kind))


def test_the_kv_storages_are_those_of_the_contract() -> None:
    assert {0, *codec.KV_STORAGE_FROM_PROTO} == set(types_pb2.KvStorage.values())
    assert set(codec.KV_STORAGE_TO_PROTO) == set(KV_STORAGES)


def test_the_modes_are_those_of_the_contract() -> None:
    assert {0, *codec.MODE_FROM_PROTO} == set(types_pb2.SamplingMode.values())
    assert set(codec.MODE_TO_PROTO) == set(SAMPLING_MODES)


def test_a_message_reads_as_it_is_documented() -> None:
    message = video_pb2.Event(
        seq=7, job_id="job-1", media_time_ticks=68_000, phase=video_pb2.PhaseChange(phase=types_pb2.PHASE_COMMIT)
    )
    assert codec.event_from_proto(message) == events.PhaseChange(
        seq=7, job_id="job-1", media_time_ticks=68_000, phase="commit", chunk_index=0
    )


def test_a_request_says_only_what_was_set() -> None:
    assert codec.request_to_proto(GenerateRequest("a fox")) == video_pb2.GenerateRequest(prompt="a fox")
    message = codec.request_to_proto(GenerateRequest("a fox", window=0, seed=0, num_frames=0))
    assert [message.HasField(name) for name in ("window", "seed", "num_frames", "width")] == [True, True, True, False]
    message = codec.request_to_proto(GenerateRequest("a fox", adapters=(AdapterChoice("a"), AdapterChoice("b", 0.5))))
    assert [choice.HasField("strength") for choice in message.adapters] == [False, True]


def test_what_a_newer_server_sends_is_unknown_and_no_error() -> None:
    newer = video_pb2.Event.FromString(
        video_pb2.Event(seq=3, job_id="job-1").SerializeToString() + b"\xa2\x06\x01x"  # field 100, one byte
    )
    assert codec.event_from_proto(newer) == Event(seq=3, job_id="job-1", media_time_ticks=0)
    phase = video_pb2.PhaseChange(phase=99)  # type: ignore[arg-type]
    event = codec.event_from_proto(video_pb2.Event(phase=phase))
    assert isinstance(event, events.PhaseChange)
    assert event.phase == "unknown"


def test_a_refinement_says_its_defaults_where_nothing_is_said() -> None:
    assert codec.refine_spec_from_proto(types_pb2.RefineSpec(), "spec") == refine.RefineSpec()
    request = codec.request_from_proto(video_pb2.GenerateRequest(prompt="a fox", refine_audio={"steps": 4}))
    assert request.refine_audio == refine.RefineSpec(steps=4)


def test_a_refinement_names_everything_that_is_wrong_with_it() -> None:
    message = types_pb2.RefineSpec(cfg=float("nan"), cache={"contents": 9, "vram_margin_gb": float("inf")})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequestError) as raised:
        codec.request_from_proto(video_pb2.GenerateRequest(prompt="a fox", refine_audio=message))
    assert {violation.field for violation in raised.value.violations} == {
        "refine_audio.cfg", "refine_audio.cache.contents", "refine_audio.cache.vram_margin_gb"
    }  # fmt: skip


def test_an_unspecified_storage_of_a_clip_is_the_gpu_and_an_unspecified_mode_streaming() -> None:
    clip = codec.clip_spec_from_proto(types_pb2.ClipSpec(num_frames=22))
    assert (clip.kv_storage, clip.mode) == ("gpu", "streaming")


@pytest.mark.parametrize("field", ["kv_storage", "mode"])
def test_a_storage_or_a_mode_that_does_not_exist_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} is 99; it must be one of "):
        codec.clip_spec_from_proto(types_pb2.ClipSpec(**{field: 99}))


def test_a_request_names_everything_that_is_wrong_with_it() -> None:
    message = video_pb2.GenerateRequest(
        prompt="a fox",
        kv_storage=99,  # type: ignore[arg-type]
        mode=99,  # type: ignore[arg-type]
        unlimited_window=False,
        video_shift=float("nan"),
        adapters=[types_pb2.AdapterChoice(name="turbo", strength=float("inf"))],
    )
    message.adapters[0].MergeFromString(b"\xf8\x07\x01")  # field 127
    message.MergeFromString(b"\xf8\x07\x01\xf8\x07\x02\xa2\x06\x01x")  # field 127 twice, field 100
    with pytest.raises(InvalidRequestError) as caught:
        codec.request_from_proto(message)
    assert [(v.field, v.description) for v in caught.value.violations] == [
        ("field 100", "GenerateRequest has no field number 100"),
        ("field 127", "GenerateRequest has no field number 127"),
        (
            "kv_storage",
            "kv_storage is 99; it must be one of KV_STORAGE_GPU (1), KV_STORAGE_CPU (2), KV_STORAGE_CPU_PINNED (3)",
        ),
        ("mode", "mode is 99; it must be one of SAMPLING_MODE_STREAMING (1), SAMPLING_MODE_DENSE (2)"),
        ("field 127", "AdapterChoice has no field number 127"),
        ("unlimited_window", "unlimited_window is false; it must be true, or left out"),
        ("video_shift", "video_shift is nan; it must be a finite number"),
        ("adapters[0].strength", "adapters[0].strength is inf; it must be a finite number"),
    ]


def test_more_adapters_than_a_message_holds_are_refused_without_a_look_at_each() -> None:
    message = video_pb2.GenerateRequest(prompt="a fox", adapters=65 * [types_pb2.AdapterChoice(strength=math.nan)])
    with pytest.raises(InvalidRequestError) as caught:
        codec.request_from_proto(message)
    assert [(v.field, v.description) for v in caught.value.violations] == [
        ("adapters", "adapters holds 65 adapters; a message holds at most 64")
    ]


def test_unknown_fields_around_a_request_to_plan_are_refused_too() -> None:
    message = video_pb2.PlanGenerationRequest(generation=video_pb2.GenerateRequest(prompt="a fox"))
    message.MergeFromString(b"\xf8\x07\x01")
    with pytest.raises(InvalidRequestError, match="PlanGenerationRequest has no field number 127"):
        codec.plan_request_from_proto(message)
    empty = video_pb2.GetJobRequest(job_id="job-1")
    codec.refuse_unknown_fields(empty)
    empty.MergeFromString(b"\xf8\x07\x01")
    with pytest.raises(InvalidRequestError, match="GetJobRequest has no field number 127"):
        codec.refuse_unknown_fields(empty)
