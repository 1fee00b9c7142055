"""A VideoService for tests of the client: small, real gRPC, and told by a script how to misbehave."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import grpc

from core.clock import TICKS_PER_FRAME, emission_table
from core.geometry import chunk_table, num_audio_latents, num_samples, num_video_latents, valid_frame_counts
from h3stream import codec
from h3stream.adapters import AdapterUse
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.errors import (
    FieldViolation,
    GenerationError,
    IdempotencyKeyError,
    InvalidRequestError,
    JobCancelledError,
    JobNotFoundError,
    ModelLoadingError,
    OffGridError,
    ServerStoppingError,
    UnauthenticatedError,
    UnsupportedError,
)
from h3stream.events import (
    Accepted,
    Artifact,
    AudioDistance,
    AudioHealth,
    ChunkPlan,
    Completed,
    Event,
    Fragment,
    InitSegment,
    JobWarning,
    PhaseChange,
    Plan,
    PlanWarning,
    Preview,
    Progress,
    RefinedAudio,
    RefinedFragment,
    RefinedInitSegment,
    RefineFailed,
    RefineProgress,
    RefineStarted,
    StreamComplete,
    Timings,
)
from h3stream.job import AdapterInfo, Job, JobState, ServerInfo
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec, GenerateRequest, PreviewSpec
from h3stream.v1 import video_pb2, video_pb2_grpc
from services.common.rpc import RpcServer

DEFAULT_CLIP = ClipSpec(
    num_frames=39, width=64, height=64, steps=2, video_shift=12.0, audio_shift=3.0, sink=2, window=2,
    kv_storage="gpu", seed=0,
)  # fmt: skip
DEFAULT_DENSE_CLIP = replace(DEFAULT_CLIP, mode="dense", steps=5, sink=0, window=None)
NOTICE = "the weights of this model are made up"
PREVIEW = PreviewSpec(max_side=256, every_steps=1)
ARTIFACTS = ("final.mp4", "stream.mp4")
REFINED_ARTIFACTS = ("refined.mp4", "refined.flac", "refine-compare.png")
HEARTBEAT_S = 0.02


def plan_of(request: GenerateRequest) -> Plan:
    """The plan of a request; what it leaves out is DEFAULT_CLIP's, or DEFAULT_DENSE_CLIP's."""
    is_dense = request.mode == "dense"
    names = ("num_frames", "width", "height", "steps", "video_shift", "audio_shift", "sink", "kv_storage", "seed")
    clip = replace(
        DEFAULT_DENSE_CLIP if is_dense else DEFAULT_CLIP,
        **{n: v for n in names if (v := getattr(request, n)) is not None},
        adapters=tuple(AdapterUse(a.name, 1.0 if a.strength is None else a.strength) for a in request.adapters),
    )
    refine = request.refine_audio
    if refine is not None and refine.seed is None:
        refine = replace(refine, seed=clip.seed)
    if request.window is not None:
        clip = replace(clip, window=None if request.window == "all" else request.window)
    if clip.num_frames not in valid_frame_counts():
        message = f"num_frames is {clip.num_frames}; it must be 17k + 5"
        raise OffGridError(message, violations=(FieldViolation("num_frames", message, "FRAMES_OFF_GRID"),))
    chunks = chunk_table(clip.num_frames)
    return Plan(
        clip=clip,
        chunks=tuple(
            ChunkPlan(c.video_start, c.video_stop, c.audio_start, c.audio_stop, emitted)
            for c, emitted in zip(chunks, emission_table(clip.num_frames), strict=True)
        ),
        num_video_latents=num_video_latents(clip.num_frames),
        num_audio_latents=num_audio_latents(clip.num_frames),
        num_samples=num_samples(clip.num_frames),
        num_noise_forwards=clip.steps if is_dense else clip.steps * len(chunks),
        num_clean_forwards=0 if is_dense else len(chunks) - 1,
        expected_stream_bytes=100_000,
        warnings=(PlanWarning("MODEL_NOTICE", NOTICE),),
        preview=PREVIEW if request.preview is None else request.preview,
        artifacts=tuple(request.artifacts) or ARTIFACTS,
        refine_audio=request.refine_audio
        and replace(request.refine_audio, seed=request.refine_audio.seed or clip.seed),
    )


class EventMaker:
    """Makes events one after another."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._seq = 0

    def __call__(self, cls: type[Any], frames: int, **fields: Any) -> Any:
        made = cls(seq=self._seq, job_id=self._job_id, media_time_ticks=frames * TICKS_PER_FRAME, **fields)
        self._seq += 1
        return made


