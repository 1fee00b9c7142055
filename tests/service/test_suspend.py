"""A server that stops leaves to the next one what it does not bring to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from core.phases import Worker
from h3stream.errors import ModelLoadingError, ServerStoppingError
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator import scheduler as scheduler_module
from orchestrator.config import Settings
from orchestrator.job import Job
from orchestrator.scheduler import MAX_VAIN_RESUMES
from services.common.rpc import connect
from tests.job_logs import read_log
from tests.service.conftest import MODEL, serving
from tests.service.fake_workers import ADAPTERS
from tests.service.servers import Servers, ended, gate, media, record, warnings


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    await servers.close()


async def stop(servers: Servers, *, drain_s: float = 0.0) -> None:
    """Stops the present server, whose workers stand still until then."""
    stopping = asyncio.create_task(servers.scheduler.stop(drain_s, asyncio.Event()))
    await asyncio.sleep(0)
    servers.open_gates()
    await stopping


async def follow(job: Job) -> Exception | None:
    """How the job's followers are let go."""
    try:
        async for _ in job.log.follow():
            pass
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("point", ["encode", "sample:0.1", "decode:1", "commit:1", "finish"])
async def test_a_stopped_job_goes_on_with_the_next_server(servers: Servers, tmp_path: Path, point: str) -> None:
    await servers.start(until=gate(point))
    job = servers.submit(record())
    await servers.reached(point)
    following = asyncio.create_task(follow(job))
    await stop(servers)
    error = await following
    assert isinstance(error, ServerStoppingError)
    assert error.job_id == job.job_id
    assert not job.ended.is_set()
    told = read_log(job.log)
    assert told[-1].warning.reason == "SUSPENDED"

    await servers.start()
    again = servers.job(job.job_id)
    await ended(again)
    assert read_log(again.log)[: len(told)] == told
    assert warnings(again, "RESUMED")[0].startswith("the server was stopped in phase")
    other = servers.submit(record())
    await ended(other)
    assert media(again) == media(other)
    assert read_log(again.log)[-1].completed.latents_sha256 == read_log(other.log)[-1].completed.latents_sha256


async def test_jobs_that_wait_keep_their_places_and_hear_that_the_server_stops(servers: Servers) -> None:
    await servers.start(until=gate("sample:0.1"))
    running, first, second = (servers.submit(record(prompt)) for prompt in ("a fox", "a bear", "a cat"))
    await servers.reached("sample:0.1")
    followers = [asyncio.create_task(follow(job)) for job in (first, second)]
    await asyncio.sleep(0)
    await stop(servers)
    assert all([isinstance(await follower, ServerStoppingError) for follower in followers])
    assert len(first.log) == 1, "nothing is written for a job that waits"
    await servers.start()
    again = [servers.job(job.job_id) for job in (running, first, second)]
    await ended(*again)
    assert sorted(again, key=lambda job: job.ended_s or 0) == again
    assert [job.num_resumes for job in again] == [1, 0, 0]


async def test_a_job_that_ends_in_time_has_ended(servers: Servers) -> None:
    await servers.start(until=gate("sample:2.1"))
    job = servers.submit(record())
    await servers.reached("sample:2.1")
    await stop(servers, drain_s=20)
    assert job.state == video_pb2.JOB_STATE_SUCCEEDED
    servers.open()
    assert servers.job(job.job_id).state == video_pb2.JOB_STATE_SUCCEEDED
    assert servers.job(job.job_id).num_resumes == 0


