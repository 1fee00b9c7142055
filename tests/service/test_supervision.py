"""What nobody has thought of ends one job at most: the tasks that serve all jobs go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from h3stream.job import TenantLimits
from h3stream.v1 import video_pb2
from orchestrator import scheduler
from orchestrator.job_store import JobStore
from orchestrator.lane import Lane
from orchestrator.tenants import NoLimits
from tests.service.servers import Servers, ended, record


class Fault:
    """Raises the first time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("nobody thought of this")


class FaultyPolicy(NoLimits):
    """Raises when it is first asked whether a job may run."""

    def __init__(self) -> None:
        self.fault = Fault()
        self.is_armed = False

    def limits(self, tenant: str) -> TenantLimits:
        if self.is_armed:
            self.fault()
        return super().limits(tenant)


@pytest.fixture
async def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    monkeypatch.setattr(scheduler, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(scheduler, "TICK_S", 0.005)
    servers = Servers(tmp_path)
    yield servers
    await servers.close()


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Fault:
    """Lets a method raise the first time that it is called."""
    method, fault = getattr(owner, name), Fault()

    def faulty(self: Any, *args: Any) -> Any:
        fault()
        return method(self, *args)

    monkeypatch.setattr(owner, name, faulty)
    return fault


def check_told(caplog: pytest.LogCaptureFixture, words: str) -> None:
    assert words in caplog.text
    assert "RuntimeError: nobody thought of this" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_policy_that_raises_costs_no_job(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    policy = FaultyPolicy()
    await servers.start(tenants=policy)
    jobs = [servers.submit(record()), servers.submit(record("a bear"))]
    policy.is_armed = True
    await ended(*jobs)
    assert [job.state for job in jobs] == [video_pb2.JOB_STATE_SUCCEEDED] * 2
    check_told(caplog, "a lane's task has failed; it goes on in 0.01 s")


@pytest.mark.parametrize(("owner", "name"), [(JobStore, "set_running"), (Lane, "clear"), (JobStore, "tidy")])
async def test_what_fails_around_a_job_leaves_the_lane_to_the_next(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "TICK_S", 60.0)
    await servers.start()
    fault = fail_once(monkeypatch, owner, name)
    first, second = servers.submit(record()), servers.submit(record("a bear"))
    await ended(first, second)
    assert fault.num_calls > 1
    assert second.state == video_pb2.JOB_STATE_SUCCEEDED
    assert servers.scheduler.usage("default").num_pending_frames == 0
    assert servers.scheduler.usage("default").num_running_jobs == 0
    check_told(caplog, "lane")


async def test_a_job_in_hand_is_ended_with_what_failed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    await servers.start()
    fail_once(monkeypatch, JobStore, "set_running")
    job = servers.submit(record())
    await ended(job)
    assert job.state == video_pb2.JOB_STATE_FAILED
    assert job.error is not None
    assert job.error.message == "internal error (RuntimeError); see the server's log"


async def test_jobs_are_looked_after_again_once_that_has_failed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await servers.start()
    fault = fail_once(monkeypatch, JobStore, "tidy")
    async with asyncio.timeout(10):
        while fault.num_calls < 3:
            await asyncio.sleep(0.005)
    check_told(caplog, "jobs cannot be looked after; trying again in 0.01 s")
