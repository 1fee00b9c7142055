"""Following a job from its log: where a viewer starts, what it sees, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from h3stream.errors import InvalidRequestError, JobNotFoundError
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2
from tests.service.conftest import Service
from tests.service.fake_workers import broken


async def attach(service: Service, job_id: str, **start: Any) -> list[video_pb2.Event]:
    call = service.stub.Attach(video_pb2.AttachRequest(job_id=job_id, **start))
    return [response.event async for response in call]


async def begin(service: Service, **fields: Any) -> tuple[asyncio.Task[list[video_pb2.Event]], str]:
    """A job whose events are collected."""
    call = service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox", **fields))
    first = (await anext(aiter(call))).event

    async def rest() -> list[video_pb2.Event]:
        return [first, *[response.event async for response in call]]

    return asyncio.create_task(rest()), first.job_id


def fragment_seq(events: list[video_pb2.Event], chunk_index: int) -> int:
    return next(e.seq for e in events if e.HasField("fragment") and e.fragment.chunk_index >= chunk_index)


def init_seq(events: list[video_pb2.Event]) -> int:
    return next(e.seq for e in events if e.HasField("init_segment"))


async def test_a_job_that_has_ended_is_told_from_every_event(service: Service) -> None:
    made = await service.generate()
    job_id = made[0].job_id
    assert await attach(service, job_id) == made
    for seq in range(len(made) + 1):
        assert await attach(service, job_id, from_seq=seq) == made[seq:]


async def test_a_job_that_has_ended_is_told_from_every_chunk(service: Service) -> None:
    made = await service.generate(num_frames=73)
    init, last = made[init_seq(made)], fragment_seq(made, 4)
    for chunk_index in range(5):
        start = fragment_seq(made, chunk_index)
        assert await attach(service, made[0].job_id, from_chunk=chunk_index) == [made[0], init, *made[start:]]
    assert await attach(service, made[0].job_id, live=True) == [made[0], init, *made[last:]]


async def test_viewers_of_a_job_in_progress_see_what_its_caller_sees(service: Service) -> None:
    gate = service.script.gates["sample:3.1"] = asyncio.Event()
    caller, job_id = await begin(service, num_frames=73)
    while "sample:3.1" not in service.script.calls:
        await asyncio.sleep(0.01)
    starts: list[dict[str, Any]] = [{}, {"from_seq": 3}, {"from_chunk": 1}, {"from_chunk": 4}, {"live": True}]
    viewers = [asyncio.create_task(attach(service, job_id, **start)) for start in starts]
    await asyncio.sleep(0.1)
    gate.set()
    made = await caller
    preface = [made[0], made[init_seq(made)]]
    whole, from_seq, from_chunk, from_last, live = [await viewer for viewer in viewers]
    assert whole == made
    assert from_seq == made[3:]
    assert from_chunk == [*preface, *made[fragment_seq(made, 1) :]]
    assert from_last == [*preface, *made[fragment_seq(made, 4) :]]
    assert live == [*preface, *made[fragment_seq(made, 2) :]]


async def test_a_waiting_job_can_be_followed_before_it_runs(service: Service) -> None:
    gate = service.script.gates["sample:0.1"] = asyncio.Event()
    first, _ = await begin(service)
    second, job_id = await begin(service, seed=1)
    viewers = [asyncio.create_task(attach(service, job_id, **start)) for start in ({}, {"live": True})]
    await asyncio.sleep(0.1)
    gate.set()
    await first
    made = await second
    assert await viewers[0] == made
    assert await viewers[1] == [made[0], made[init_seq(made)], *made[fragment_seq(made, 0) :]]


async def test_two_jobs_are_told_apart(service: Service) -> None:
    made = [await service.generate(seed=seed) for seed in (1, 2)]
    told = await asyncio.gather(*(attach(service, events[0].job_id) for events in made for _ in range(3)))
    assert told == [made[0]] * 3 + [made[1]] * 3
    assert made[0] != made[1]


async def test_a_failed_job_tells_its_events_and_then_its_error(service: Service) -> None:
    service.script.errors["sample:2.1"] = broken("out of order")
    caller, job_id = await begin(service, num_frames=73)
    with pytest.raises(grpc.RpcError):
        await caller
    num_events = service.job(job_id).to_proto().num_events
    for start, num_seen in (({}, num_events), ({"from_seq": num_events}, 0), ({"from_chunk": 4}, 2)):
        call = service.stub.Attach(video_pb2.AttachRequest(job_id=job_id, **start))
        for _ in range(num_seen):
            assert (await call.read()).event.job_id == job_id
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await call.read()
        error = from_rpc_error(end.value)
        assert (error.reason, error.message, error.job_id) == ("PHASE_FAILED", "out of order", job_id)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ({"from_seq": 10_000}, "from_seq is 10000; the job has {n} events so far, the most it may be"),
        ({"from_chunk": -1}, "from_chunk is -1; the chunks of the job are 0 to 2"),
        ({"from_chunk": 3}, "from_chunk is 3; the chunks of the job are 0 to 2"),
        ({"live": False}, "live is false; it must be true, or left out"),
    ],
    ids=str,
)
async def test_a_start_that_does_not_exist_is_refused(service: Service, start: dict[str, Any], words: str) -> None:
    made = await service.generate()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await attach(service, made[0].job_id, **start)
    error = from_rpc_error(refusal.value)
    assert isinstance(error, InvalidRequestError)
    expected = [(*start, words.format(n=len(made)))]
    assert [(violation.field, violation.description) for violation in error.violations] == expected


async def test_a_job_that_is_not_there_is_not_found(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await attach(service, "nobody")
    assert isinstance(from_rpc_error(refusal.value), JobNotFoundError)


async def test_a_viewer_that_leaves_cancels_nothing(service: Service) -> None:
    gate = service.script.gates["sample:1.1"] = asyncio.Event()
    caller, job_id = await begin(service)
    viewer = asyncio.create_task(attach(service, job_id))
    while "sample:1.1" not in service.script.calls:
        await asyncio.sleep(0.01)
    viewer.cancel()
    await asyncio.wait([viewer])
    gate.set()
    assert (await caller)[-1].HasField("completed")
