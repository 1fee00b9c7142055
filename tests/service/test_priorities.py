"""In which order waiting jobs run, and by when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest

from h3stream.v1 import video_pb2
from tests.service.callers import CoreCaller, callers, status_of
from tests.service.conftest import Service
from tests.service.test_cancel_and_queue import until

LOW, NORMAL, HIGH = (video_pb2.JobPriority.Value(f"JOB_PRIORITY_{name}") for name in ("LOW", "NORMAL", "HIGH"))


@pytest.fixture
def max_queued_jobs() -> int:
    return 10


@pytest.fixture
async def pair(service: Service) -> AsyncIterator[list[CoreCaller]]:
    async with callers(service, ("studio", "generate"), ("other", "generate")) as found:
        yield found


async def occupied(service: Service, caller: CoreCaller) -> asyncio.Event:
    """A lane that is held by a job of the caller's until the event is set."""
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    await caller.submit()
    await until(service, "sample:0.1")
    return gate


async def order_of_ends(jobs: dict[str, tuple[CoreCaller, str]]) -> str:
    """The names of jobs in the order in which they ended; names are single letters."""
    ended = []

    async def wait(name: str, caller: CoreCaller, job_id: str) -> None:
        await caller.ended(job_id)
        ended.append((await caller.get(job_id)).end_time.ToNanoseconds())
        names.append(name)

    names: list[str] = []
    await asyncio.gather(*(wait(name, *job) for name, job in jobs.items()))
    return "".join(name for _, name in sorted(zip(ended, names, strict=True)))


async def test_priority_then_arrival_decide_among_the_jobs_of_a_tenant(
    service: Service, pair: list[CoreCaller]
) -> None:
    studio, _ = pair
    gate = await occupied(service, studio)
    jobs = {}
    for name, priority in zip("abcde", (LOW, NORMAL, HIGH, NORMAL, HIGH), strict=True):
        jobs[name] = studio, (await studio.submit(priority=priority)).job_id
    positions = {name: (await studio.get(job_id)).queue_position for name, (_, job_id) in jobs.items()}
    assert positions == {"c": 1, "e": 2, "b": 3, "d": 4, "a": 5}
    gate.set()
    assert await order_of_ends({name: jobs[name] for name in "ceb"}) == "ceb"
    assert await order_of_ends({name: jobs[name] for name in "da"}) == "da"


async def test_tenants_take_turns_whatever_their_priorities(service: Service, pair: list[CoreCaller]) -> None:
    studio, other = pair
    gate = await occupied(service, studio)
    jobs = {name: (studio, (await studio.submit(priority=HIGH)).job_id) for name in "abc"}
    jobs["x"] = other, (await other.submit(priority=LOW)).job_id
    jobs["y"] = other, (await other.submit(priority=LOW)).job_id
    positions = {name: (await caller.get(job_id)).queue_position for name, (caller, job_id) in jobs.items()}
    assert sorted(positions, key=lambda name: positions[name]) == list("xaybc")
    gate.set()
    assert await order_of_ends({name: jobs[name] for name in "xay"}) == "xay"


async def test_a_position_is_told_to_who_follows_and_falls(service: Service, pair: list[CoreCaller]) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    first = (await service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox")).read()).event.job_id
    await until(service, "sample:0.1")
    second = (await service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox")).read()).event.job_id
    third = service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox"))
    positions = []
    async for response in third:
        if response.event.HasField("progress") and response.event.progress.phase == video_pb2.Progress().phase + 1:
            positions.append(response.event.progress.queue_position)
            if positions == [2]:
                await service.stub.CancelJob(video_pb2.CancelJobRequest(job_id=second))
            elif positions[-1] == 1:
                gate.set()
    assert first
    assert sorted(set(positions), reverse=True)[:2] == [2, 1]
    assert positions == sorted(positions, reverse=True)


async def test_a_job_past_its_deadline_never_runs(service: Service, pair: list[CoreCaller]) -> None:
    studio, _ = pair
    gate = await occupied(service, studio)
    job_id = (await studio.submit(deadline_s=0.01)).job_id
    status, message = await status_of(studio.ended(job_id))
    assert status == "DEADLINE_EXCEEDED"
    assert "0.01 s" in message
    job = await studio.get(job_id)
    assert (job.state, job.error.reason) == (video_pb2.JOB_STATE_FAILED, "DEADLINE_EXCEEDED")
    gate.set()
    assert service.script.calls.count("encode") == 1


async def collect(call: grpc.aio.UnaryStreamCall, events: list[video_pb2.Event]) -> None:
    async for response in call:
        events.append(response.event)


async def test_a_job_past_its_deadline_leaves_the_lane_and_keeps_what_was_delivered(
    service: Service, pair: list[CoreCaller]
) -> None:
    studio, _ = pair
    service.script.gates["sample:2.1"] = asyncio.Event()
    call = service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox", deadline_s=1))
    events: list[video_pb2.Event] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call, events)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    fragments = [event.fragment for event in events if event.HasField("fragment")]
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=events[0].job_id))).job
    assert job.state == video_pb2.JOB_STATE_FAILED
    assert job.num_frames_emitted == sum(fragment.num_frames for fragment in fragments) > 0
    service.script.gates.clear()
    await studio.ended((await studio.submit(deadline_s=3600)).job_id)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf])
async def test_a_deadline_is_a_number_of_seconds(pair: list[CoreCaller], deadline_s: float) -> None:
    studio, _ = pair
    for call in (studio.submit(deadline_s=deadline_s), studio.refine(job_id="job", deadline_s=deadline_s)):
        status, message = await status_of(call)
        assert status == "INVALID_ARGUMENT"
        assert "deadline_s is" in message


async def test_a_priority_that_does_not_exist_is_refused(pair: list[CoreCaller]) -> None:
    studio, _ = pair
    for call in (studio.submit(priority=9), studio.refine(job_id="job", priority=9)):
        status, message = await status_of(call)
        assert status == "INVALID_ARGUMENT"
        assert "priority is 9; it must be one of JOB_PRIORITY_LOW (1), JOB_PRIORITY_NORMAL (2)" in message
