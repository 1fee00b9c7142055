"""Protobuf messages to dataclasses and back, for both sides of the wire."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from h3stream import events, job
from h3stream.adapters import MAX_ADAPTERS, AdapterChoice, AdapterUse
from h3stream.errors import FieldViolation, InvalidRequestError
from h3stream.events import Event, Plan
from h3stream.fields import invalid_request, too_many
from h3stream.job import AdapterInfo, Job, JobPage, ModelPart, ServerInfo
from h3stream.mirror import Mirror
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange
from h3stream.request import (
    KV_STORAGES,
    MAX_ARTIFACTS,
    SAMPLING_MODES,
    Branch,
    ClipSpec,
    GenerateRequest,
    JobPriority,
    KvStorage,
    PreviewSpec,
    SamplingMode,
)
from h3stream.v1 import types_pb2, video_pb2

KV_STORAGE_TO_PROTO: dict[KvStorage, types_pb2.KvStorage] = {
    "gpu": types_pb2.KV_STORAGE_GPU,
    "cpu": types_pb2.KV_STORAGE_CPU,
    "cpu_pinned": types_pb2.KV_STORAGE_CPU_PINNED,
}
KV_STORAGE_FROM_PROTO: dict[int, KvStorage] = {int(v): k for k, v in KV_STORAGE_TO_PROTO.items()}
MODE_TO_PROTO: dict[SamplingMode, types_pb2.SamplingMode] = {
    "streaming": types_pb2.SAMPLING_MODE_STREAMING,
    "dense": types_pb2.SAMPLING_MODE_DENSE,
}
MODE_FROM_PROTO: dict[int, SamplingMode] = {int(v): k for k, v in MODE_TO_PROTO.items()}

PRIORITY_TO_PROTO: dict[JobPriority, video_pb2.JobPriority] = {
    "low": video_pb2.JOB_PRIORITY_LOW,
    "normal": video_pb2.JOB_PRIORITY_NORMAL,
    "high": video_pb2.JOB_PRIORITY_HIGH,
}
PRIORITY_FROM_PROTO: dict[int, JobPriority] = {
    int(video_pb2.JOB_PRIORITY_UNSPECIFIED): "normal",
    **{int(v): k for k, v in PRIORITY_TO_PROTO.items()},
}

MIRRORED: dict[type[Any], type[Message]] = {
    ClipSpec: types_pb2.ClipSpec,
    AdapterUse: types_pb2.AdapterUse,
    AdapterChoice: types_pb2.AdapterChoice,
    PreviewSpec: types_pb2.PreviewSpec,
    Branch: video_pb2.Branch,
    TimeRange: types_pb2.TimeRange,
    FrozenCacheSpec: types_pb2.FrozenCacheSpec,
    RefineSpec: types_pb2.RefineSpec,
    events.ChunkPlan: video_pb2.ChunkPlan,
    events.PlanWarning: video_pb2.Warning,
    events.Plan: video_pb2.Plan,
    events.Artifact: types_pb2.Artifact,
    events.AudioHealth: types_pb2.AudioHealth,
    events.AudioDistance: types_pb2.AudioDistance,
    events.Timings: video_pb2.Timings,
    job.JobError: video_pb2.JobError,
    job.RemovedArtifact: video_pb2.RemovedArtifact,
    job.Job: video_pb2.Job,
    job.JobPage: video_pb2.ListJobsResponse,
    job.TenantLimits: video_pb2.TenantLimits,
    job.TenantUsage: video_pb2.TenantUsage,
    job.Caller: video_pb2.Caller,
    job.AdapterInfo: types_pb2.AdapterInfo,
    job.ModelPart: types_pb2.ModelPart,
    job.ServerInfo: video_pb2.GetServerInfoResponse,
}
"""Dataclasses and the messages they mirror field by field."""

PAYLOADS: dict[str, tuple[type[Event], type[Message]]] = {
    "accepted": (events.Accepted, video_pb2.Accepted),
    "phase": (events.PhaseChange, video_pb2.PhaseChange),
    "progress": (events.Progress, video_pb2.Progress),
    "init_segment": (events.InitSegment, types_pb2.InitSegment),
    "fragment": (events.Fragment, types_pb2.Fragment),
    "warning": (events.JobWarning, video_pb2.Warning),
    "stream_complete": (events.StreamComplete, video_pb2.StreamComplete),
    "completed": (events.Completed, video_pb2.Completed),
    "preview": (events.Preview, types_pb2.Preview),
    "refine_started": (events.RefineStarted, types_pb2.RefineStarted),
    "refine_progress": (events.RefineProgress, types_pb2.RefineProgress),
    "refined_init_segment": (events.RefinedInitSegment, types_pb2.InitSegment),
    "refined_fragment": (events.RefinedFragment, types_pb2.Fragment),
    "refined_audio": (events.RefinedAudio, types_pb2.RefinedAudio),
    "refine_failed": (events.RefineFailed, types_pb2.RefineFailed),
}
"""Payloads of an Event message: the dataclass holds the payload's fields beside the event's own."""

_MIRROR = Mirror(
    MIRRORED,
    unspecified={
        "h3stream.v1.KvStorage": "gpu",
        "h3stream.v1.SamplingMode": "streaming",
        "h3stream.v1.JobPriority": "normal",
        "h3stream.v1.CacheContents": FrozenCacheSpec.contents,
        "h3stream.v1.CachePrecision": FrozenCacheSpec.precision,
        "h3stream.v1.CacheText": FrozenCacheSpec.text,
        "h3stream.v1.CacheBackend": FrozenCacheSpec.backend,
        "h3stream.v1.OnNoRoom": FrozenCacheSpec.on_no_room,
    },
)
_PAYLOAD_OF_EVENT = {cls: (name, message) for name, (cls, message) in PAYLOADS.items()}
_OPTIONAL_FIELDS = ("num_frames", "width", "height", "steps", "video_shift", "audio_shift", "sink", "seed")


def clip_spec_to_proto(clip: ClipSpec) -> types_pb2.ClipSpec:
    """The wire form of a resolved clip."""
    return _MIRROR.to_message(clip, types_pb2.ClipSpec)


def clip_spec_from_proto(message: types_pb2.ClipSpec) -> ClipSpec:
    """The resolved clip of a message; an unspecified storage is "gpu", an unspecified mode "streaming".

    Raises InvalidRequestError for a storage or a mode that does not exist.
    """
    clip: ClipSpec = _MIRROR.from_message(message)
    if clip.kv_storage not in KV_STORAGES:
        raise invalid_request([_no_kv_storage(message.kv_storage)])
    if clip.mode not in SAMPLING_MODES:
        raise invalid_request([_no_mode(message.mode)])
    return clip


def preview_spec_to_proto(preview: PreviewSpec) -> types_pb2.PreviewSpec:
    """The wire form of how stills are made."""
    return _MIRROR.to_message(preview, types_pb2.PreviewSpec)


def preview_spec_from_proto(message: types_pb2.PreviewSpec) -> PreviewSpec:
    """How stills are made, of a message."""
    preview: PreviewSpec = _MIRROR.from_message(message)
    return preview


def refine_spec_to_proto(spec: RefineSpec) -> types_pb2.RefineSpec:
    """The wire form of how a sound is refined."""
    return _MIRROR.to_message(spec, types_pb2.RefineSpec)


def refine_spec_from_proto(message: types_pb2.RefineSpec, prefix: str) -> RefineSpec:
    """How a sound is refined, of a message; what is left out takes its default.

    Raises InvalidRequestError, with one violation per field, whose names begin with `prefix`, for fields and enum
    values that do not exist and for numbers that are not finite.
    """
    span = [message.audio_range] if message.HasField("audio_range") else []
    violations = [v for part in (message, message.cache, *span) for v in _unknown_fields(part)]
    if len(message.adapters) > MAX_ADAPTERS:  # told at once: looking at each could take seconds
        told = too_many("adapters", len(message.adapters), MAX_ADAPTERS)
        raise invalid_request([FieldViolation(f"{prefix}.{told.field}", f"{prefix}.{told.description}")])
    violations += [v for choice in message.adapters for v in _unknown_fields(choice)]
    for name in ("contents", "precision", "text", "backend", "on_no_room"):
        enum: Any = message.cache.DESCRIPTOR.fields_by_name[name].enum_type
        if (number := getattr(message.cache, name)) not in enum.values_by_number:
            names = ", ".join(f"{value.name} ({value.number})" for value in enum.values if value.number)
            violations.append(FieldViolation(f"cache.{name}", f"cache.{name} is {number}; it must be one of {names}"))
    known = {violation.field for violation in violations}
    try:
        spec = RefineSpec(**_MIRROR.fields(message, RefineSpec))
    except InvalidRequestError as error:
        violations += [violation for violation in error.violations if violation.field not in known]
    if violations:
        raise invalid_request(
            [FieldViolation(f"{prefix}.{v.field}", f"{prefix}.{v.description}", v.reason) for v in violations]
        )
    return spec


def request_to_proto(request: GenerateRequest) -> video_pb2.GenerateRequest:
    """The wire form of a request; what is None is left out."""
    message = video_pb2.GenerateRequest(
        prompt=request.prompt,
        cancel_on_disconnect=request.cancel_on_disconnect,
        **{name: getattr(request, name) for name in _OPTIONAL_FIELDS},
    )
    if request.kv_storage is not None:
        message.kv_storage = KV_STORAGE_TO_PROTO[request.kv_storage]
    if request.mode is not None:
        message.mode = MODE_TO_PROTO[request.mode]
    message.adapters.extend(
        types_pb2.AdapterChoice(name=choice.name, strength=choice.strength) for choice in request.adapters
    )
    if request.preview is not None:
        message.preview.CopyFrom(preview_spec_to_proto(request.preview))
    message.artifacts.extend(request.artifacts)
    if request.refine_audio is not None:
        message.refine_audio.CopyFrom(refine_spec_to_proto(request.refine_audio))
    if request.branch is not None:
        message.branch.CopyFrom(_MIRROR.to_message(request.branch, video_pb2.Branch))
    if request.priority != "normal":
        message.priority = PRIORITY_TO_PROTO[request.priority]
    if request.deadline_s is not None:
        message.deadline_s = request.deadline_s
    message.idempotency_key = request.idempotency_key
    if request.window == "all":
        message.unlimited_window = True
    elif request.window is not None:
        message.window = request.window
    return message


def request_from_proto(message: video_pb2.GenerateRequest) -> GenerateRequest:
    """The request of a message.

    Raises InvalidRequestError, with one violation per field, for fields and enum values that do not exist, for
    `unlimited_window` set to false, and for numbers that are not finite.
    """
    violations = _unknown_fields(message)
    fields: dict[str, Any] = {
        name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL_FIELDS
    }
    if message.kv_storage != types_pb2.KV_STORAGE_UNSPECIFIED:
        fields["kv_storage"] = KV_STORAGE_FROM_PROTO.get(message.kv_storage)
        if fields["kv_storage"] is None:
            violations.append(_no_kv_storage(message.kv_storage))
    if message.mode != types_pb2.SAMPLING_MODE_UNSPECIFIED:
        fields["mode"] = MODE_FROM_PROTO.get(message.mode)
        if fields["mode"] is None:
            violations.append(_no_mode(message.mode))
    if len(message.adapters) > MAX_ADAPTERS:  # told at once: looking at each could take seconds
        violations.append(too_many("adapters", len(message.adapters), MAX_ADAPTERS))
    else:
        fields["adapters"] = tuple(
            AdapterChoice(choice.name, choice.strength if choice.HasField("strength") else None)
            for choice in message.adapters
        )
        violations += (v for choice in message.adapters for v in _unknown_fields(choice))
    if message.HasField("preview"):
        fields["preview"] = preview_spec_from_proto(message.preview)
        violations += _unknown_fields(message.preview)
    if len(message.artifacts) > MAX_ARTIFACTS:
        violations.append(too_many("artifacts", len(message.artifacts), MAX_ARTIFACTS))
    else:
        fields["artifacts"] = tuple(message.artifacts)
    if message.HasField("refine_audio"):
        try:
            fields["refine_audio"] = refine_spec_from_proto(message.refine_audio, "refine_audio")
        except InvalidRequestError as error:
            violations += error.violations
    if message.HasField("branch"):
        fields["branch"] = _MIRROR.from_message(message.branch)
        violations += _unknown_fields(message.branch)
    order, wrong = order_from_proto(message)
    fields |= order
    violations += wrong
    if message.HasField("window"):
        fields["window"] = message.window
    elif message.HasField("unlimited_window"):
        fields["window"] = "all"
        if not message.unlimited_window:
            violations.append(
                FieldViolation("unlimited_window", "unlimited_window is false; it must be true, or left out")
            )
    try:
        request = GenerateRequest(message.prompt, cancel_on_disconnect=message.cancel_on_disconnect, **fields)
    except InvalidRequestError as error:
        raise invalid_request([*violations, *error.violations]) from None
    if violations:
        raise invalid_request(violations)
    return request


def order_from_proto(
    message: video_pb2.GenerateRequest | video_pb2.RefineHeader,
) -> tuple[dict[str, Any], list[FieldViolation]]:
    """When a job is to run and what its request is called: fields of a request, and what is wrong with them."""
    fields: dict[str, Any] = {"idempotency_key": message.idempotency_key}
    if message.HasField("deadline_s"):
        fields["deadline_s"] = message.deadline_s
    if (priority := PRIORITY_FROM_PROTO.get(message.priority)) is None:
        names = ", ".join(f"{video_pb2.JobPriority.Name(value)} ({value})" for value in PRIORITY_TO_PROTO.values())
        return fields, [FieldViolation("priority", f"priority is {message.priority}; it must be one of {names}")]
    return fields | {"priority": priority}, []


def plan_request_to_proto(request: GenerateRequest) -> video_pb2.PlanGenerationRequest:
    """The wire form of a request that is only to be planned."""
    return video_pb2.PlanGenerationRequest(generation=request_to_proto(request))


def plan_request_from_proto(message: video_pb2.PlanGenerationRequest) -> GenerateRequest:
    """The request to plan; raises InvalidRequestError as `request_from_proto` does."""
    refuse_unknown_fields(message)
    return request_from_proto(message.generation)


def refuse_unknown_fields(message: Message) -> None:
    """Raises InvalidRequestError if a message has fields that do not exist in its type here."""
    if violations := _unknown_fields(message):
        raise invalid_request(violations)


def event_to_proto(event: Event) -> video_pb2.Event:
    """The wire form of an event."""
    name, payload_class = _PAYLOAD_OF_EVENT[type(event)]
    message = video_pb2.Event(
        seq=event.seq, job_id=event.job_id, media_time_ticks=event.media_time_ticks, elapsed_s=event.elapsed_s
    )
    getattr(message, name).CopyFrom(_MIRROR.to_message(event, payload_class))
    return message


def event_from_proto(message: video_pb2.Event) -> Event:
    """The event of a message; a plain Event where the payload is of a kind that does not exist here."""
    envelope: dict[str, Any] = {
        "seq": message.seq,
        "job_id": message.job_id,
        "media_time_ticks": message.media_time_ticks,
        "elapsed_s": message.elapsed_s,
    }
    name = message.WhichOneof("payload")
    if name is None:
        return Event(**envelope)
    cls, _ = PAYLOADS[name]
    return cls(**envelope, **_MIRROR.fields(getattr(message, name), cls))


def plan_to_proto(plan: Plan) -> video_pb2.Plan:
    """The wire form of a plan."""
    return _MIRROR.to_message(plan, video_pb2.Plan)


def plan_from_proto(message: video_pb2.Plan) -> Plan:
    """The plan of a message."""
    plan: Plan = _MIRROR.from_message(message)
    return plan


def job_to_proto(value: Job) -> video_pb2.Job:
    """The wire form of a job."""
    return _MIRROR.to_message(value, video_pb2.Job)


def job_from_proto(message: video_pb2.Job) -> Job:
    """The job of a message."""
    value: Job = _MIRROR.from_message(message)
    return value


def job_page_from_proto(message: video_pb2.ListJobsResponse) -> JobPage:
    """The jobs of a message."""
    page: JobPage = _MIRROR.from_message(message)
    return page


def artifact_to_proto(value: events.Artifact) -> types_pb2.Artifact:
    """The wire form of an artifact."""
    return _MIRROR.to_message(value, types_pb2.Artifact)


def artifact_from_proto(message: types_pb2.Artifact) -> events.Artifact:
    """The artifact of a message."""
    value: events.Artifact = _MIRROR.from_message(message)
    return value


def server_info_to_proto(info: ServerInfo) -> video_pb2.GetServerInfoResponse:
    """The wire form of a server's facts."""
    return _MIRROR.to_message(info, video_pb2.GetServerInfoResponse)