def events_of(plan: Plan, job_id: str = "job-0") -> Iterator[Event]:
    """The events of a job in which everything goes well; stills are among them only if the request names them."""
    make = EventMaker(job_id)
    frames = 0

    def event(cls: type[Any], **fields: Any) -> Any:
        return make(cls, frames, **fields)

    yield event(Accepted, plan=plan)
    yield event(PhaseChange, phase="encode", chunk_index=-1)
    num_chunks, num_fragments, num_bytes, frames_before_end = len(plan.chunks), 0, 0, 0
    is_dense = plan.clip.mode == "dense"

    def sampling(chunk_index: int) -> Iterator[Event]:
        yield event(PhaseChange, phase="denoise", chunk_index=chunk_index)
        for step in range(1, plan.clip.steps + 1):
            yield event(
                Progress, phase="denoise", chunk_index=chunk_index, num_chunks=num_chunks, step=step,
                num_steps=plan.clip.steps, num_frames_emitted=frames, queue_position=0, is_heartbeat=False,
            )  # fmt: skip
            is_due = step % plan.preview.every_steps == 0 or step == plan.clip.steps
            if is_due and plan.preview.max_side and plan.preview != PREVIEW:
                yield event(
                    Preview, data=b"still %d.%d" % (chunk_index, step), media_type="image/jpeg",
                    width=plan.preview.max_side, height=16, chunk_index=chunk_index, step=step,
                    num_steps=plan.clip.steps,
                )  # fmt: skip

    if is_dense:
        yield from sampling(-1)
    for index, chunk in enumerate(plan.chunks):
        if not is_dense:
            yield from sampling(index)
            frames_before_end = frames
        if index == 1:
            yield event(PhaseChange, phase="decode", chunk_index=0)  # which completes no frame by itself
            data = b"init of " + job_id.encode()
            num_bytes += len(data)
            yield event(
                InitSegment, data=data, mime_type='video/mp4; codecs="avc1.64000a,mp4a.40.2"',
                video_encoder="libx264", audio_encoder="aac",
            )  # fmt: skip
        if new := chunk.num_frames_emitted - frames:
            yield event(PhaseChange, phase="decode", chunk_index=index)
            data = bytes([index]) * 5000
            start, frames = frames, chunk.num_frames_emitted
            yield event(
                Fragment, data=data, fragment_index=num_fragments, chunk_index=index,
                start_ticks=start * TICKS_PER_FRAME, duration_ticks=new * TICKS_PER_FRAME, first_frame=start,
                num_frames=new, num_samples_total=4000 * frames // 3, is_keyframe=True,
            )  # fmt: skip
            num_fragments += 1
            num_bytes += len(data)
    yield event(
        StreamComplete, num_fragments=num_fragments, num_bytes=num_bytes, num_frames=frames,
        num_samples=plan.num_samples,
    )  # fmt: skip
    yield event(JobWarning, reason="AUDIO_CLIPPED", message="3 audio samples are at full scale")
    if plan.refine_audio is not None:
        yield from refinement_events(plan, plan.refine_audio, make, frames)
    yield event(
        Completed, artifacts=(), latents_sha256="ab" * 32, audio_health=AudioHealth(0.1, 1.0, 0.0, 3, 1.0),
        timings=Timings(0.1, 0.2, 0.3, frames_before_end),
    )  # fmt: skip


