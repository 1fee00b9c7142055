"""A tenant's jobs are its own: whatever another asks for, there is no such job; and each stays within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from h3stream.job import TenantLimits
from h3stream.v1 import video_pb2
from orchestrator import generation, source
from orchestrator.caller import DEFAULT_TENANT, SCOPES
from orchestrator.tenants import NoLimits
from tests.service.callers import CoreCaller, callers, status_of
from tests.service.conftest import Service
from tests.service.test_cancel_and_queue import until

SMALL = {"num_frames": 39}


class Policy(NoLimits):
    """Limits that tests set."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, TenantLimits] = {}
        self.number = 1

    def num_tenants(self) -> int:
        return self.number

    def limits(self, tenant: str) -> TenantLimits:
        return self.by_tenant.get(tenant, TenantLimits())


@pytest.fixture
def tenants() -> Policy:
    return Policy()


@pytest.fixture
async def people(service: Service) -> AsyncIterator[list[CoreCaller]]:
    """The owner of the jobs; another tenant; who may read, who may do everything, and who may do nothing."""
    async with callers(
        service,
        ("studio", "generate"),
        ("other", "generate"),
        ("auditor", "read_all"),
        ("operator", "admin"),
        ("nobody",),
    ) as found:
        yield found


async def made(caller: CoreCaller, **fields: Any) -> str:
    job_id = (await caller.submit(**fields)).job_id
    await caller.ended(job_id)
    return job_id


def about(caller: CoreCaller, job_id: str) -> dict[str, Any]:
    """Every call that names a job, not yet made."""
    branch = video_pb2.Branch(job_id=job_id, from_chunk=1)
    return {
        "GetJob": caller.get(job_id),
        "Follow": caller.follow(job_id),
        "FindArtifact": caller.find(job_id, "final.mp4"),
        "CancelJob": caller.cancel(job_id),
        "DeleteJob": caller.delete(job_id),
        "Submit with a branch": caller.submit("", branch=branch),
        "PlanGeneration with a branch": caller.plan(branch=branch),
        "SubmitRefinement": caller.refine(job_id=job_id),
    }


async def test_there_is_no_job_of_another_tenant_for_any_call(people: list[CoreCaller]) -> None:
    studio, other, *_ = people
    job_id = await made(studio)
    for name, call in about(other, job_id).items():
        status, message = await status_of(call)
        assert status == "NOT_FOUND", name
        assert "studio" not in message
    missing = {name: await status_of(call) for name, call in about(other, "0" * 32).items()}
    for name, call in about(other, job_id).items():  # to the letter what is said of a job that there never was
        assert await status_of(call) == tuple(part.replace("0" * 32, job_id) for part in missing[name]), name
    assert not (await other.list()).jobs
    assert (await studio.get(job_id)).state == video_pb2.JOB_STATE_SUCCEEDED


async def test_a_running_job_is_as_hidden_as_an_ended_one(service: Service, people: list[CoreCaller]) -> None:
    studio, other, *_ = people
    service.script.gates["sample:0.1"] = asyncio.Event()
    job_id = (await studio.submit()).job_id
    await until(service, "sample:0.1")
    for name, call in about(other, job_id).items():
        assert (await status_of(call))[0] == "NOT_FOUND", name
    assert (await studio.get(job_id)).state == video_pb2.JOB_STATE_RUNNING


async def test_who_may_read_all_sees_all_and_changes_nothing(people: list[CoreCaller]) -> None:
    studio, _, auditor, *_ = people
    job_id = await made(studio)
    assert (await auditor.get(job_id)).tenant == "studio"
    assert (await auditor.find(job_id, "final.mp4")).path.endswith("final.mp4")
    assert (await auditor.follow(job_id)).num_events > 0
    assert [job.job_id for job in (await auditor.list(all_tenants=True)).jobs] == [job_id]
    assert not (await auditor.list()).jobs
    branch = video_pb2.Branch(job_id=job_id, from_chunk=1)
    for call in (auditor.cancel(job_id), auditor.delete(job_id), auditor.submit(), auditor.submit("", branch=branch)):
        status, message = await status_of(call)
        assert status == "PERMISSION_DENIED"
        assert "scope generate" in message


