"""VideoService and JobService: decode the request, hand it on, encode the answer.

Streams of VideoService are the edge's, which JobService tells where to read them (`orchestrator/edge.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from grpc import aio

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
from h3stream.request import ClipSpec, GenerateRequest
from h3stream.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2, video_pb2, video_pb2_grpc
from orchestrator.admission import AdapterFacts, make_plan, resolve, resolve_refinement
from orchestrator.config import Settings
from orchestrator.download import find_artifact
from orchestrator.job import Job
from orchestrator.model_info import ModelInfo
from orchestrator.scheduler import Scheduler
from orchestrator.source import RefineDesk

SERVICE_NAME = "h3stream.v1.VideoService"


def add_services(
    server: aio.Server, scheduler: Scheduler, model: ModelInfo, adapters: Sequence[AdapterFacts], settings: Settings
) -> None:
    """Adds VideoService and JobService, for the edge, to a server."""
    servicer: Any = VideoServicer(scheduler, model, adapters, settings)  # type: ignore[abstract] # the rest is the edge's
    video_pb2_grpc.add_VideoServiceServicer_to_server(servicer, server)
    jobs_pb2_grpc.add_JobServiceServicer_to_server(servicer, server)


class VideoServicer(video_pb2_grpc.VideoServiceServicer, jobs_pb2_grpc.JobServiceServicer):
    """The client API over a scheduler, but for what the edge does itself."""

    def __init__(
        self, scheduler: Scheduler, model: ModelInfo, adapters: Sequence[AdapterFacts], settings: Settings
    ) -> None:
        """adapters: the registry as the files' headers tell it, so that requests can be checked while they load."""
        self._scheduler = scheduler
        self._model = model
        self._adapters = adapters
        self._settings = settings
        self._refine_desk = RefineDesk(scheduler, model, adapters, settings)

    async def Submit(self, request: jobs_pb2.SubmitRequest, context: Any) -> AsyncIterator[jobs_pb2.SubmitResponse]:
        generation = request.generation
        prompt, clip, plan = self._admit(request_from_proto(generation))
        job = self._scheduler.submit(prompt, clip, plan)
        job.request = generation
        async with self._submitted(job):
            yield jobs_pb2.SubmitResponse(job_id=job.job_id)

    async def SubmitRefinement(
        self, request_iterator: AsyncIterator[jobs_pb2.SubmitRefinementRequest], context: Any
    ) -> AsyncIterator[jobs_pb2.SubmitRefinementResponse]:
        messages = (request.refinement async for request in request_iterator)
        job = await self._refine_desk.submit(messages)
        async with self._submitted(job):
            yield jobs_pb2.SubmitRefinementResponse(job_id=job.job_id)

    async def Follow(self, request: jobs_pb2.FollowRequest, context: Any) -> AsyncIterator[jobs_pb2.FollowResponse]:
        job_log = self._scheduler.job(request.job_id).log
        async for num_events in job_log.follow():
            yield jobs_pb2.FollowResponse(path=str(job_log.path), num_events=num_events)

    async def FindArtifact(self, request: jobs_pb2.FindArtifactRequest, context: Any) -> jobs_pb2.FindArtifactResponse:
        refuse_unknown_fields(request.download)
        job = self._scheduler.job(request.download.job_id)
        artifact = find_artifact(job, request.download.name, request.download.offset_bytes)
        return jobs_pb2.FindArtifactResponse(artifact=artifact, path=str(job.directory / artifact.name))

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

    @asynccontextmanager
    async def _submitted(self, job: Job) -> AsyncIterator[None]:
        """Around telling the submitter of a job, which lasts for as long as the submitter must not go."""
        must_stay = job.request is not None and job.request.cancel_on_disconnect
        try:
            yield
            if must_stay:
                await job.ended.wait()
        finally:
            if must_stay:  # an ended job is left as it is
                self._scheduler.request_cancel(job)

    def _admit(self, request: GenerateRequest) -> tuple[str, ClipSpec, video_pb2.Plan]:
        """A checked request, or InvalidRequestError; nothing has been queued or loaded yet."""
        clip = resolve(request, self._model, self._adapters)
        preview = self._settings.preview if request.preview is None else request.preview
        spec = request.refine_audio
        refinement = None if spec is None else resolve_refinement(spec, clip, self._adapters, "refine_audio")
        bit_rate = self._settings.video_bit_rate
        plan = make_plan(clip, self._model, self._adapters, bit_rate, request.artifacts, preview, refinement)
        return request.prompt, clip, plan


def _header_info(adapter: AdapterFacts) -> types_pb2.AdapterInfo:
    """What the header of an adapter's file tells; the rest is known once it is bound to the DiT."""
    known = {field.name: getattr(adapter, field.name, None) for field in types_pb2.AdapterInfo.DESCRIPTOR.fields}
    return types_pb2.AdapterInfo(**{name: value for name, value in known.items() if value is not None})
