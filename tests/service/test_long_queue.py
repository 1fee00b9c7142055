"""A thousand jobs that wait cost no event of any job any work, and hold nothing open."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.fair_queue import FairQueue
from orchestrator import scheduler
from orchestrator.job_log import JobLog
from tests.service.servers import Servers, ended, gate, record

NUM_JOBS = 1000


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    """In memory where that can be: putting a thousand jobs on a disk takes as long as the disk likes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        servers = Servers(Path(directory))
        yield servers
        await servers.close()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Events that are written, and looks at the whole queue."""
    work: Counter[str] = Counter()
    append, positions = JobLog.append, FairQueue.positions

    def counted_append(log: JobLog, *event: Any, **options: Any) -> None:
        work["events"] += 1
        append(log, *event, **options)

    def counted_positions(queue: FairQueue[Any]) -> Iterator[tuple[Any, int]]:
        work["looks"] += 1
        return positions(queue)

    monkeypatch.setattr(JobLog, "append", counted_append)
    monkeypatch.setattr(FairQueue, "positions", counted_positions)
    monkeypatch.setattr(scheduler, "TICK_S", 0.005)
    return work


async def test_a_thousand_waiting_jobs_cost_no_work(
    servers: Servers, work: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await servers.start(until=gate("sample:0.1", "sample:1.1"))
    running = servers.submit(record())
    await servers.reached("sample:0.1")
    waiting = [servers.submit(record(f"fox {number % 7}")) for number in range(NUM_JOBS)]
    num_open = len(os.listdir("/proc/self/fd"))
    written = work["events"]
    assert written < NUM_JOBS + 20
    work.clear()

    monkeypatch.setattr(scheduler, "HEARTBEAT_S", 0.0)  # every tick has something to say to whoever listens
    await asyncio.sleep(10 * scheduler.TICK_S)
    assert work == Counter(), "nobody follows any of them"
    assert len(os.listdir("/proc/self/fd")) <= num_open

    servers.script.gates["sample:0.1"].set()
    await servers.reached("sample:1.1")
    assert work["looks"] == 0, "an event of the running job looks at no other"
    assert work["events"] < 30
    work.clear()

    follower = waiting[NUM_JOBS // 2].log.follow()
    assert await anext(follower) == 1
    async with asyncio.timeout(10):
        assert await anext(follower) > 1
        while work["events"] < 10:
            await anext(follower)
    assert work["looks"] == 1, "one look tells all jobs their positions until the queue changes"
    assert all(len(job.log) == 1 for job in waiting if job is not waiting[NUM_JOBS // 2])
    assert [job.queue_position for job in waiting] == list(range(1, NUM_JOBS + 1))
    await follower.aclose()

    servers.scheduler.request_cancel(waiting[0])
    await waiting[0].wait_ended()
    assert servers.job(waiting[NUM_JOBS // 2].job_id).queue_position == NUM_JOBS // 2
    monkeypatch.setattr(scheduler, "HEARTBEAT_S", 60.0)
    servers.open_gates()
    await ended(running, waiting[1])


async def test_a_thousand_jobs_are_taken_up_again_in_their_order(servers: Servers, work: Counter[str]) -> None:
    await servers.start(until=gate("sample:0.1"))
    running = servers.submit(record())
    await servers.reached("sample:0.1")
    job_ids = [servers.submit(record()).job_id for _ in range(NUM_JOBS)]
    servers.kill()
    work.clear()
    servers.open()
    assert work["events"] == 0
    positions = [servers.job(job_id).queue_position for job_id in [running.job_id, *job_ids]]
    assert positions == list(range(NUM_JOBS + 1))
    assert work["looks"] <= 2