async def test_who_may_do_all_does_it_to_all(service: Service, people: list[CoreCaller]) -> None:
    studio, _, _, operator, _ = people
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    job_id = (await studio.submit()).job_id
    await until(service, "sample:0.1")
    cancelling = asyncio.create_task(operator.cancel(job_id))
    gate.set()
    assert (await cancelling).state == video_pb2.JOB_STATE_CANCELLED
    await operator.delete(job_id)
    assert (await status_of(studio.get(job_id)))[0] == "NOT_FOUND"


async def test_who_reads_all_and_makes_its_own_does_not_change_those_of_others(
    service: Service, people: list[CoreCaller]
) -> None:
    studio, *_ = people
    job_id = await made(studio)
    async with callers(service, ("mixed", "generate", "read_all")) as [mixed]:
        for call in (mixed.cancel(job_id), mixed.delete(job_id)):
            status, message = await status_of(call)
            assert status == "PERMISSION_DENIED"
            assert "scope admin" in message


async def test_a_key_without_scopes_is_refused_everywhere(people: list[CoreCaller]) -> None:
    studio, *_, nobody = people
    job_id = await made(studio)
    for name, call in about(nobody, job_id).items():
        assert (await status_of(call))[0] in ("PERMISSION_DENIED", "NOT_FOUND"), name
    for call in (nobody.list(), nobody.submit(), nobody.list(all_tenants=True)):
        assert (await status_of(call))[0] == "PERMISSION_DENIED"


async def test_listing_all_tenants_needs_a_scope(people: list[CoreCaller]) -> None:
    studio, *_ = people
    status, message = await status_of(studio.list(all_tenants=True))
    assert status == "PERMISSION_DENIED"
    assert "scope read_all" in message


async def test_each_caller_is_told_who_it_is(people: list[CoreCaller], tenants: Policy) -> None:
    tenants.by_tenant["studio"] = TenantLimits(max_queued_jobs=7, max_stored_bytes=10**9)
    studio, other, _, operator, nobody = people
    await made(studio)
    told = (await studio.info()).caller
    assert told.tenant == "studio"
    assert list(told.scopes) == ["generate", "read_own"]
    assert told.limits == video_pb2.TenantLimits(max_queued_jobs=7, max_stored_bytes=10**9)
    assert told.usage.num_stored_bytes > 0
    assert (await other.info()).caller.usage == video_pb2.TenantUsage()
    assert list((await operator.info()).caller.scopes) == list(SCOPES)
    assert list((await nobody.info()).caller.scopes) == []


async def test_without_authentication_everybody_is_the_default_tenant(service: Service) -> None:
    events = await service.generate()
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=events[0].job_id))).job
    info = await service.stub.GetServerInfo(video_pb2.GetServerInfoRequest())
    assert job.tenant == info.caller.tenant == DEFAULT_TENANT


async def test_usage_counts_what_runs_and_what_waits(service: Service, people: list[CoreCaller]) -> None:
    studio, other, *_ = people
    service.script.gates["sample:0.1"] = asyncio.Event()
    await studio.submit(**SMALL)
    await until(service, "sample:0.1")
    await studio.submit(**SMALL)
    usage = (await studio.info()).caller.usage
    assert (usage.num_running_jobs, usage.num_queued_jobs, usage.num_pending_frames) == (1, 1, 78)
    assert (await other.info()).caller.usage == video_pb2.TenantUsage()


