"""A disk that takes no more fails the jobs that need it, tells them why, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil

import grpc
import pytest

from h3stream.v1 import video_pb2
from orchestrator import scheduler
from tests.service.conftest import Service
from tests.service.test_cancel_and_queue import start, until


def full(fd: int, data: bytes, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def until_ended(service: Service, job_id: str) -> video_pb2.Job:
    async with asyncio.timeout(10):
        await service.job(job_id).ended.wait()
    return service.job(job_id).to_proto()


async def test_jobs_fail_with_the_reason_and_the_lane_serves_on_once_there_is_room(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HEARTBEAT_S", 0.0)  # so every tick has something to write
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    _, running = await start(service)
    await until(service, "sample:0.1")
    waiting = [(await start(service, "a bear"))[1] for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        await asyncio.sleep(2 * scheduler.TICK_S)
        with pytest.raises(grpc.aio.AioRpcError, match="the job's events cannot be written: No space left on device"):
            await service.generate()
        gate.set()
        for job_id in (running, *waiting):
            job = await until_ended(service, job_id)
            assert job.state == video_pb2.JOB_STATE_FAILED
            assert job.error.message == "the job's events cannot be written: No space left on device"
    assert len(list((service.data / "jobs").glob("[!.]*"))) == 3, "the refused job left its directory"

    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    stream, _ = await start(service)
    async with asyncio.timeout(10):
        events = aiter(stream)
        while not (await anext(events)).event.progress.is_heartbeat:
            pass
    gate.set()
    assert [r.event async for r in events][-1].HasField("completed")


async def test_a_data_directory_that_was_removed_is_made_again(service: Service) -> None:
    shutil.rmtree(service.data / "jobs")
    assert (await service.generate())[-1].HasField("completed")
