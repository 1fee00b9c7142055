"""The clock on the wall is set while jobs run, and between two servers: nothing is late, lost or told out of order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from h3stream.v1 import video_pb2
from orchestrator import scheduler
from orchestrator.job import Job
from tests.job_logs import read_log
from tests.service.servers import Servers, ended, gate, media, record

DAY_S = 86_400.0


class Wall:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def options(self) -> dict[str, Callable[[], float]]:
        return {"wall_clock": lambda: self.now_s}


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    monkeypatch.setattr(scheduler, "TICK_S", 0.005)  # so that who looks for late jobs looks often
    return Wall()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    await servers.close()


def check_whole(job: Job) -> None:
    events = read_log(job.log)
    times = [event.elapsed_s for event in events]
    assert job.state == video_pb2.JOB_STATE_SUCCEEDED
    assert [event.seq for event in events] == list(range(len(events)))
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < DAY_S / 2


async def until_ticks(servers: Servers, job: Job) -> None:
    """Lets every clock be looked at: a late job that was submitted now has been ended by then."""
    late = servers.submit(record("nobody waits for this", deadline_s=1e-3))
    await ended(late)
    assert not job.ended.is_set()


@pytest.mark.parametrize("jump_s", [-30 * DAY_S, 30 * DAY_S])
async def test_a_clock_that_is_set_while_a_job_runs_changes_nothing(
    servers: Servers, wall: Wall, jump_s: float
) -> None:
    await servers.start(until=gate("sample:1.1"), **wall.options())
    job = servers.submit(record(deadline_s=3600))
    waiting = servers.submit(record("a bear", deadline_s=3600))
    await servers.reached("sample:1.1")
    wall.now_s += jump_s
    await until_ticks(servers, job)
    servers.open_gates()
    await ended(job, waiting)
    check_whole(job)
    check_whole(waiting)
    assert len(media(job)) == len(media(waiting)) > 1


async def test_a_clock_that_is_set_back_between_two_servers_keeps_times_and_order(servers: Servers, wall: Wall) -> None:
    options: dict[str, Any] = wall.options()
    await servers.start(until=gate("sample:1.1"), **options)
    first, second = servers.submit(record(deadline_s=3600)), servers.submit(record("a bear"))
    await servers.reached("sample:1.1")
    servers.kill()
    wall.now_s -= 30 * DAY_S
    await servers.start(**options)
    third = servers.submit(record("a cat"))
    jobs = [servers.job(job.job_id) for job in (first, second, third)]
    await ended(*jobs)
    for job in jobs:
        check_whole(job)
    listed, _ = servers.scheduler.page(None, (), "", 10)
    assert [job.job_id for job in listed] == [third.job_id, second.job_id, first.job_id]
