"""A VideoService whose clips really play, made chunk by chunk as the test allows, and a gateway in front of it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import av
import grpc
import numpy as np

from core.budget import AAC_BIT_RATE
from core.clock import TICKS_PER_FRAME, emission_table, final_audio_latents
from core.geometry import SAMPLES_PER_AUDIO_LATENT, chunk_table, num_audio_latents, num_samples
from h3stream import codec
from h3stream.errors import GenerationError, JobCancelledError, JobNotFoundError, UnauthenticatedError
from h3stream.events import (
    Accepted,
    Artifact,
    AudioHealth,
    Completed,
    Fragment,
    InitSegment,
    JobWarning,
    PhaseChange,
    Plan,
    Preview,
    Progress,
    RefinedInitSegment,
    RefineFailed,
    StreamComplete,
    Timings,
)
from h3stream.job import Job, JobState, RemovedArtifact, ServerInfo
from h3stream.refine import RefineSpec
from h3stream.request import GenerateRequest
from h3stream.v1 import video_pb2, video_pb2_grpc
from services.common.rpc import RpcServer
from services.vae.media.boxes import AudioTrack, VideoTrack
from services.vae.media.encoders import AacEncoder, open_h264_encoder
from services.vae.media.muxer import FragmentMuxer, MediaFragment, mime_type
from tests.fakes import SERVER_INFO, EventMaker, plan_of, refinement_events

REMOVED = RemovedArtifact("audio.flac", datetime(2026, 1, 2, tzinfo=UTC), "it was older than 7 days")


@dataclass(frozen=True)
class Media:
    """A playable clip in its pieces."""

    init_segment: bytes
    mime_type: str
    fragments: tuple[tuple[int, MediaFragment], ...]
    """Each after the chunk that completes it."""
    stills: tuple[bytes, ...]
    """A still of each chunk."""

    @property
    def stream(self) -> bytes:
        return self.init_segment + b"".join(fragment.data for _, fragment in self.fragments)


def picture(frame: int, width: int, height: int) -> np.ndarray:
    """A sun that crosses the evening sky."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) / max(width, height)
    sky = np.stack([0.95 - 0.5 * y, 0.45 + 0.2 * y, 0.35 + 0.5 * y], -1)
    sun = np.exp(-60 * ((x - (frame % 120) / 120) ** 2 + (y - 0.2) ** 2))[..., None]
    hills = (y > 0.38 + 0.05 * np.sin(9 * x) + 0.02 * np.sin(23 * x))[..., None]
    colours = np.where(hills, np.array([0.12, 0.16, 0.24], np.float32), np.clip(sky + sun, 0, 1))
    return (255 * colours).astype(np.uint8)


