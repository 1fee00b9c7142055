"""VideoService: decode the request, hand it on, send the job's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from typing import Any

from core.artifacts import ARTIFACTS, DEFAULT_ARTIFACTS
from core.geometry import MAX_CANVAS_PIXELS, valid_frame_counts
from core.prompt import MAX_PROMPT_BYTES
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.codec import (
    clip_spec_to_proto,
    plan_request_from_proto,
    preview_spec_to_proto,
    refuse_unknown_fields,
    request_from_proto,
)
from h3stream.errors import FieldViolation, InvalidRequestError
from h3stream.fields import invalid_request
from h3stream.request import ClipSpec, GenerateRequest
from h3stream.v1 import types_pb2, video_pb2, video_pb2_grpc
from orchestrator.admission import AdapterFacts, make_plan, resolve, resolve_refinement
from orchestrator.config import Settings
from orchestrator.download import find_artifact, read_artifact
from orchestrator.job import Job
from orchestrator.model_info import ModelInfo
from orchestrator.scheduler import Scheduler
from orchestrator.source import RefineDesk

SERVICE_NAME = "h3stream.v1.VideoService"


class VideoServicer(video_pb2_grpc.VideoServiceServicer):
    """The client API over a scheduler."""

    def __init__(
        self, scheduler: Scheduler, model: ModelInfo, adapters: Sequence[AdapterFacts], settings: Settings
    ) -> None:
        """adapters: the registry as the files' headers tell it, so that requests can be checked while they load."""
        self._scheduler = scheduler
        self._model = model
        self._adapters = adapters
        self._settings = settings
        self._refine_desk = RefineDesk(scheduler, model, adapters, settings)

    async def Generate(
        self, request: video_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[video_pb2.GenerateResponse]:
        prompt, clip, plan = self._admit(request_from_proto(request))
        job = self._scheduler.submit(prompt, clip, plan)
        job.request = request
        try:
            async for event in job.log.read():
                yield video_pb2.GenerateResponse(event=event)
        finally:
            if request.cancel_on_disconnect:  # an ended job is left as it is
                self._scheduler.request_cancel(job)

    async def Attach(self, request: video_pb2.AttachRequest, context: Any) -> AsyncIterator[video_pb2.AttachResponse]:
        refuse_unknown_fields(request)
        async for event in _events_from(request, self._scheduler.job(request.job_id)):
            yield video_pb2.AttachResponse(event=event)

    async def DownloadArtifact(
        self, request: video_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncIterator[video_pb2.DownloadArtifactResponse]:
        refuse_unknown_fields(request)
        job = self._scheduler.job(request.job_id)
        artifact = find_artifact(job, request.name)
        yield video_pb2.DownloadArtifactResponse(artifact=artifact)
        async for data in read_artifact(job, artifact, request.offset_bytes):
            yield video_pb2.DownloadArtifactResponse(data=data)

    async def RefineAudio(
        self, request_iterator: AsyncIterator[video_pb2.RefineAudioRequest], context: Any
    ) -> AsyncIterator[video_pb2.RefineAudioResponse]:
        job = await self._refine_desk.submit(aiter(request_iterator))
        try:
            async for event in job.log.read():
                yield video_pb2.RefineAudioResponse(event=event)
        finally:
            if job.request is not None and job.request.cancel_on_disconnect:
                self._scheduler.request_cancel(job)

    async def CancelJob(self, request: video_pb2.CancelJobRequest, context: Any) -> video_pb2.CancelJobResponse:
        refuse_unknown_fields(request)
        job = self._scheduler.job(request.job_id)
        self._scheduler.request_cancel(job)
        await job.ended.wait()
        return video_pb2.CancelJobResponse(job=job.to_proto())

    async def GetJob(self, request: video_pb2.GetJobRequest, context: Any) -> video_pb2.GetJobResponse:
        refuse_unknown_fields(request)
        return video_pb2.GetJobResponse(job=self._scheduler.job(request.job_id).to_proto())

    async def PlanGeneration(
        self, request: video_pb2.PlanGenerationRequest, context: Any
    ) -> video_pb2.PlanGenerationResponse:
        _, _, plan = self._admit(plan_request_from_proto(request))
        return video_pb2.PlanGenerationResponse(plan=plan)

    async def ListAdapters(
        self, request: video_pb2.ListAdaptersRequest, context: Any
    ) -> video_pb2.ListAdaptersResponse:
        refuse_unknown_fields(request)
        return video_pb2.ListAdaptersResponse(adapters=self._adapter_infos())

    async def GetServerInfo(
        self, request: video_pb2.GetServerInfoRequest, context: Any
    ) -> video_pb2.GetServerInfoResponse:
        refuse_unknown_fields(request)
        workers = self._scheduler.workers
        return video_pb2.GetServerInfoResponse(
            server_version=metadata.version("h3stream-server"),
            library_versions={k: v for worker in workers for k, v in worker.library_versions.items()},
            model_name=self._model.name,
            weight_digests={k: v for worker in workers for k, v in worker.weight_digests.items()},
            default_clip=clip_spec_to_proto(self._model.default_clip),
            default_dense_clip=clip_spec_to_proto(self._model.default_dense_clip),
            valid_num_frames=valid_frame_counts(),
            max_canvas_pixels=MAX_CANVAS_PIXELS,
            max_prompt_bytes=MAX_PROMPT_BYTES,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_queued_jobs=self._settings.max_queued_jobs,
            num_lanes=self._settings.lanes,
            settings=self._settings.public(),
            parts=[part for worker in workers for part in worker.parts],
            adapters=self._adapter_infos(),
            artifacts=ARTIFACTS,
            default_artifacts=DEFAULT_ARTIFACTS,
            default_preview=preview_spec_to_proto(self._settings.preview),
        )

    def _adapter_infos(self) -> list[types_pb2.AdapterInfo]:
        """The adapters in order of their names: as the DiT worker has bound them, or what is known until it has."""
        bound = [adapter for worker in self._scheduler.workers for adapter in worker.adapters]
        return sorted(bound or map(_header_info, self._adapters), key=lambda adapter: adapter.name)

    def _admit(self, request: GenerateRequest) -> tuple[str, ClipSpec, video_pb2.Plan]:
        """A checked request, or InvalidRequestError; nothing has been queued or loaded yet."""
        clip = resolve(request, self._model, self._adapters)
        preview = self._settings.preview if request.preview is None else request.preview
        spec = request.refine_audio
        refinement = None if spec is None else resolve_refinement(spec, clip, self._adapters, "refine_audio")
        bit_rate = self._settings.video_bit_rate
        plan = make_plan(clip, self._model, self._adapters, bit_rate, request.artifacts, preview, refinement)
        return request.prompt, clip, plan


def _events_from(request: video_pb2.AttachRequest, job: Job) -> AsyncIterator[video_pb2.Event]:
    """The events of a job from where the caller wants to start. Raises InvalidRequestError if it has no such place."""
    match request.WhichOneof("start"):
        case "from_chunk":
            last = len(job.plan.chunks) - 1
            if not 0 <= request.from_chunk <= last:
                raise _no_start(
                    "from_chunk", f"from_chunk is {request.from_chunk}; the chunks of the job are 0 to {last}"
                )
            return job.log.join(request.from_chunk)
        case "live":
            if not request.live:
                raise _no_start("live", "live is false; it must be true, or left out")
            return job.log.join()
        case _:
            num_events = len(job.log)
            if request.from_seq > num_events:
                raise _no_start(
                    "from_seq",
                    f"from_seq is {request.from_seq}; the job has {num_events} events so far, the most it may be",
                )
            return job.log.read(request.from_seq)


def _no_start(field: str, description: str) -> InvalidRequestError:
    return invalid_request([FieldViolation(field, description)])


def _header_info(adapter: AdapterFacts) -> types_pb2.AdapterInfo:
    """What the header of an adapter's file tells; the rest is known once it is bound to the DiT."""
    known = {field.name: getattr(adapter, field.name, None) for field in types_pb2.AdapterInfo.DESCRIPTOR.fields}
    return types_pb2.AdapterInfo(**{name: value for name, value in known.items() if value is not None})
