"""Who waits, who is cancelled, who is refused."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from h3stream.v1 import types_pb2, video_pb2
from services.common.ledger import overlaps, read_ledger
from tests.service.conftest import Service


async def until(service: Service, point: str) -> None:
    async with asyncio.timeout(10):
        while point not in service.script.calls:
            await asyncio.sleep(0.01)


async def start(service: Service, prompt: str = "a fox", **fields: object) -> tuple[grpc.aio.UnaryStreamCall, str]:
    stream = service.stub.Generate(video_pb2.GenerateRequest(prompt=prompt, **fields))
    accepted = (await anext(aiter(stream))).event
    return stream, accepted.job_id


async def cancel(service: Service, job_id: str) -> video_pb2.Job:
    return (await service.stub.CancelJob(video_pb2.CancelJobRequest(job_id=job_id))).job


async def test_cancel_returns_once_the_lane_is_free_and_the_next_job_runs(service: Service) -> None:
    service.script.gates["sample:1.1"] = asyncio.Event()
    stream, job_id = await start(service)
    await until(service, "sample:1.1")
    job = await cancel(service, job_id)
    assert job.state == video_pb2.JOB_STATE_CANCELLED
    assert all(not fake.sessions and not fake.weights.is_resident for fake in service.host.workers.values())
    with pytest.raises(grpc.aio.AioRpcError) as end:
        [_ async for _ in stream]
    assert end.value.code() == grpc.StatusCode.CANCELLED
    del service.script.gates["sample:1.1"]
    assert (await service.generate())[-1].HasField("completed")
    assert overlaps(read_ledger(service.host.ledger)) == []


@pytest.mark.parametrize("point", ["encode", "open", "sample:0.1", "decode:0", "commit:0", "decode:2", "finish"])
async def test_cancel_works_in_every_phase(service: Service, point: str) -> None:
    gate = service.script.gates[point] = asyncio.Event()
    _, job_id = await start(service)
    await until(service, point)
    cancelling = asyncio.create_task(cancel(service, job_id))
    await asyncio.sleep(0.05)
    gate.set()
    assert (await cancelling).state == video_pb2.JOB_STATE_CANCELLED
    assert (await service.generate())[-1].HasField("completed")


async def test_cancelling_twice_or_after_the_end_changes_nothing(service: Service) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    _, job_id = await start(service)
    await until(service, "sample:0.1")
    states = [job.state for job in await asyncio.gather(cancel(service, job_id), cancel(service, job_id))]
    assert states == [video_pb2.JOB_STATE_CANCELLED] * 2
    del service.script.gates["sample:0.1"]
    done = (await service.generate())[-1].job_id
    assert (await cancel(service, done)).state == video_pb2.JOB_STATE_SUCCEEDED


async def test_a_waiting_job_runs_after_the_one_before_it(service: Service) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    first, _ = await start(service)
    await until(service, "sample:0.1")
    second, job_id = await start(service, "a bear")
    progress = (await anext(aiter(second))).event.progress
    assert (progress.phase, progress.queue_position) == (types_pb2.PHASE_QUEUED, 1)
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=job_id))).job
    assert job.state == video_pb2.JOB_STATE_QUEUED
    gate.set()
    assert [r.event async for r in first][-1].HasField("completed")
    assert [r.event async for r in second][-1].HasField("completed")
    assert overlaps(read_ledger(service.host.ledger)) == []


async def test_a_waiting_job_can_be_cancelled_and_never_runs(service: Service) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    first, _ = await start(service)
    await until(service, "sample:0.1")
    second, job_id = await start(service, "a bear")
    assert (await cancel(service, job_id)).state == video_pb2.JOB_STATE_CANCELLED
    with pytest.raises(grpc.aio.AioRpcError) as end:
        [_ async for _ in second]
    assert end.value.code() == grpc.StatusCode.CANCELLED
    gate.set()
    assert [r.event async for r in first][-1].HasField("completed")
    assert service.script.calls.count("encode") == 1


@pytest.mark.parametrize("max_queued_jobs", [1])
async def test_a_full_queue_refuses_with_the_delay_to_wait(service: Service) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    await start(service)
    await until(service, "sample:0.1")
    waiting, _ = await start(service)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await start(service)
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b"google.rpc.RetryInfo" in dict(refusal.value.trailing_metadata())["grpc-status-details-bin"]
    assert len(service.jobs()) == 2
    assert waiting is not None


async def test_a_caller_that_goes_leaves_the_job_running(service: Service) -> None:
    gate = service.script.gates["sample:1.1"] = asyncio.Event()
    stream, job_id = await start(service)
    await until(service, "sample:1.1")
    stream.cancel()
    gate.set()
    job = service.job(job_id)
    async with asyncio.timeout(10):
        await job.ended.wait()
    assert job.state == video_pb2.JOB_STATE_SUCCEEDED


async def test_a_caller_that_asked_for_it_cancels_by_going(service: Service) -> None:
    service.script.gates["sample:1.1"] = asyncio.Event()
    stream, job_id = await start(service, cancel_on_disconnect=True)
    await until(service, "sample:1.1")
    stream.cancel()
    job = service.job(job_id)
    async with asyncio.timeout(10):
        await job.ended.wait()
    assert job.state == video_pb2.JOB_STATE_CANCELLED


async def test_a_reader_that_stalls_slows_nobody(service: Service) -> None:
    stream, job_id = await start(service)  # and never reads again
    async with asyncio.timeout(10):
        await service.job(job_id).ended.wait()
    assert (await service.generate())[-1].HasField("completed")
    assert [r.event async for r in stream][-1].HasField("completed")


async def test_finished_jobs_beyond_the_limit_are_forgotten_with_their_files(service: Service) -> None:
    ids = [(await service.generate())[0].job_id for _ in range(5)]
    assert sorted(p.name for p in (service.data / "jobs").glob("[!.]*")) == sorted(ids[-3:])
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await service.stub.GetJob(video_pb2.GetJobRequest(job_id=ids[0]))
    assert missing.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("num_lanes", [2])
async def test_two_lanes_run_two_jobs_at_once(service: Service) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    streams = [(await start(service))[0] for _ in range(2)]
    async with asyncio.timeout(10):
        while service.script.calls.count("sample:0.1") < 2:
            await asyncio.sleep(0.01)
    gate.set()
    for stream in streams:
        assert [r.event async for r in stream][-1].HasField("completed")


async def test_stopping_drains_the_running_job_and_refuses_new_ones(service: Service) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    running, _ = await start(service)
    await until(service, "sample:0.1")
    waiting, _ = await start(service)
    stopping = asyncio.create_task(service.scheduler.stop(10, asyncio.Event()))
    await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await start(service)
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        [_ async for _ in waiting]
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    gate.set()
    assert [r.event async for r in running][-1].HasField("completed")
    await stopping