@cache
def make_media(num_frames: int, width: int, height: int, loudness: float = 0.1) -> Media:
    """A clip through the real encoders and the real muxer, one fragment for each chunk that completes frames."""
    samples = num_samples(num_frames)
    pcm = loudness * np.sin(np.arange(samples, dtype=np.float32) * 0.086)[None].repeat(2, 0)
    pictures, sound = open_h264_encoder(width, height, 2_000_000), AacEncoder()
    video = VideoTrack(width, height, pictures.decoder_configuration, num_frames)
    audio = AudioTrack(sound.decoder_configuration, AAC_BIT_RATE, sound.priming_samples, samples)
    muxer = FragmentMuxer(video, audio)
    fragments, stills = [], []
    frame, sample = 0, 0
    for chunk, stop_frame in zip(chunk_table(num_frames), emission_table(num_frames), strict=True):
        stop = final_audio_latents(chunk.audio_stop, num_audio_latents(num_frames)) * SAMPLES_PER_AUDIO_LATENT
        packets = [pictures.encode(picture(i, width, height)) for i in range(frame, stop_frame)]
        muxer.add(packets, [*sound.encode(pcm[:, sample:stop]), *(sound.flush() if chunk.is_tail else ())])
        fragments += [(chunk.index, made) for made in muxer.take(stop_frame, is_final=chunk.is_tail)]
        stills.append(jpeg(picture(stop_frame, width // 8, height // 8)))
        frame, sample = stop_frame, stop
    return Media(muxer.init_segment(), mime_type(video, audio), tuple(fragments), tuple(stills))


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mjpeg") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.height, stream.width = pixels.shape[:2]
        stream.pix_fmt = "yuvj420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@dataclass
class LiveJob:
    """A job, its events, and whoever waits for more of them."""

    job_id: str
    request: GenerateRequest
    source_job_id: str = ""
    """The job whose sound it refines."""
    owner: str = ""
    """Key of its caller."""
    events: list[video_pb2.Event] = field(default_factory=list)
    state: JobState = "running"
    error: GenerationError | None = None
    num_frames: int = 0
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    artifacts: tuple[Artifact, ...] = ()


@dataclass
class LiveService(video_pb2_grpc.VideoServiceServicer):
    """Makes each clip once, as far as it is allowed to, for any number of readers."""

    step_s: float = 0.0
    """How long a forward takes."""
    chunks_allowed: int = 10_000
    """Chunks of every job that may be sampled so far; `allow` raises it."""
    refine_steps_allowed: int = 10_000
    """Steps of every refinement that may be done so far; `allow_refining` raises it."""
    refine_failure: str = ""
    """Why no sound can be refined."""
    has_stream: bool = True
    """Whether an encoder works."""
    refuse_with: GenerationError | None = None
    """Raised by Generate, at once."""
    api_keys: tuple[str, ...] = ()
    """Keys of callers; each sees the jobs that it has made alone. Without any, all callers are one."""
    info: ServerInfo = SERVER_INFO
    """What is told of the server."""
    jobs: dict[str, LiveJob] = field(default_factory=dict)
    num_attached: int = 0
    """Readers there are now."""
    _allowed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def allow(self, num_chunks: int) -> None:
        """Lets jobs go on up to so many chunks."""
        self.chunks_allowed = num_chunks
        self._allowed.set()

    def allow_refining(self, num_steps: int) -> None:
        """Lets refinements go on up to so many steps."""
        self.refine_steps_allowed = num_steps
        self._allowed.set()

    def media_of(self, job_id: str, name: str = "final.mp4") -> Media:
        clip = plan_of(self.jobs[job_id].request).clip
        return make_media(clip.num_frames, clip.width, clip.height, 0.2 if name.startswith("refine") else 0.1)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[video_pb2.GenerateResponse]:
        if self.refuse_with is not None:
            raise self.refuse_with
        wanted = codec.request_from_proto(request)
        self._key(context)
        plan_of(wanted)  # refuses what cannot be made
        if wanted.branch is not None:
            self._job(wanted.branch.job_id, context)
        job = self._start(wanted, owner=self._key(context))
        async for event in self._read(job, 0):
            yield video_pb2.GenerateResponse(event=event)

    async def RefineAudio(self, request_iterator: Any, context: Any) -> AsyncIterator[video_pb2.RefineAudioResponse]:
        header = (await anext(request_iterator)).header
        spec = codec.refine_spec_from_proto(header.spec, "spec")
        source = self._job(header.job_id, context)
        job = self._start(replace(source.request, refine_audio=spec), header.job_id, self._key(context))
        async for event in self._read(job, 0):
            yield video_pb2.RefineAudioResponse(event=event)

    def _start(self, request: GenerateRequest, source_job_id: str = "", owner: str = "") -> LiveJob:
        job = LiveJob(f"job-{len(self.jobs)}", request, source_job_id, owner)
        self.jobs[job.job_id] = job
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[video_pb2.AttachResponse]:
        self.num_attached += 1
        try:
            async for event in self._read(self._job(request.job_id, context), request.from_seq):
                yield video_pb2.AttachResponse(event=event)
        finally:
            self.num_attached -= 1

    async def CancelJob(self, request: Any, context: Any) -> video_pb2.CancelJobResponse:
        job = self._job(request.job_id, context)
        if job.state == "running":
            await self._end(job, "cancelled", JobCancelledError(f"{job.job_id} was cancelled", job_id=job.job_id))
        return video_pb2.CancelJobResponse(job=self._to_proto(job))

    async def GetJob(self, request: Any, context: Any) -> video_pb2.GetJobResponse:
        return video_pb2.GetJobResponse(job=self._to_proto(self._job(request.job_id, context)))

    async def GetServerInfo(self, request: Any, context: Any) -> video_pb2.GetServerInfoResponse:
        self._key(context)
        return codec.server_info_to_proto(self.info)

    async def DownloadArtifact(self, request: Any, context: Any) -> AsyncIterator[video_pb2.DownloadArtifactResponse]:
        job = self._job(request.job_id, context)
        artifact = next(artifact for artifact in job.artifacts if artifact.name == request.name)
        message = video_pb2.DownloadArtifactResponse()
        message.artifact.name, message.artifact.size_bytes = artifact.name, artifact.size_bytes
        yield message
        data = self.media_of(job.job_id, request.name).stream
        for start in range(request.offset_bytes, len(data), 10_000):
            yield video_pb2.DownloadArtifactResponse(data=data[start : start + 10_000])

    async def _read(self, job: LiveJob, from_seq: int) -> AsyncIterator[video_pb2.Event]:
        seq = from_seq
        while True:
            while seq < len(job.events):
                yield job.events[seq]
                seq += 1
            if job.state != "running":
                if job.error is not None:
                    raise job.error
                return
            async with job.grown:
                if seq >= len(job.events) and job.state == "running":
                    await job.grown.wait()

    async def _emit(self, job: LiveJob, cls: type[Any], **fields: Any) -> None:
        ticks = job.num_frames * TICKS_PER_FRAME
        event = cls(seq=len(job.events), job_id=job.job_id, media_time_ticks=ticks, **fields)
        job.events.append(codec.event_to_proto(event))
        async with job.grown:
            job.grown.notify_all()

    async def _end(self, job: LiveJob, state: JobState, error: GenerationError | None = None) -> None:
        job.state, job.error = state, error
        async with job.grown:
            job.grown.notify_all()

    async def _run(self, job: LiveJob) -> None:
        plan = plan_of(job.request)
        media = await asyncio.to_thread(make_media, plan.clip.num_frames, plan.clip.width, plan.clip.height)
        await self._emit(job, Accepted, plan=plan)
        if not job.source_job_id:
            await self._sample(job, plan, media)
        if plan.refine_audio is not None and job.state == "running":
            await self._refine(job, plan, plan.refine_audio)
        if job.state != "running":
            return
        await self._emit(
            job, Completed, artifacts=job.artifacts, latents_sha256="ab" * 32,
            audio_health=AudioHealth(0.1, 1.0, 0.0, 3, 1.0), timings=Timings(0.9, 3.2, 3.6, job.num_frames - 22),
        )  # fmt: skip
        await self._end(job, "succeeded")

    async def _sample(self, job: LiveJob, plan: Plan, media: Media) -> None:
        await self._emit(job, PhaseChange, phase="encode", chunk_index=-1)
        num_chunks = len(plan.chunks)
        for index in range(num_chunks):
            while index >= self.chunks_allowed:
                self._allowed.clear()
                await self._allowed.wait()
            await self._emit(job, PhaseChange, phase="denoise", chunk_index=index)
            for step in range(1, plan.clip.steps + 1):
                await asyncio.sleep(self.step_s)
                if job.state != "running":
                    return
                await self._emit(
                    job, Progress, phase="denoise", chunk_index=index, num_chunks=num_chunks, step=step,
                    num_steps=plan.clip.steps, num_frames_emitted=job.num_frames, queue_position=0, is_heartbeat=False,
                )  # fmt: skip
                await self._emit(
                    job, Preview, data=media.stills[index], media_type="image/jpeg", width=plan.clip.width // 8,
                    height=plan.clip.height // 8, chunk_index=index, step=step, num_steps=plan.clip.steps,
                )  # fmt: skip
            await self._emit(job, PhaseChange, phase="decode", chunk_index=index)
            for fragment in (made for chunk, made in media.fragments if chunk == index and self.has_stream):
                if fragment.fragment_index == 0:
                    await self._emit(
                        job, InitSegment, data=media.init_segment, mime_type=media.mime_type, video_encoder="libx264",
                        audio_encoder="aac",
                    )  # fmt: skip
                names = ("data", "fragment_index", "start_ticks", "duration_ticks", "first_frame", "num_frames")
                fields = {name: getattr(fragment, name) for name in (*names, "num_samples_total", "is_keyframe")}
                job.num_frames += fragment.num_frames
                await self._emit(job, Fragment, chunk_index=index, **fields)
        if self.has_stream:
            await self._emit(
                job, StreamComplete, num_fragments=len(media.fragments), num_bytes=len(media.stream),
                num_frames=job.num_frames, num_samples=plan.num_samples,
            )  # fmt: skip
        await self._emit(job, PhaseChange, phase="finish", chunk_index=-1)
        await self._emit(job, JobWarning, reason="AUDIO_CLIPPED", message="3 audio samples are at full scale")
        if self.has_stream:
            self._keep(job, *plan.artifacts, "latents.safetensors")

    async def _refine(self, job: LiveJob, plan: Plan, spec: RefineSpec) -> None:
        if job.source_job_id and self.refine_failure:
            await self._end(job, "failed", GenerationError(self.refine_failure, job_id=job.job_id))
            return
        for event in refinement_events(plan, spec, EventMaker(job.job_id), plan.clip.num_frames):
            while getattr(event, "step", 0) > self.refine_steps_allowed:
                self._allowed.clear()
                await self._allowed.wait()
            await asyncio.sleep(self.step_s if hasattr(event, "step") else 0)
            if job.state != "running":
                return
            fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
            for name in ("seq", "job_id", "media_time_ticks"):
                del fields[name]
            if self.refine_failure and isinstance(event, RefinedInitSegment):
                await self._emit(job, RefineFailed, reason="OUT_OF_MEMORY", message=self.refine_failure)
                return
            await self._emit(job, type(event), **fields)
        self._keep(job, "refined.mp4", "refined.flac")

    def _keep(self, job: LiveJob, *names: str) -> None:
        for name in names:
            data = self.media_of(job.job_id, name).stream
            sha256 = hashlib.sha256(data).hexdigest()
            job.artifacts += (Artifact(name, "video/mp4", len(data), sha256, f"jobs/{job.job_id}/{name}"),)

    def _key(self, context: Any) -> str:
        key = dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer ")
        if self.api_keys and key not in self.api_keys:
            raise UnauthenticatedError("no such API key" if key else "that needs an API key")
        return key

    def _job(self, job_id: str, context: Any) -> LiveJob:
        key = self._key(context)
        if job_id not in self.jobs or (self.api_keys and self.jobs[job_id].owner != key):
            raise JobNotFoundError(f"there is no job {job_id!r}", job_id=job_id)
        return self.jobs[job_id]

    def _to_proto(self, job: LiveJob) -> video_pb2.Job:
        value = Job(
            job_id=job.job_id,
            state=job.state,
            plan=plan_of(job.request),
            num_events=len(job.events),
            num_frames_emitted=job.num_frames,
            create_time=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        )
        removed = () if job.source_job_id else (REMOVED,)
        return codec.job_to_proto(
            replace(
                value,
                prompt=job.request.prompt,
                artifacts=job.artifacts,
                removed_artifacts=removed,
                source_job_id=job.source_job_id,
            )
        )


@asynccontextmanager
async def serve_live(service: LiveService, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    """The service on a free port; yields its address."""
    server = RpcServer(("h3stream.v1.VideoService",))
    video_pb2_grpc.add_VideoServiceServicer_to_server(service, server.server)
    if credentials is None:
        address = await server.start("127.0.0.1:0")
    else:
        address = f"127.0.0.1:{server.server.add_secure_port('127.0.0.1:0', credentials)}"
        await server.server.start()
        await server.set_serving(True)
    try:
        yield address
    finally:
        for task in service._tasks:
            task.cancel()
        await server.stop(grace_s=0)


@asynccontextmanager
async def running_gateway(address: str, *arguments: str) -> AsyncIterator[str]:
    """`python -m web.gateway` in front of the service at an address; yields "HOST:PORT"."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "web.gateway", "--server", address, "--listen", "127.0.0.1:0", *arguments,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on http://"), line
        yield line.removeprefix("listening on http://").strip()
    finally:
        process.terminate()
        await process.wait()
