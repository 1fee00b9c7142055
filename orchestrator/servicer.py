"""VideoService: decode the request, hand it on, send the job's events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

from core.geometry import MAX_CANVAS_PIXELS, valid_frame_counts
from core.prompt import MAX_PROMPT_BYTES
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.codec import (
    clip_spec_to_proto,
    plan_request_from_proto,
    refuse_unknown_fields,
    request_from_proto,
)
from h3stream.request import ClipSpec, GenerateRequest
from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator.admission import check, make_plan, resolve
from orchestrator.config import Settings
from orchestrator.model_info import ModelInfo
from orchestrator.scheduler import Scheduler

SERVICE_NAME = "h3stream.v1.VideoService"


class VideoServicer(video_pb2_grpc.VideoServiceServicer):
    """The client API over a scheduler."""

    def __init__(self, scheduler: Scheduler, model: ModelInfo, settings: Settings) -> None:
        self._scheduler = scheduler
        self._model = model
        self._settings = settings

    async def Generate(
        self, request: video_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[video_pb2.GenerateResponse]:
        prompt, clip, plan = self._admit(request_from_proto(request))
        job = self._scheduler.submit(prompt, clip, plan)
        try:
            async for event in job.log.read():
                yield video_pb2.GenerateResponse(event=event)
        finally:
            if request.cancel_on_disconnect:  # an ended job is left as it is
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
        return video_pb2.ListAdaptersResponse()

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
            valid_num_frames=valid_frame_counts(),
            max_canvas_pixels=MAX_CANVAS_PIXELS,
            max_prompt_bytes=MAX_PROMPT_BYTES,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_queued_jobs=self._settings.max_queued_jobs,
            num_lanes=self._settings.lanes,
            settings=self._settings.public(),
        )

    def _admit(self, request: GenerateRequest) -> tuple[str, ClipSpec, video_pb2.Plan]:
        """A checked request, or InvalidRequestError; nothing has been queued or loaded yet."""
        clip = resolve(request, self._model.default_clip)
        check(request.prompt, clip)
        return request.prompt, clip, make_plan(clip, self._model, self._settings.video_bit_rate)
