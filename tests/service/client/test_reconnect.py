"""Both clients where a connection is lost: they go on from the next event, or say that they do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from h3stream import (
    AsyncClient,
    DeadlineError,
    Fragment,
    GenerateRequest,
    IdempotencyKeyError,
    InitSegment,
    JobNotFoundError,
    ModelLoadingError,
    MuxError,
    NotReadyError,
)
from h3stream.stream import attach_request
from tests.fakes import FakeVideoService, Script, events_of, plan_of, serve_video
from tests.service.client.conftest import Call

PLAN = plan_of(GenerateRequest("a fox"))
MADE = list(events_of(PLAN))
FRAGMENTS = [event.seq for event in MADE if isinstance(event, Fragment)]
INIT = next(event.seq for event in MADE if isinstance(event, InitSegment))


async def test_events_go_on_where_they_were_lost(call: Call, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[3, 4, 9, 9, len(MADE) - 1])
    assert await call("generate", "a fox") == MADE
    assert len(service.requests) == 1
    assert service.attached == [attach_request("job-0", from_seq=seq) for seq in (3, 4, 9, 9, len(MADE) - 1)]


async def test_a_job_can_be_followed_from_anywhere(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    assert await call("attach", "job-0") == MADE
    assert await call("attach", "job-0", from_seq=5) == MADE[5:]
    assert await call("attach", "job-0", from_seq=len(MADE)) == []
    assert await call("attach", "job-0", from_chunk=2) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[1] :]]
    assert await call("attach", "job-0", live=True) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[-1] :]]


async def test_joining_a_job_survives_losses_too(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    service.script = Script(lose_at=[INIT, FRAGMENTS[1], FRAGMENTS[1] + 1])
    assert await call("attach", "job-0", from_chunk=2) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[1] :]]
    join = attach_request("job-0", from_chunk=2)
    assert service.attached == [join, join, join, attach_request("job-0", from_seq=FRAGMENTS[1] + 1)]


@pytest.mark.parametrize("start", [{}, {"from_seq": 5}, {"live": True}], ids=str)
async def test_a_loss_before_the_first_event_of_a_job_that_is_followed_is_one_like_others(
    call: Call, service: FakeVideoService, start: dict[str, Any]
) -> None:
    await call("generate", "a fox")
    seen = await call("attach", "job-0", **start)
    service.script, service.attached = Script(lose_at=[seen[0].seq, seen[0].seq]), []
    assert await call("attach", "job-0", **start) == seen
    assert [(request.job_id, request.from_seq, request.live) for request in service.attached] == [
        ("job-0", start.get("from_seq", 0), start.get("live", False))
    ] * 3


async def test_a_job_that_was_never_told_of_is_asked_for_again_under_the_same_name(
    call: Call, service: FakeVideoService
) -> None:
    service.script = Script(lose_at=[0, 0])
    assert await call("generate", "a fox") == MADE
    assert (len(service.requests), service.attached) == (1, [])
    assert await call("generate", "a fox") == list(events_of(PLAN, "job-1"))
    first, second = sorted(set(service.idempotency_keys), key=service.idempotency_keys.index)
    assert service.idempotency_keys == [first, first, first, second]
    assert min(len(first), len(second)) > 20


async def test_a_name_that_the_caller_gives_is_kept(call: Call, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[0])
    assert await call("generate", "a fox", idempotency_key="my-fox") == MADE
    assert await call("generate", "a fox", idempotency_key="my-fox") == MADE
    assert (service.idempotency_keys, len(service.requests)) == (["my-fox"] * 3, 1)
    with pytest.raises(IdempotencyKeyError, match="my-fox has named another request"):
        await call("generate", "a bear", idempotency_key="my-fox")


async def test_a_refinement_of_a_job_is_asked_for_again_under_the_same_name(
    call: Call, service: FakeVideoService
) -> None:
    await call("generate", "a fox")
    service.script = Script(lose_at=[0])
    assert (await call("refine", "job-0"))[0].job_id == "refine-0"
    _, first, second = service.idempotency_keys
    assert (first, len(service.headers)) == (second, 1)


@pytest.mark.parametrize("num_loading_calls", [0, 3])
async def test_a_server_that_is_started_again_is_waited_for(
    call: Call, service: FakeVideoService, num_loading_calls: int
) -> None:
    service.script = Script(restart_at=[0, 4, len(MADE) - 1], num_loading_calls=num_loading_calls)
    assert await call("generate", "a fox") == MADE
    assert len(service.requests) == 1
    assert service.attached == [attach_request("job-0", from_seq=seq) for seq in (4, len(MADE) - 1)]
    service.script = Script(restart_at=[0, 4], num_loading_calls=num_loading_calls)
    assert await call("attach", "job-0", from_chunk=2) == [MADE[0], MADE[INIT], *MADE[FRAGMENTS[1] :]]


async def test_a_server_that_is_starting_refuses_who_was_not_there_before(
    call: Call, service: FakeVideoService
) -> None:
    service.script = Script(refuse_with=ModelLoadingError("the model is still being loaded"))
    with pytest.raises(ModelLoadingError):
        await call("generate", "a fox")


@pytest.mark.parametrize("options", [{"reconnect_s": 0}, {"cancel_on_disconnect": True}], ids=str)
async def test_nothing_is_tried_again_where_it_is_not_wanted(
    call: Call, service: FakeVideoService, options: dict[str, Any]
) -> None:
    service.script = Script(lose_at=[3])
    with pytest.raises(NotReadyError, match="Socket closed"):
        await call("generate", "a fox", **options)
    assert service.attached == []


@pytest.mark.parametrize("error", [MuxError("no encoder"), NotReadyError("the server stopped")], ids=str)
async def test_the_end_of_the_job_is_no_loss(call: Call, service: FakeVideoService, error: Any) -> None:
    service.script = Script(fail_at=3, fail_with=error)
    with pytest.raises(type(error), match=error.message):
        await call("generate", "a fox")
    assert service.attached == []


async def test_a_server_that_has_forgotten_the_job_says_so(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    service.script = Script(lose_at=[3])

    async def restart() -> None:
        while service.script.lose_at:
            await asyncio.sleep(0.01)
        service.requests.clear()

    restarting = asyncio.create_task(restart())
    with pytest.raises(JobNotFoundError):
        await call("attach", "job-0")
    await restarting


async def test_a_server_that_does_not_come_back_is_given_up(call: Call, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[3] * 1000)
    with pytest.raises(NotReadyError, match="Socket closed"):
        await call("generate", "a fox", reconnect_s=0.5)
    assert len(service.attached) >= 2


async def test_the_time_without_a_connection_counts_as_standing_still(call: Call, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[3] * 1000)
    with pytest.raises(DeadlineError):
        await call("generate", "a fox", stall_timeout_s=0.5)


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