def refinement_events(plan: Plan, spec: RefineSpec, make: EventMaker, frames: int) -> Iterator[Event]:
    """The events of the refinement of a clip's sound."""
    yield make(PhaseChange, frames, phase="refine", chunk_index=-1)
    has_cache = spec.cache.enabled and spec.steps > 1
    yield make(
        RefineStarted, frames, spec=spec, num_rows=1000, num_live_rows=160, num_blocks=4, has_cache=has_cache,
        backend="ram", reason="it has no room on the device" if has_cache else "the cache is switched off",
        cache_bytes=2_000_000 * has_cache, transient_bytes=500_000,
    )  # fmt: skip
    for step in range(1, spec.steps + 1):
        mode = "exact" if not has_cache else "build" if step == 1 else "cached"
        counts = {name: 4 * (name == mode) for name in ("cached", "built", "exact")} | {"built": 4 * (mode == "build")}
        yield make(
            RefineProgress, frames, step=step, num_steps=spec.steps, mode=mode,
            reason={"exact": "the cache is switched off", "build": "no cache yet"}.get(mode, ""), num_forwards=1,
            num_blocks_cached=counts["cached"], num_blocks_built=counts["built"], num_blocks_exact=counts["exact"],
            num_query_rows=4000, num_key_rows=4000, num_fed_rows=4000, num_bytes_moved=0, block_s=0.2, outside_s=0.1,
            cache_bytes=2_000_000 * has_cache,
        )  # fmt: skip
    yield make(PhaseChange, frames, phase="decode", chunk_index=-1)
    mime_type = 'audio/mp4; codecs="mp4a.40.2"'
    yield make(
        RefinedInitSegment, frames, data=b"refined init", mime_type=mime_type, video_encoder="", audio_encoder="aac"
    )
    num_ticks = plan.clip.num_frames * TICKS_PER_FRAME
    yield make(
        RefinedFragment, frames, data=b"refined" * 100, fragment_index=0, chunk_index=-1, start_ticks=0,
        duration_ticks=num_ticks, first_frame=0, num_frames=0, num_samples_total=plan.num_samples, is_keyframe=True,
    )  # fmt: skip
    yield make(
        RefinedAudio, frames, latents_sha256="cd" * 32, num_samples=plan.num_samples,
        audio_health=AudioHealth(0.12, 0.9, 0.0, 0, 1.0), audio_health_before=AudioHealth(0.1, 1.0, 0.0, 3, 1.0),
        change=AudioDistance(0.25, 3.5, 1.2),
        against_exact=AudioDistance(0.026, 0.8, 0.99) if spec.compare else None,
        speed_ratio=3.5 if spec.compare else 0.0, sampling_s=1.8, is_warm=False,
    )  # fmt: skip


def refine_events_of(plan: Plan, artifacts: tuple[Artifact, ...], job_id: str = "job-0") -> Iterator[Event]:
    """The events of a job that refines a clip's sound, in which everything goes well."""
    assert plan.refine_audio is not None
    make = EventMaker(job_id)
    yield make(Accepted, 0, plan=plan)
    yield from refinement_events(plan, plan.refine_audio, make, 0)
    yield make(
        Completed, 0, artifacts=artifacts, latents_sha256="cd" * 32, audio_health=AudioHealth(0.12, 0.9, 0.0, 0, 1.0),
        timings=Timings(0.0, 1.8, 2.4, 0),
    )  # fmt: skip


def media_of(plan: Plan, job_id: str = "job-0") -> bytes:
    """The stream of a job in which everything goes well."""
    return b"".join(event.media for event in events_of(plan, job_id))


@dataclass
class Script:
    """What goes wrong, and when. Positions are event numbers."""

    refuse_with: GenerationError | None = None
    """Raised by every call, at once."""
    fail_at: int = -1
    """Where `fail_with` is raised."""
    fail_with: GenerationError | None = None
    drop: int = -1
    """The event that is left out."""
    repeat: int = -1
    """The event that is sent twice."""
    stop_at: int = -1
    """Where the stream ends as if all were well."""
    refine_failure: str = ""
    """Why the sound of a clip cannot be refined."""
    has_stream: bool = True
    """Whether an encoder for the media stream can be opened."""
    upload_limit: int = -1
    """Bytes of an upload after which its connection is lost."""
    silent_upload: bool = False
    """Whether the server takes nothing of an upload but its first piece."""
    silent_download: bool = False
    """Whether a download never ends."""
    cut_download: bool = False
    """Whether the next download loses its connection half way."""
    stall_at: int = -1
    """Where the job stands still, sending heartbeats, until it is cancelled or this is set to -1."""
    silent_at: int = -1
    """Where the server says nothing any more."""
    lose_at: list[int] = field(default_factory=list)
    """Where a stream loses its connection, once for each."""
    restart_at: list[int] = field(default_factory=list)
    """Where the server stops and starts again, once for each."""
    num_loading_calls: int = 0
    """Calls for events that it then refuses because it is starting, after each."""


