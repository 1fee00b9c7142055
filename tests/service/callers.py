"""The core as several callers see it, each with the metadata that the edge would send of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from h3stream.v1 import jobs_pb2, jobs_pb2_grpc, video_pb2, video_pb2_grpc
from orchestrator.caller import Caller, Scope, with_implied
from services.common.rpc import connect
from tests.service.conftest import Service


class CoreCaller:
    """The calls of one caller."""

    def __init__(self, channel: grpc.aio.Channel, tenant: str, *scopes: Scope) -> None:
        self.metadata = Caller(tenant, with_implied(scopes), key_id=tenant).metadata()
        self._videos: Any = video_pb2_grpc.VideoServiceStub(channel)
        self._jobs: Any = jobs_pb2_grpc.JobServiceStub(channel)

    async def submit(self, prompt: str = "a fox", **fields: Any) -> jobs_pb2.SubmitResponse:
        """What the core answers at once."""
        return await self.submission(prompt, **fields).read()

    def submission(self, prompt: str = "a fox", **fields: Any) -> Any:
        generation = video_pb2.GenerateRequest(prompt=prompt, **fields)
        return self._jobs.Submit(jobs_pb2.SubmitRequest(generation=generation), metadata=self.metadata)

    async def refine(self, **fields: Any) -> jobs_pb2.SubmitRefinementResponse:
        header = video_pb2.RefineHeader(**fields)
        return await self.refinement(sent([video_pb2.RefineAudioRequest(header=header)])).read()

    def refinement(self, messages: AsyncIterator[video_pb2.RefineAudioRequest]) -> Any:
        submitted = (jobs_pb2.SubmitRefinementRequest(refinement=message) async for message in messages)
        return self._jobs.SubmitRefinement(submitted, metadata=self.metadata)

    async def follow(self, job_id: str) -> jobs_pb2.FollowResponse:
        return await self._jobs.Follow(jobs_pb2.FollowRequest(job_id=job_id), metadata=self.metadata).read()

    async def ended(self, job_id: str) -> None:
        """Returns when the job has ended well; raises its error."""
        call = self._jobs.Follow(jobs_pb2.FollowRequest(job_id=job_id), metadata=self.metadata)
        async for _ in call:
            pass

    async def find(self, job_id: str, name: str) -> jobs_pb2.FindArtifactResponse:
        download = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name)
        return await self._jobs.FindArtifact(jobs_pb2.FindArtifactRequest(download=download), metadata=self.metadata)

    async def get(self, job_id: str) -> video_pb2.Job:
        return (await self._videos.GetJob(video_pb2.GetJobRequest(job_id=job_id), metadata=self.metadata)).job

    async def cancel(self, job_id: str) -> video_pb2.Job:
        return (await self._videos.CancelJob(video_pb2.CancelJobRequest(job_id=job_id), metadata=self.metadata)).job

    async def delete(self, job_id: str) -> None:
        await self._videos.DeleteJob(video_pb2.DeleteJobRequest(job_id=job_id), metadata=self.metadata)

    async def list(self, **fields: Any) -> video_pb2.ListJobsResponse:
        return await self._videos.ListJobs(video_pb2.ListJobsRequest(**fields), metadata=self.metadata)

    async def plan(self, **fields: Any) -> video_pb2.Plan:
        request = video_pb2.PlanGenerationRequest(generation=video_pb2.GenerateRequest(**fields))
        return (await self._videos.PlanGeneration(request, metadata=self.metadata)).plan

    async def info(self) -> video_pb2.GetServerInfoResponse:
        return await self._videos.GetServerInfo(video_pb2.GetServerInfoRequest(), metadata=self.metadata)


async def sent(messages: Iterable[video_pb2.RefineAudioRequest]) -> AsyncIterator[video_pb2.RefineAudioRequest]:
    """The messages of a call."""
    for message in messages:
        yield message


@asynccontextmanager
async def callers(service: Service, *who: tuple[str, *tuple[Scope, ...]]) -> AsyncIterator[list[CoreCaller]]:
    """One caller for each tenant and its scopes, on a channel to the core."""
    async with connect(f"unix:{service.data}/core.sock") as channel:
        yield [CoreCaller(channel, tenant, *scopes) for tenant, *scopes in who]


async def status_of(call: Any) -> tuple[str, str]:
    """Name of the status that a call fails with, and its message."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call did not fail")
