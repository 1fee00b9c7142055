"""Both clients where a connection is lost: they go on from the next event, or say that they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from h3stream import (
    AsyncClient,
    Client,
    DeadlineError,
    Event,
    Fragment,
    GenerateRequest,
    InitSegment,
    JobNotFoundError,
    MuxError,
    NotReadyError,
)
from h3stream.stream import attach_request
from tests.fakes import FakeVideoService, Script, events_of, plan_of, serve_video

PLAN = plan_of(GenerateRequest("a fox"))
MADE = list(events_of(PLAN))
FRAGMENTS = [event.seq for event in MADE if isinstance(event, Fragment)]
INIT = next(event.seq for event in MADE if isinstance(event, InitSegment))

Follow = Callable[..., Any]
"""`await follow("attach", "job-0", live=True)` collects the events of that call."""


@pytest.fixture(params=["asyncio", "blocking"])
async def follow(request: pytest.FixtureRequest, address: str) -> Follow:
    async def with_asyncio(verb: str, *arguments: Any, **options: Any) -> list[Event]:
        async with AsyncClient(address) as client:
            return [event async for event in getattr(client, verb)(*arguments, **options)]

    def block(verb: str, *arguments: Any, **options: Any) -> list[Event]:
        with Client(address) as client:
            return list(getattr(client, verb)(*arguments, **options))

    async def with_threads(*arguments: Any, **options: Any) -> list[Event]:
        return await asyncio.to_thread(block, *arguments, **options)

    return with_asyncio if request.param == "asyncio" else with_threads


async def test_events_go_on_where_they_were_lost(follow: Follow, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[3, 4, 9, 9, len(MADE) - 1])
    assert await follow("generate", "a fox") == MADE
    assert len(service.requests) == 1
    assert service.attached == [attach_request("job-0", from_seq=seq) for seq in (3, 4, 9, 9, len(MADE) - 1)]


async def test_a_job_can_be_followed_from_anywhere(follow: Follow, service: FakeVideoService) -> None:
    await follow("generate", "a fox")
    assert await follow("attach", "job-0") == MADE
    assert await follow("attach", "job-0", from_seq=5) == MADE[5:]
    assert await follow("attach", "job-0", from_seq=len(MADE)) == []
    assert await follow("attach", "job-0", from_chunk=2) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[1] :]]
    assert await follow("attach", "job-0", live=True) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[-1] :]]


async def test_joining_a_job_survives_losses_too(follow: Follow, service: FakeVideoService) -> None:
    await follow("generate", "a fox")
    service.script = Script(lose_at=[INIT, FRAGMENTS[1], FRAGMENTS[1] + 1])
    assert await follow("attach", "job-0", from_chunk=2) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[1] :]]
    join = attach_request("job-0", from_chunk=2)
    assert service.attached == [join, join, join, attach_request("job-0", from_seq=FRAGMENTS[1] + 1)]


@pytest.mark.parametrize("start", [{}, {"from_seq": 5}, {"live": True}], ids=str)
async def test_a_loss_before_the_first_event_of_a_job_that_is_followed_is_one_like_others(
    follow: Follow, service: FakeVideoService, start: dict[str, Any]
) -> None:
    await follow("generate", "a fox")
    seen = await follow("attach", "job-0", **start)
    service.script, service.attached = Script(lose_at=[seen[0].seq, seen[0].seq]), []
    assert await follow("attach", "job-0", **start) == seen
    assert [(request.job_id, request.from_seq, request.live) for request in service.attached] == [
        ("job-0", start.get("from_seq", 0), start.get("live", False))
    ] * 3


async def test_a_job_that_is_not_known_yet_is_not_made_twice(follow: Follow, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[0])
    with pytest.raises(NotReadyError):
        await follow("generate", "a fox")
    assert (len(service.requests), service.attached) == (1, [])


@pytest.mark.parametrize("options", [{"reconnect_s": 0}, {"cancel_on_disconnect": True}], ids=str)
async def test_nothing_is_tried_again_where_it_is_not_wanted(
    follow: Follow, service: FakeVideoService, options: dict[str, Any]
) -> None:
    service.script = Script(lose_at=[3])
    with pytest.raises(NotReadyError, match="Socket closed"):
        await follow("generate", "a fox", **options)
    assert service.attached == []


@pytest.mark.parametrize("error", [MuxError("no encoder"), NotReadyError("the server stopped")], ids=str)
async def test_the_end_of_the_job_is_no_loss(follow: Follow, service: FakeVideoService, error: Any) -> None:
    service.script = Script(fail_at=3, fail_with=error)
    with pytest.raises(type(error), match=error.message):
        await follow("generate", "a fox")
    assert service.attached == []


async def test_a_server_that_has_forgotten_the_job_says_so(follow: Follow, service: FakeVideoService) -> None:
    await follow("generate", "a fox")
    service.script = Script(lose_at=[3])

    async def restart() -> None:
        while service.script.lose_at:
            await asyncio.sleep(0.01)
        service.requests.clear()

    restarting = asyncio.create_task(restart())
    with pytest.raises(JobNotFoundError):
        await follow("attach", "job-0")
    await restarting


async def test_a_server_that_does_not_come_back_is_given_up(follow: Follow, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[3] * 1000)
    with pytest.raises(NotReadyError, match="Socket closed"):
        await follow("generate", "a fox", reconnect_s=0.5)
    assert len(service.attached) >= 2


async def test_the_time_without_a_connection_counts_as_standing_still(
    follow: Follow, service: FakeVideoService
) -> None:
    service.script = Script(lose_at=[3] * 1000)
    with pytest.raises(DeadlineError):
        await follow("generate", "a fox", stall_timeout_s=0.5)


async def test_a_server_that_comes_back_is_found_soon() -> None:
    service = FakeVideoService(script=Script(silent_at=3))
    async with serve_video(service) as address:
        client = AsyncClient(address)
        events = client.generate("a fox")
        received = [await anext(events) for _ in range(3)]
    service.script = Script()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    async with serve_video(service, address):
        received += [await waiting, *[event async for event in events]]
        await client.close()
    assert received == MADE