@dataclass
class FakeVideoService(video_pb2_grpc.VideoServiceServicer):
    """Makes clips of fixed bytes and remembers what happened."""

    script: Script = field(default_factory=Script)
    api_keys: dict[str, str] = field(default_factory=dict)
    """Tenants by the keys that callers must have; without any, all callers are let in."""
    requests: list[GenerateRequest] = field(default_factory=list)
    """Requests that were accepted, in order, without their idempotency keys; the job of the n-th is "job-n"."""
    idempotency_keys: list[str] = field(default_factory=list)
    """Those of all requests for a new job that came, in order."""
    attached: list[video_pb2.AttachRequest] = field(default_factory=list)
    """Attach calls, in order."""
    cancelled: set[str] = field(default_factory=set)
    """Jobs that CancelJob ended."""
    deleted: set[str] = field(default_factory=set)
    """Jobs that DeleteJob removed."""
    listed: list[video_pb2.ListJobsRequest] = field(default_factory=list)
    """Pages that were asked for, in order."""
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller ended its Generate call early."""
    headers: list[video_pb2.RefineHeader] = field(default_factory=list)
    """Of the refinements that were accepted, in order; the job of the n-th is "refine-n"."""
    uploads: list[bytes] = field(default_factory=list)
    """What was uploaded, as far as it came."""
    downloads: list[video_pb2.DownloadArtifactRequest] = field(default_factory=list)
    """Downloads that were asked for."""
    _known: dict[str, str] = field(default_factory=dict)
    """Jobs by idempotency key."""
    _num_loading_calls: int = 0

    async def Generate(
        self, request: video_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[video_pb2.GenerateResponse]:
        self._refuse(context)
        self._refuse_loading()
        wanted = replace(codec.request_from_proto(request), idempotency_key="")
        plan = plan_of(self._resolved(wanted))
        job_id = self._named(request.idempotency_key, f"job-{len(self.requests)}")
        if job_id == f"job-{len(self.requests)}":
            self.requests.append(wanted)
        elif self.requests[int(job_id.removeprefix("job-"))] != wanted:
            raise IdempotencyKeyError(f"{request.idempotency_key} has named another request", job_id=job_id)
        async for event in self._told(events_of(plan, job_id), plan, job_id, context):
            yield _response(event)

    async def RefineAudio(
        self, request_iterator: AsyncIterator[video_pb2.RefineAudioRequest], context: Any
    ) -> AsyncIterator[video_pb2.RefineAudioResponse]:
        self._refuse(context)
        self._refuse_loading()
        header = (await anext(request_iterator)).header
        if header.HasField("upload"):
            self.uploads.append(b"")
            async for message in request_iterator:
                self.uploads[-1] += message.data
                if self.script.silent_upload:
                    await self._never()
                if 0 <= self.script.upload_limit <= len(self.uploads[-1]):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if hashlib.sha256(self.uploads[-1]).hexdigest() != header.upload.sha256:
                raise InvalidRequestError("the upload is not the file that was announced")
        else:
            self._job(header.job_id)
        job_id = self._named(header.idempotency_key, f"refine-{len(self.headers)}")
        if job_id == f"refine-{len(self.headers)}":
            self.headers.append(header)
        async for event in self._told(self._events(job_id), self._job(job_id).plan, job_id, context):
            yield video_pb2.RefineAudioResponse(event=codec.event_to_proto(event))

    async def DownloadArtifact(
        self, request: video_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncIterator[video_pb2.DownloadArtifactResponse]:
        self._refuse(context)
        self.downloads.append(request)
        artifact = artifact_of(self._job(request.job_id).job_id, request.name)
        message = video_pb2.DownloadArtifactResponse()
        message.artifact.CopyFrom(codec.artifact_to_proto(artifact))
        yield message
        data = content_of(request.job_id, request.name)
        is_cut, self.script.cut_download = self.script.cut_download, False
        yield video_pb2.DownloadArtifactResponse(data=data[request.offset_bytes : len(data) // (1 + is_cut)])
        if self.script.silent_download:
            await self._never()
        if is_cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def _told(self, events: Iterator[Event], plan: Plan, job_id: str, context: Any) -> AsyncIterator[Event]:
        """The events of a call, as the script has it."""
        script = self.script
        extra = 0  # heartbeats that pushed the later events back
        try:
            for event in _failing(events if script.has_stream else without_stream(events), script.refine_failure):
                if event.seq == script.fail_at and script.fail_with is not None:
                    raise script.fail_with
                if event.seq == script.stop_at:
                    return
                await self._lose(event, context)
                if event.seq == script.silent_at:
                    await asyncio.Event().wait()
                while event.seq == script.stall_at:
                    if job_id in self.cancelled:
                        raise JobCancelledError(f"{job_id} was cancelled", job_id=job_id)
                    yield heartbeat(event.seq + extra, plan, job_id)
                    extra += 1
                    await asyncio.sleep(HEARTBEAT_S)
                if event.seq != script.drop:
                    yield replace(event, seq=event.seq + extra)
                if event.seq == script.repeat:
                    yield event
        except (asyncio.CancelledError, GeneratorExit):  # the latter where the caller went during a write
            self.disconnected.set()
            raise

    async def Attach(self, request: video_pb2.AttachRequest, context: Any) -> AsyncIterator[video_pb2.AttachResponse]:
        self._refuse(context)
        self._refuse_loading()
        self.attached.append(request)
        events = list(self._events(request.job_id))
        if not self.script.has_stream:
            events = list(without_stream(events))
        fragments = [event for event in events if isinstance(event, Fragment)]
        match request.WhichOneof("start"):
            case "live":
                start = fragments[-1].seq
            case "from_chunk":
                start = next(event.seq for event in fragments if event.chunk_index >= request.from_chunk)
            case _:
                start = request.from_seq
        joins = request.WhichOneof("start") in ("live", "from_chunk")
        for event in _failing(events, self.script.refine_failure):
            if event.seq >= start or (joins and isinstance(event, Accepted | InitSegment)):
                await self._lose(event, context)
                if event.seq == self.script.silent_at:
                    await self._never()
                yield video_pb2.AttachResponse(event=codec.event_to_proto(event))

    async def CancelJob(self, request: video_pb2.CancelJobRequest, context: Any) -> video_pb2.CancelJobResponse:
        self._refuse(context)
        job = self._job(request.job_id)
        self.cancelled.add(job.job_id)
        return video_pb2.CancelJobResponse(job=codec.job_to_proto(self._job(job.job_id)))

    async def ListJobs(self, request: video_pb2.ListJobsRequest, context: Any) -> video_pb2.ListJobsResponse:
        self._refuse(context)
        self.listed.append(request)
        numbers = range(len(self.requests)) if not request.page_token else range(int(request.page_token))
        jobs = [self._job(f"job-{number}") for number in reversed(numbers) if f"job-{number}" not in self.deleted]
        wanted = [job for job in map(codec.job_to_proto, jobs) if not request.states or job.state in request.states]
        page = wanted[: request.page_size or 20]
        is_last = len(page) == len(wanted)
        token = "" if is_last else page[-1].job_id.removeprefix("job-")
        return video_pb2.ListJobsResponse(jobs=page, next_page_token=token)

    async def DeleteJob(self, request: video_pb2.DeleteJobRequest, context: Any) -> video_pb2.DeleteJobResponse:
        self._refuse(context)
        job = self._job(request.job_id)
        if job.state == "running":
            raise UnsupportedError(f"{job.job_id} has not ended; cancel it first", job_id=job.job_id)
        self.deleted.add(job.job_id)
        return video_pb2.DeleteJobResponse()

    async def GetJob(self, request: video_pb2.GetJobRequest, context: Any) -> video_pb2.GetJobResponse:
        self._refuse(context)
        return video_pb2.GetJobResponse(job=codec.job_to_proto(self._job(request.job_id)))

    async def PlanGeneration(
        self, request: video_pb2.PlanGenerationRequest, context: Any
    ) -> video_pb2.PlanGenerationResponse:
        self._refuse(context)
        plan = plan_of(codec.plan_request_from_proto(request))
        return video_pb2.PlanGenerationResponse(plan=codec.plan_to_proto(plan))

    async def ListAdapters(
        self, request: video_pb2.ListAdaptersRequest, context: Any
    ) -> video_pb2.ListAdaptersResponse:
        self._refuse(context)
        return video_pb2.ListAdaptersResponse(adapters=map(codec.adapter_to_proto, ADAPTERS))

    async def GetServerInfo(
        self, request: video_pb2.GetServerInfoRequest, context: Any
    ) -> video_pb2.GetServerInfoResponse:
        self._refuse(context)
        return codec.server_info_to_proto(SERVER_INFO)

    async def _never(self) -> None:
        """Waits until the caller has gone."""
        try:
            await asyncio.Event().wait()
        finally:
            self.disconnected.set()

    async def _lose(self, event: Event, context: Any) -> None:
        if event.seq in self.script.restart_at:
            self.script.restart_at.remove(event.seq)
            self._num_loading_calls = self.script.num_loading_calls
            raise ServerStoppingError("the server stops; its jobs go on when it is back", job_id=event.job_id)
        if event.seq in self.script.lose_at:
            self.script.lose_at.remove(event.seq)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # as gRPC itself says it

    def _refuse(self, context: Any) -> None:
        key = dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer ")
        if self.api_keys and key not in self.api_keys:
            raise UnauthenticatedError("that needs an API key" if not key else "no such API key")
        if self.script.refuse_with is not None:
            raise self.script.refuse_with

    def _refuse_loading(self) -> None:
        if self._num_loading_calls:
            self._num_loading_calls -= 1
            raise ModelLoadingError("the model is still being loaded")

    def _resolved(self, request: GenerateRequest) -> GenerateRequest:
        """A request with the clip that it goes on from."""
        if (branch := request.branch) is None:
            return request
        self._job(branch.job_id)
        return replace(self.requests[int(branch.job_id.removeprefix("job-"))], seed=branch.seed)

    def _events(self, job_id: str) -> Iterator[Event]:
        plan = self._job(job_id).plan
        if job_id.startswith("refine-"):
            return refine_events_of(plan, tuple(artifact_of(job_id, name) for name in REFINED_ARTIFACTS), job_id)
        return events_of(plan, job_id)

    def _job(self, job_id: str) -> Job:
        if job_id.startswith("refine-"):
            header = self.headers[int(job_id.removeprefix("refine-"))]
            plan = plan_of(GenerateRequest("a fox", refine_audio=codec.refine_spec_from_proto(header.spec, "spec")))
            return replace(EMPTY_JOB, job_id=job_id, state=self._state(job_id), plan=plan, source_job_id=header.job_id)
        number = job_id.removeprefix("job-")
        if not number.isdecimal() or int(number) >= len(self.requests) or job_id in self.deleted:
            raise JobNotFoundError(f"there is no job {job_id!r}", job_id=job_id)
        request = self.requests[int(number)]
        plan = plan_of(self._resolved(request))
        return replace(EMPTY_JOB, job_id=job_id, state=self._state(job_id), plan=plan, prompt=request.prompt)

    def _state(self, job_id: str) -> JobState:
        return "cancelled" if job_id in self.cancelled else "running"

    def _named(self, key: str, job_id: str) -> str:
        """The job that an idempotency key names, or the one to make."""
        self.idempotency_keys.append(key)
        return self._known.setdefault(key, job_id) if key else job_id


EMPTY_JOB = Job(
    job_id="", state="running", plan=plan_of(GenerateRequest("a fox")), num_events=3, num_frames_emitted=17,
    create_time=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)  # fmt: skip


def content_of(job_id: str, name: str) -> bytes:
    """The bytes of an artifact."""
    return f"{name} of {job_id} ".encode() * 1000


def artifact_of(job_id: str, name: str) -> Artifact:
    """What is told of it."""
    data = content_of(job_id, name)
    return Artifact(name, "video/mp4", len(data), hashlib.sha256(data).hexdigest(), f"jobs/{job_id}/{name}")


ADAPTERS = (
    AdapterInfo(
        name="raven", file_name="raven.safetensors", sha256="ab" * 32, format="raven", min_rank=128, max_rank=128,
        min_alpha=128.0, max_alpha=128.0, num_bound_modules=266, num_modules=266, num_parameters=1_264_353_280,
        default_strength=1.0, is_streaming=True, partition="fl2va",
    ),
    AdapterInfo(
        name="turbo", file_name="turbo-4.safetensors", sha256="", format="comfyui", min_rank=8, max_rank=64,
        min_alpha=4.0, max_alpha=32.0, num_bound_modules=200, num_modules=208, num_parameters=149_000_000,
        default_strength=0.75, is_streaming=False, partition="", trained_steps=4, trained_video_shift=6.0,
        trained_audio_shift=3.0,
    ),
)  # fmt: skip

EXAMPLES = ("A fox trots over a meadow.", "A kite over the sea, humming low.")
SERVER_INFO = ServerInfo(
    server_version="0.1.0",
    library_versions={"torch": "2"},
    model_name="fake",
    weight_digests={"transformer": "00ff"},
    default_clip=DEFAULT_CLIP,
    valid_num_frames=valid_frame_counts(),
    max_canvas_pixels=1376 * 768,
    max_prompt_bytes=16_384,
    max_message_bytes=MAX_MESSAGE_BYTES,
    max_queued_jobs=4,
    num_lanes=1,
    settings={"threads": "0"},
    default_dense_clip=DEFAULT_DENSE_CLIP,
    default_preview=PREVIEW,
    artifacts=ARTIFACTS,
    default_artifacts=ARTIFACTS,
    parts=(),
    adapters=ADAPTERS,
    examples=EXAMPLES,
)


def heartbeat(seq: int, plan: Plan, job_id: str) -> Progress:
    """An event that only shows that the job is alive."""
    return Progress(
        seq=seq, job_id=job_id, media_time_ticks=0, phase="denoise", chunk_index=0, num_chunks=len(plan.chunks), step=0,
        num_steps=plan.clip.steps, num_frames_emitted=0, queue_position=0, is_heartbeat=True,
    )  # fmt: skip


@asynccontextmanager
async def serve_video(
    service: FakeVideoService, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Serves on a free port or on that of an address, with the server's own limits and error handling; yields the
    address."""
    server = RpcServer(("h3stream.v1.VideoService",))
    video_pb2_grpc.add_VideoServiceServicer_to_server(service, server.server)
    try:
        if credentials is None:
            yield await server.start(address)
        else:
            port = server.server.add_secure_port(address, credentials)
            await server.server.start()
            yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0)