async def refused(call: Any) -> str:
    """The message of a call that is refused for a limit of its tenant, with the delay to wait."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    assert b"google.rpc.RetryInfo" in details
    assert b"QUOTA_EXCEEDED" in details
    return caught.value.details() or ""


async def test_a_tenant_has_no_more_jobs_waiting_than_it_may(
    service: Service, people: list[CoreCaller], tenants: Policy
) -> None:
    tenants.by_tenant["studio"] = TenantLimits(max_queued_jobs=1)
    studio, other, *_ = people
    service.script.gates["sample:0.1"] = asyncio.Event()
    await studio.submit()
    await until(service, "sample:0.1")
    waiting = (await studio.submit()).job_id
    assert "max_queued_jobs" in await refused(studio.submit())
    await other.submit()
    await studio.cancel(waiting)
    await studio.submit()


@pytest.mark.parametrize("max_queued_jobs", [3])
async def test_one_tenant_does_not_fill_the_queue_for_all(
    service: Service, people: list[CoreCaller], tenants: Policy, max_queued_jobs: int
) -> None:
    tenants.number = 2
    studio, other, *_ = people
    service.script.gates["sample:0.1"] = asyncio.Event()
    running = (await studio.submit()).job_id
    await until(service, "sample:0.1")
    for _ in range(2):
        await studio.submit()
    message = await refused(studio.submit())
    assert "studio has 2 jobs waiting of at most 2, half of the server's max_queued_jobs of 3" in message
    assert "half of the server's" in await refused(studio.refine(job_id=running))
    await other.submit()
    assert (await status_of(other.submit()))[0] == "RESOURCE_EXHAUSTED", "the queue is full"


async def test_a_tenant_has_no_more_frames_pending_than_it_may(
    service: Service, people: list[CoreCaller], tenants: Policy
) -> None:
    tenants.by_tenant["studio"] = TenantLimits(max_pending_frames=78)
    studio, *_ = people
    service.script.gates["sample:0.1"] = asyncio.Event()
    await studio.submit(**SMALL)
    await studio.submit(**SMALL)
    assert "78 frames waiting or being made of at most 78" in await refused(studio.submit(**SMALL))
    assert "at most 78 frames" in await refused(studio.submit(num_frames=124))


async def test_a_tenant_keeps_no_more_bytes_than_it_may(
    people: list[CoreCaller], tenants: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants.by_tenant["studio"] = TenantLimits(max_stored_bytes=1)
    studio, other, *_ = people
    job_id = await made(studio)
    monkeypatch.setattr(source, "receive", None)  # told before an upload is taken in, and before chunks are taken over
    monkeypatch.setattr(generation, "prepare", None)
    assert "delete jobs that have ended" in await refused(studio.submit())
    assert "max_stored_bytes" in await refused(studio.refine(job_id=job_id))
    assert "max_stored_bytes" in await refused(studio.refine(upload={"prompt": "a fox", "size_bytes": 10}))
    branch = video_pb2.Branch(job_id=job_id, from_chunk=1)
    assert "max_stored_bytes" in await refused(studio.submit("", branch=branch))
    await made(other)
    await studio.delete(job_id)
    await made(studio)


async def test_jobs_that_one_cancels_push_out_no_clip_of_another(service: Service, people: list[CoreCaller]) -> None:
    studio, other, *_ = people
    job_id = await made(studio)
    service.script.calls.clear()
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    running = (await other.submit()).job_id
    await until(service, "sample:0.1")
    for _ in range(6):
        await other.cancel((await other.submit()).job_id)
    assert len((await other.list()).jobs) == 3, "two that are kept, and one that runs"
    gate.set()
    await other.ended(running)
    assert (await studio.find(job_id, "final.mp4")).path.endswith("final.mp4")


@pytest.mark.parametrize("num_lanes", [2])
async def test_a_tenant_runs_no_more_jobs_than_it_may_while_others_go_by(
    service: Service, people: list[CoreCaller], tenants: Policy
) -> None:
    tenants.by_tenant["studio"] = TenantLimits(max_running_jobs=1)
    studio, other, *_ = people
    gate = service.script.gates["sample:1.1"] = asyncio.Event()
    first, second = (await studio.submit()).job_id, (await studio.submit()).job_id
    await until(service, "sample:1.1")
    third = (await other.submit()).job_id
    async with asyncio.timeout(10):
        while (await other.get(third)).state != video_pb2.JOB_STATE_RUNNING:
            await asyncio.sleep(0.01)
    assert (await studio.get(first)).state == video_pb2.JOB_STATE_RUNNING
    assert (await studio.get(second)).state == video_pb2.JOB_STATE_QUEUED
    gate.set()
    await studio.ended(second)
