"""VideoService and JobService: decode the request, hand it on, encode the answer.

Streams of VideoService are the edge's, which JobService tells where to read them (`orchestrator/edge.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from grpc import aio

from core.artifacts import ARTIFACTS, DEFAULT_ARTIFACTS
from core.geometry import MAX_CANVAS_PIXELS, valid_frame_counts
from core.prompt import MAX_PROMPT_BYTES
from core.request import Violation, integer_violations
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.codec import clip_spec_to_proto, plan_request_from_proto, preview_spec_to_proto, refuse_unknown_fields
from h3stream.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2, video_pb2, video_pb2_grpc
from orchestrator.admission import AdapterFacts
from orchestrator.caller import SCOPES, Caller, caller_of
from orchestrator.config import Settings
from orchestrator.download import find_artifact
from orchestrator.generation import GenerateDesk
from orchestrator.job import Job
from orchestrator.model_info import ModelInfo
from orchestrator.scheduler import Scheduler
from orchestrator.source import RefineDesk
from orchestrator.stock import STATE_FROM_PROTO
from services.common.refusal import refuse

SERVICE_NAME = "h3stream.v1.VideoService"
DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 20, 100
"""Jobs in an answer that lists jobs."""
MAX_PAGE_BYTES = MAX_MESSAGE_BYTES * 3 // 4
"""Bytes of such an answer: with room for the envelope."""


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
        self._generate_desk = GenerateDesk(scheduler, model, adapters, settings)
        self._refine_desk = RefineDesk(scheduler, model, adapters, settings)
        self._holders: Counter[str] = Counter()  # callers that each job must not go on without

    async def Submit(self, request: jobs_pb2.SubmitRequest, context: Any) -> AsyncIterator[jobs_pb2.SubmitResponse]:
        caller = caller_of(context)
        caller.require("generate")
        job, is_known = await self._generate_desk.submit(request.generation, caller)
        async with self._submitted(job, request.generation.cancel_on_disconnect):
            yield jobs_pb2.SubmitResponse(job_id=job.job_id, is_known=is_known)

    async def SubmitRefinement(
        self, request_iterator: AsyncIterator[jobs_pb2.SubmitRefinementRequest], context: Any
    ) -> AsyncIterator[jobs_pb2.SubmitRefinementResponse]:
        caller = caller_of(context)
        caller.require("generate")
        messages = (request.refinement async for request in request_iterator)
        job, is_known = await self._refine_desk.submit(messages, caller)
        must_stay = job.request is not None and job.request.cancel_on_disconnect
        async with self._submitted(job, must_stay):
            yield jobs_pb2.SubmitRefinementResponse(job_id=job.job_id, is_known=is_known)

    async def Follow(self, request: jobs_pb2.FollowRequest, context: Any) -> AsyncIterator[jobs_pb2.FollowResponse]:
        job_log = self._seen(request.job_id, caller_of(context)).log
        async for num_events in job_log.follow():
            yield jobs_pb2.FollowResponse(path=str(job_log.path), num_events=num_events)

    async def FindArtifact(self, request: jobs_pb2.FindArtifactRequest, context: Any) -> jobs_pb2.FindArtifactResponse:
        refuse_unknown_fields(request.download)
        job = self._seen(request.download.job_id, caller_of(context))
        artifact = find_artifact(job, request.download.name, request.download.offset_bytes)
        return jobs_pb2.FindArtifactResponse(artifact=artifact, path=str(job.directory / artifact.name))

    async def CancelJob(self, request: video_pb2.CancelJobRequest, context: Any) -> video_pb2.CancelJobResponse:
        refuse_unknown_fields(request)
        job = self._changed(request.job_id, caller_of(context))
        self._scheduler.request_cancel(job)
        await job.wait_ended()
        return video_pb2.CancelJobResponse(job=job.to_proto())

    async def DeleteJob(self, request: video_pb2.DeleteJobRequest, context: Any) -> video_pb2.DeleteJobResponse:
        refuse_unknown_fields(request)
        caller = caller_of(context)
        self._scheduler.delete(self._changed(request.job_id, caller), caller)
        return video_pb2.DeleteJobResponse()

    async def ListJobs(self, request: video_pb2.ListJobsRequest, context: Any) -> video_pb2.ListJobsResponse:
        refuse_unknown_fields(request)
        refuse(list_violations(request))
        caller = caller_of(context)
        caller.require("read_all" if request.all_tenants else "read_own")
        tenant = None if request.all_tenants else caller.tenant
        states = [STATE_FROM_PROTO[state] for state in request.states]
        limit = request.page_size or DEFAULT_PAGE_SIZE
        while True:
            jobs, token = self._scheduler.page(tenant, states, request.page_token, limit)
            page = video_pb2.ListJobsResponse(jobs=[job.to_proto() for job in jobs], next_page_token=token)
            if limit == 1 or page.ByteSize() <= MAX_PAGE_BYTES:
                return page
            limit = max(1, limit * MAX_PAGE_BYTES // page.ByteSize() - 1)  # long prompts

    async def GetJob(self, request: video_pb2.GetJobRequest, context: Any) -> video_pb2.GetJobResponse:
        refuse_unknown_fields(request)
        return video_pb2.GetJobResponse(job=self._seen(request.job_id, caller_of(context)).to_proto())

    async def PlanGeneration(
        self, request: video_pb2.PlanGenerationRequest, context: Any
    ) -> video_pb2.PlanGenerationResponse:
        asked = plan_request_from_proto(request)
        return video_pb2.PlanGenerationResponse(plan=self._generate_desk.resolve(asked, caller_of(context)).plan)

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
        caller = caller_of(context)
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
            settings=self._settings.public(with_paths="admin" in caller.scopes),
            parts=[part for worker in workers for part in worker.parts],
            adapters=self._adapter_infos(),
            artifacts=ARTIFACTS,
            default_artifacts=DEFAULT_ARTIFACTS,
            default_preview=preview_spec_to_proto(self._settings.preview),
            caller=self._caller(caller),
            examples=self._model.examples,
        )

    def _adapter_infos(self) -> list[types_pb2.AdapterInfo]:
        """The adapters in order of their names: as the DiT worker has bound them, or what is known until it has."""
        bound = [adapter for worker in self._scheduler.workers for adapter in worker.adapters]
        return sorted(bound or map(_header_info, self._adapters), key=lambda adapter: adapter.name)

    def _seen(self, job_id: str, caller: Caller) -> Job:
        """A job that a caller may know of. Raises JobNotFoundError, PermissionDeniedError."""
        caller.require("read_own")
        return self._scheduler.job(job_id, caller)

    def _changed(self, job_id: str, caller: Caller) -> Job:
        """A job that a caller may cancel and delete. Raises JobNotFoundError, PermissionDeniedError."""
        caller.require("generate")
        job = self._scheduler.job(job_id, caller)
        if not caller.may_change(job.tenant):
            caller.require("admin")
        return job

    def _caller(self, caller: Caller) -> video_pb2.Caller:
        """What a caller is told of itself."""
        limits, usage = self._scheduler.tenants.limits(caller.tenant), self._scheduler.usage(caller.tenant)
        return video_pb2.Caller(
            tenant=caller.tenant,
            scopes=[scope for scope in SCOPES if scope in caller.scopes],
            limits=video_pb2.TenantLimits(**dataclasses.asdict(limits)),
            usage=video_pb2.TenantUsage(**dataclasses.asdict(usage)),
        )

    @asynccontextmanager
    async def _submitted(self, job: Job, must_stay: bool) -> AsyncIterator[None]:
        """Around telling a submitter of its job.

        must_stay: it lasts for as long as the job, which is cancelled when the last such submitter has gone.
        """
        self._holders[job.job_id] += must_stay
        try:
            yield
            if must_stay:
                await job.wait_ended()
        finally:
            self._holders[job.job_id] -= must_stay
            if not self._holders[job.job_id]:
                del self._holders[job.job_id]
                if must_stay:  # an ended job is left as it is
                    self._scheduler.request_cancel(job)


def list_violations(request: video_pb2.ListJobsRequest) -> Iterator[Violation]:
    """What is wrong with a request to list jobs, but for its page token."""
    if request.page_size:
        yield from integer_violations("page_size", request.page_size, 1, MAX_PAGE_SIZE, also=", or 0")
    if len(request.states) > len(STATE_FROM_PROTO):
        description = f"states holds {len(request.states)} states; there are {len(STATE_FROM_PROTO)}, each needed once"
        yield Violation("states", description, "TOO_MANY")
        return
    names = ", ".join(f"{video_pb2.JobState.Name(state)} ({state})" for state in STATE_FROM_PROTO)
    for index, state in enumerate(request.states):
        if state not in STATE_FROM_PROTO:
            description = f"states[{index}] is {state}; it must be one of {names}"
            yield Violation(f"states[{index}]", description, "UNKNOWN_VALUE")


def _header_info(adapter: AdapterFacts) -> types_pb2.AdapterInfo:
    """What the header of an adapter's file tells; the rest is known once it is bound to the DiT."""
    known = {field.name: getattr(adapter, field.name, None) for field in types_pb2.AdapterInfo.DESCRIPTOR.fields}
    return types_pb2.AdapterInfo(**{name: value for name, value in known.items() if value is not None})