def _failing(events: Iterator[Event] | list[Event], message: str) -> Iterator[Event]:
    """The events, or those of a job whose sound cannot be refined."""
    num_left_out = 0
    for event in events:
        if message and isinstance(event, RefineStarted):
            yield RefineFailed(
                seq=event.seq, job_id=event.job_id, media_time_ticks=event.media_time_ticks, reason="OUT_OF_MEMORY",
                message=message,
            )  # fmt: skip
            num_left_out = -1
        elif num_left_out < 0 and not isinstance(event, Completed):
            num_left_out -= 1
        else:
            yield replace(event, seq=event.seq + min(0, num_left_out + 1))


def without_stream(events: Iterable[Event]) -> Iterator[Event]:
    """The events of a job for whose media stream no encoder could be opened."""
    for seq, event in enumerate(event for event in events if not event.media):
        if isinstance(event, StreamComplete):
            yield JobWarning(
                seq=seq, job_id=event.job_id, media_time_ticks=0, reason="STREAM_FAILED", message="no encoder can open"
            )
        elif isinstance(event, Completed):
            yield replace(event, seq=seq, artifacts=(artifact_of(event.job_id, "audio.flac"),))
        else:
            yield replace(event, seq=seq)


def _response(event: Event) -> video_pb2.GenerateResponse:
    return video_pb2.GenerateResponse(event=codec.event_to_proto(event))
