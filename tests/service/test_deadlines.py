"""A job that has not ended within the time that its request allows ends with that error, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from h3stream.errors import DeadlineError
from h3stream.v1 import video_pb2
from orchestrator import scheduler
from orchestrator.job import Job
from tests.job_logs import read_log
from tests.service.servers import Servers, ended, gate, media, record


class Time:
    """Clocks that tests move: one that only goes forward, and one that people set."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_s = 1_000_000.0

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds

    def options(self) -> dict[str, object]:
        return {"clock": lambda: self.now_s, "wall_clock": lambda: self.wall_s}


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(scheduler, "TICK_S", 0.005)
    return Time()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    await servers.close()


def check_late(job: Job, deadline_s: float) -> None:
    assert job.state == video_pb2.JOB_STATE_FAILED
    assert isinstance(job.error, DeadlineError)
    assert job.error.message == f"the job has not ended within the {deadline_s:g} s that its request allows"


async def test_a_job_that_waits_too_long_never_runs(servers: Servers, time: Time) -> None:
    await servers.start(until=gate("sample:0.1"), **time.options())
    running = servers.submit(record())
    await servers.reached("sample:0.1")
    late, patient = servers.submit(record("a bear", deadline_s=60)), servers.submit(record("a cat"))
    time.pass_by(60.1)
    await ended(late)
    check_late(late, 60)
    servers.open_gates()
    await ended(running, patient)
    assert [job.state for job in (running, patient)] == [video_pb2.JOB_STATE_SUCCEEDED] * 2
    assert servers.script.calls.count("encode") == 2


async def test_a_running_job_is_ended_and_keeps_what_was_delivered(servers: Servers, time: Time) -> None:
    await servers.start(until=gate("sample:2.1"), **time.options())
    late = servers.submit(record(deadline_s=60))
    await servers.reached("sample:2.1")
    time.pass_by(60.1)
    while not servers.hosts[0].workers or not late.ended.is_set():
        servers.open_gates()
        await asyncio.sleep(0.005)
    check_late(late, 60)
    assert late.error is not None
    assert (late.error.phase, late.error.chunk_index) == ("denoise", 2)
    assert len(media(late)) == 2
    assert all(not fake.sessions and not fake.weights.is_resident for fake in servers.hosts[0].workers.values())
    following = servers.submit(record("a bear"))
    await ended(following)
    assert following.state == video_pb2.JOB_STATE_SUCCEEDED


async def test_a_job_in_time_is_left_alone(servers: Servers, time: Time) -> None:
    await servers.start(until=gate("sample:2.1"), **time.options())
    job = servers.submit(record(deadline_s=60))
    await servers.reached("sample:2.1")
    time.pass_by(59.9)
    await asyncio.sleep(4 * scheduler.TICK_S)
    servers.open_gates()
    await ended(job)
    time.pass_by(10)
    await asyncio.sleep(4 * scheduler.TICK_S)
    assert servers.job(job.job_id).state == video_pb2.JOB_STATE_SUCCEEDED


@pytest.mark.parametrize("was_running", [True, False])
async def test_time_without_a_server_counts(servers: Servers, time: Time, was_running: bool) -> None:
    await servers.start(until=gate("sample:1.1"), **time.options())
    if not was_running:
        servers.submit(record("a bear"))
    job = servers.submit(record(deadline_s=60))
    await servers.reached("sample:1.1")
    servers.kill()
    time.pass_by(60.1)
    await servers.start(**time.options())
    again = servers.job(job.job_id)
    check_late(again, 60)
    assert servers.script.calls.count("encode") == (0 if was_running else 1) or not was_running


@pytest.mark.parametrize(("jump_s", "is_late"), [(-3600.0, False), (3600.0, False)])
async def test_a_clock_that_is_set_changes_nothing_while_the_server_lives(
    servers: Servers, time: Time, jump_s: float, is_late: bool
) -> None:
    await servers.start(until=gate("sample:1.1"), **time.options())
    job = servers.submit(record(deadline_s=60))
    await servers.reached("sample:1.1")
    time.wall_s += jump_s
    await asyncio.sleep(4 * scheduler.TICK_S)
    servers.open_gates()
    await ended(job)
    assert (job.state == video_pb2.JOB_STATE_FAILED) is is_late


async def test_a_clock_that_was_set_back_gives_no_time_back(servers: Servers, time: Time) -> None:
    await servers.start(until=gate("sample:1.1"), **time.options())
    job = servers.submit(record(deadline_s=60))
    time.pass_by(50)
    await servers.reached("sample:1.1")
    job.announce()
    servers.kill()
    time.wall_s -= 3600
    await servers.start(until=gate("sample:1.1"), **time.options())
    again = servers.job(job.job_id)
    assert again.elapsed_s == 50
    times = [event.elapsed_s for event in read_log(again.log)]
    assert times == sorted(times)
    await servers.reached("sample:1.1")
    time.pass_by(10.1)
    async with asyncio.timeout(10):
        while not again.ended.is_set():
            servers.open_gates()
            await asyncio.sleep(0.005)
    check_late(again, 60)


async def test_a_job_that_is_being_cancelled_is_cancelled(servers: Servers, time: Time) -> None:
    await servers.start(until=gate("close"), **time.options())
    job = servers.submit(record(deadline_s=60))
    await servers.reached("sample:0.1")
    servers.scheduler.request_cancel(job)
    await servers.reached("close")
    time.pass_by(60.1)
    await asyncio.sleep(4 * scheduler.TICK_S)
    servers.open_gates()
    await ended(job)
    assert job.state == video_pb2.JOB_STATE_CANCELLED