async def test_a_job_that_was_to_be_cancelled_is_cancelled(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    await servers.reached("sample:1.1")
    servers.scheduler.request_cancel(job)
    await stop(servers)
    assert job.state == video_pb2.JOB_STATE_CANCELLED
    servers.open()
    assert servers.job(job.job_id).state == video_pb2.JOB_STATE_CANCELLED


async def test_a_worker_that_is_gone_at_the_end_leaves_the_job_to_the_next_server(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    await servers.reached("sample:1.1")
    stopping = asyncio.create_task(servers.scheduler.stop(0, asyncio.Event()))
    await servers.hosts[0].kill(Worker.DIT)
    servers.open_gates()
    await stopping
    assert not job.ended.is_set()
    await servers.start()
    again = servers.job(job.job_id)
    await ended(again)
    assert again.state == video_pb2.JOB_STATE_SUCCEEDED


async def test_who_waits_for_a_stopped_job_to_end_is_told(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job, waiting = servers.submit(record()), servers.submit(record("a bear"))
    await servers.reached("sample:1.1")
    told = [asyncio.create_task(each.wait_ended()) for each in (job, waiting)]
    await stop(servers)
    assert all(isinstance(error, ServerStoppingError) for error in await asyncio.gather(*told, return_exceptions=True))
    servers.scheduler.request_cancel(job)  # by a caller that has gone with the server
    servers.scheduler.request_cancel(waiting)
    servers.open()
    states = [servers.job(each.job_id).state for each in (job, waiting)]
    assert states == [video_pb2.JOB_STATE_RUNNING, video_pb2.JOB_STATE_QUEUED]


async def test_stops_do_not_count_against_a_job(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    for _ in range(MAX_VAIN_RESUMES + 2):
        await servers.reached("sample:1.1")
        await stop(servers)
        await servers.start(until=gate("sample:1.1"))
    await servers.reached("sample:1.1")
    servers.open_gates()
    again = servers.job(job.job_id)
    await ended(again)
    assert (again.state, again.num_resumes) == (video_pb2.JOB_STATE_SUCCEEDED, MAX_VAIN_RESUMES + 2)


async def test_a_server_that_never_started_leaves_all_as_it_was(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    waiting = servers.submit(record("a bear"))
    await servers.reached("sample:1.1")
    await stop(servers)
    scheduler = servers.open()
    with pytest.raises(ModelLoadingError):
        servers.submit(record())
    following = asyncio.create_task(follow(servers.job(job.job_id)))
    await asyncio.sleep(0)
    await scheduler.stop(0, asyncio.Event())
    assert isinstance(await following, ServerStoppingError)
    with pytest.raises(ServerStoppingError):
        servers.job(job.job_id)
    await servers.start()
    again = [servers.job(each.job_id) for each in (job, waiting)]
    await ended(*again)
    assert [each.num_resumes for each in again] == [1, 0]


async def test_a_caller_hears_that_the_server_stops_and_its_job_goes_on_without_it(
    servers: Servers, tmp_path: Path
) -> None:
    scheduler = await servers.start(until=gate("sample:1.1"))
    settings = Settings(model=tmp_path, data=servers.data)
    async with serving(tmp_path, scheduler, MODEL, ADAPTERS, settings) as address, connect(address) as channel:
        stub = video_pb2_grpc.VideoServiceStub(channel)
        streams = []
        for prompt in ("a fox", "a bear"):
            request = video_pb2.GenerateRequest(prompt=prompt, cancel_on_disconnect=True)
            streams.append(stub.Generate(request))
        job_ids = [(await anext(aiter(stream))).event.job_id for stream in streams]
        await servers.reached("sample:1.1")
        jobs = [servers.job(job_id) for job_id in job_ids]
        while not all(job.log.num_followers for job in jobs):
            await asyncio.sleep(0.005)
        await stop(servers)
        for stream in streams:
            with pytest.raises(grpc.aio.AioRpcError) as end:
                [_ async for _ in stream]
            assert isinstance(from_rpc_error(end.value), ServerStoppingError)
    await servers.start()
    again = [servers.job(job_id) for job_id in job_ids]
    await ended(*again)
    assert [job.state for job in again] == [video_pb2.JOB_STATE_SUCCEEDED] * 2


async def test_a_viewer_that_has_yet_to_notice_holds_up_no_other_job(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.005)
    monkeypatch.setattr(scheduler_module, "HEARTBEAT_S", 0.0)  # every tick has something to say to whoever listens
    await servers.start(until=gate("sample:1.1"))
    running, waiting = servers.submit(record()), servers.submit(record("a bear"))
    await servers.reached("sample:1.1")
    stalled = waiting.log.follow()
    await anext(stalled)
    stopping = asyncio.create_task(servers.scheduler.stop(20, asyncio.Event()))
    await asyncio.sleep(0)
    num_written = len(waiting.log)
    follower = running.log.follow()
    num_events = await anext(follower)
    while await anext(follower) < num_events + 5:
        pass
    servers.open_gates()
    await stopping
    assert running.state == video_pb2.JOB_STATE_SUCCEEDED
    error = await follow(waiting)
    assert isinstance(error, ServerStoppingError)
    assert len(waiting.log) == num_written, "its log is the next server's"
    await stalled.aclose()