def server_info_from_proto(message: video_pb2.GetServerInfoResponse) -> ServerInfo:
    """The server's facts of a message."""
    info: ServerInfo = _MIRROR.from_message(message)
    return info


def model_part_to_proto(part: ModelPart) -> types_pb2.ModelPart:
    """The wire form of a part of a model."""
    return _MIRROR.to_message(part, types_pb2.ModelPart)


def adapter_to_proto(adapter: AdapterInfo) -> types_pb2.AdapterInfo:
    """The wire form of an adapter's facts."""
    return _MIRROR.to_message(adapter, types_pb2.AdapterInfo)


def adapters_from_proto(message: video_pb2.ListAdaptersResponse) -> tuple[AdapterInfo, ...]:
    """The adapters of a message."""
    return tuple(_MIRROR.from_message(adapter) for adapter in message.adapters)


def _unknown_fields(message: Message) -> list[FieldViolation]:
    name = message.DESCRIPTOR.name
    unknown: Any = UnknownFieldSet(message)
    numbers = sorted({field.field_number for field in unknown})
    return [FieldViolation(f"field {number}", f"{name} has no field number {number}") for number in numbers]


def _no_kv_storage(number: int) -> FieldViolation:
    names = ", ".join(f"{types_pb2.KvStorage.Name(value)} ({value})" for value in KV_STORAGE_TO_PROTO.values())
    return FieldViolation("kv_storage", f"kv_storage is {number}; it must be one of {names}")


def _no_mode(number: int) -> FieldViolation:
    names = ", ".join(f"{types_pb2.SamplingMode.Name(value)} ({value})" for value in MODE_TO_PROTO.values())
    return FieldViolation("mode", f"mode is {number}; it must be one of {names}")
