"""A job that is cancelled has ended when its lane is free, and the lane's next job is the right one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from h3stream.errors import IdempotencyKeyError, JobCancelledError, OverloadedError
from h3stream.v1 import video_pb2
from orchestrator.caller import Caller
from services.common.ledger import overlaps, read_ledger
from tests.service.servers import Servers, ended, gate, media, record

EVERY_PHASE = ["encode", "open", "sample:0.1", "commit:0", "decode:1", "sample:2.2", "finish"]


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    await servers.close()


@pytest.mark.parametrize("point", EVERY_PHASE)
async def test_it_is_cancelled_when_the_lane_is_free_and_not_before(servers: Servers, point: str) -> None:
    await servers.start(until=gate(point, "close", "close_vae"))
    job, following = servers.submit(record()), servers.submit(record("a bear"))
    await servers.reached(point)
    servers.scheduler.request_cancel(job)
    servers.script.gates.pop(point).set()
    await servers.reached("close_vae")
    assert job.state == video_pb2.JOB_STATE_RUNNING
    assert following.state == video_pb2.JOB_STATE_QUEUED
    servers.open_gates()
    await ended(job)
    assert job.state == video_pb2.JOB_STATE_CANCELLED
    assert isinstance(job.error, JobCancelledError)
    held = [fake.session_ids() for fake in servers.hosts[0].workers.values()]
    assert job.job_id not in str(held)
    await ended(following)
    assert following.state == video_pb2.JOB_STATE_SUCCEEDED
    assert len(media(following)) == 3
    assert overlaps(read_ledger(servers.hosts[0].ledger)) == []
    assert {path.name for path in job.directory.iterdir()} == {"job.binpb", "end.binpb", "events.log"}


async def test_twice_and_after_the_end_changes_nothing(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    await servers.reached("sample:1.1")
    servers.scheduler.request_cancel(job)
    servers.scheduler.request_cancel(job)
    servers.open_gates()
    await ended(job)
    told = servers.job(job.job_id).to_proto()
    servers.scheduler.request_cancel(job)
    servers.scheduler.request_cancel(servers.job(job.job_id))
    assert servers.job(job.job_id).to_proto() == told
    good = servers.submit(record())
    await ended(good)
    servers.scheduler.request_cancel(servers.job(good.job_id))
    assert servers.job(good.job_id).state == video_pb2.JOB_STATE_SUCCEEDED


async def test_of_those_that_wait_the_others_keep_their_order(servers: Servers) -> None:
    await servers.start(until=gate("sample:0.1"))
    running, first, second, third = (servers.submit(record(f"fox {number}")) for number in range(4))
    await servers.reached("sample:0.1")
    servers.scheduler.request_cancel(second)
    servers.scheduler.request_cancel(second)
    await second.wait_ended()
    assert servers.job(second.job_id).state == video_pb2.JOB_STATE_CANCELLED
    assert [servers.job(job.job_id).queue_position for job in (first, third)] == [1, 2]
    servers.open_gates()
    await ended(running, first, third)
    assert [running.ended_s or 0, first.ended_s or 0] == sorted([running.ended_s or 0, first.ended_s or 0])
    assert (first.ended_s or 0) <= (third.ended_s or 0)
    assert servers.script.calls.count("open") == 3


async def test_a_follower_that_takes_nothing_holds_up_no_cancellation(servers: Servers) -> None:
    await servers.start(until=gate("sample:2.1"))
    job = servers.submit(record())
    follower = job.log.follow()
    await anext(follower)  # and is not asked again
    await servers.reached("sample:2.1")
    servers.scheduler.request_cancel(job)
    servers.open_gates()
    await ended(job)
    assert await anext(follower) == len(job.log)
    with pytest.raises(JobCancelledError):
        await anext(follower)
    assert job.log.num_followers == 0


async def test_the_same_key_is_the_same_job_though_the_queue_is_full(servers: Servers) -> None:
    await servers.start(until=gate("sample:0.1"), max_queued_jobs=1)
    running = servers.submit(record())
    await servers.reached("sample:0.1")
    waiting = servers.submit(record(idempotency_key="mine"))
    with pytest.raises(OverloadedError):
        servers.submit(record())
    assert servers.submit(record(idempotency_key="mine")) is waiting
    with pytest.raises(IdempotencyKeyError, match=f"'mine' has named another request, that of job {waiting.job_id}"):
        servers.submit(record("a bear", idempotency_key="mine"))
    servers.scheduler.request_cancel(waiting)
    assert servers.submit(record(idempotency_key="mine")).job_id == waiting.job_id, "cancelled as it is"
    others = servers.submit(record(idempotency_key="mine"), Caller(tenant="others"))
    assert (others.tenant, others.job_id != waiting.job_id) == ("others", True)
    servers.open_gates()
    await ended(running, others)


async def test_a_key_is_free_again_when_its_job_is_gone(servers: Servers) -> None:
    await servers.start()
    job = servers.submit(record(idempotency_key="mine"))
    await ended(job)
    servers.scheduler.delete(servers.job(job.job_id), Caller())
    other = servers.submit(record("a bear", idempotency_key="mine"))
    assert other.job_id != job.job_id
    await ended(other)
