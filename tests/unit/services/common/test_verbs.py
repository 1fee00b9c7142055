from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
import torch

from services.common.verbs import Cancelled, VerbCancelled, VerbRunner

LIMIT_S = 20


@pytest.fixture
async def runner() -> AsyncIterator[VerbRunner]:
    runner = VerbRunner("test")
    yield runner
    runner.close()


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true within the limit."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.001)
    return False


async def test_a_verb_returns_its_result(runner: VerbRunner) -> None:
    assert await runner.run(lambda cancelled: 41 + 1) == 42


async def test_verbs_run_on_one_thread_that_is_not_the_loops(runner: VerbRunner) -> None:
    threads = [await runner.run(lambda _: threading.current_thread()) for _ in range(3)]
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


async def test_verbs_compute_without_gradients(runner: VerbRunner) -> None:
    assert torch.is_grad_enabled()
    assert await runner.run(lambda _: torch.is_grad_enabled()) is False


async def test_only_one_verb_runs_at_a_time(runner: VerbRunner) -> None:
    running, most = 0, 0

    def verb(_: Cancelled) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1

    await asyncio.gather(*(runner.run(verb) for _ in range(5)))
    assert most == 1


async def test_the_loop_turns_while_a_verb_computes(runner: VerbRunner) -> None:
    release = threading.Event()
    verb = asyncio.create_task(runner.run(lambda _: release.wait(LIMIT_S)))
    await asyncio.sleep(0.01)
    assert not verb.done()
    release.set()
    assert await verb is True


async def test_an_exception_reaches_the_caller_and_the_next_verb_runs(runner: VerbRunner) -> None:
    def fails(_: Cancelled) -> None:
        raise ValueError("no such chunk")

    with pytest.raises(ValueError, match="no such chunk"):
        await runner.run(fails)
    assert await runner.run(lambda _: "next") == "next"


async def test_a_cancelled_caller_stops_its_verb(runner: VerbRunner) -> None:
    started, stopped = threading.Event(), threading.Event()

    def verb(cancelled: Cancelled) -> None:
        started.set()
        if wait_until(cancelled):
            stopped.set()
            raise VerbCancelled

    task = asyncio.create_task(runner.run(verb))
    await asyncio.to_thread(started.wait, LIMIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(stopped.wait, LIMIT_S)
    assert await runner.run(lambda _: "free") == "free"


async def test_a_stream_yields_in_order_while_the_verb_runs(runner: VerbRunner) -> None:
    seen = threading.Event()

    def verb(emit: Callable[[int], None], _: Cancelled) -> None:
        emit(0)
        assert seen.wait(LIMIT_S)  # the first item must arrive before the verb has ended
        for i in range(1, 100):
            emit(i)

    received = []
    items: AsyncIterator[int] = runner.stream(verb)
    async for item in items:
        received.append(item)
        seen.set()
    assert received == list(range(100))


async def test_a_stream_of_nothing_ends(runner: VerbRunner) -> None:
    items: AsyncIterator[int] = runner.stream(lambda emit, _: None)
    assert [item async for item in items] == []


async def test_what_was_emitted_before_a_failure_arrives_before_it(runner: VerbRunner) -> None:
    def verb(emit: Callable[[int], None], _: Cancelled) -> None:
        emit(1)
        raise ValueError("then it broke")

    items: AsyncIterator[int] = runner.stream(verb)
    assert await anext(items) == 1
    with pytest.raises(ValueError, match="then it broke"):
        await anext(items)


async def test_closing_a_stream_stops_its_verb(runner: VerbRunner) -> None:
    stopped = threading.Event()

    def verb(emit: Callable[[int], None], cancelled: Cancelled) -> None:
        emit(1)
        if wait_until(cancelled):
            stopped.set()
            raise VerbCancelled

    async with aclosing(runner.stream(verb)) as items:  # type: ignore[type-var]
        async for _ in items:
            break
    assert await asyncio.to_thread(stopped.wait, LIMIT_S)
    assert await runner.run(lambda _: "free") == "free"


async def test_cancelling_a_waiting_reader_stops_the_verb(runner: VerbRunner) -> None:
    started, stopped = threading.Event(), threading.Event()

    def verb(emit: Callable[[int], None], cancelled: Cancelled) -> None:
        started.set()
        if wait_until(cancelled):
            stopped.set()

    async def read() -> list[int]:
        return [item async for item in runner.stream(verb)]

    task = asyncio.create_task(read())
    await asyncio.to_thread(started.wait, LIMIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(stopped.wait, LIMIT_S)


async def test_a_verb_whose_caller_goes_while_it_waits_never_begins(runner: VerbRunner) -> None:
    release = threading.Event()
    begun: list[str] = []
    first = asyncio.create_task(runner.run(lambda _: release.wait(LIMIT_S)))

    async def read() -> list[int]:
        items: AsyncIterator[int] = runner.stream(lambda emit, _: begun.append("stream"))
        return [item async for item in items]

    waiting: list[asyncio.Task[object]] = [
        asyncio.create_task(read()),
        asyncio.create_task(runner.run(lambda _: begun.append("run"))),
    ]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    release.set()
    await first
    await runner.run(lambda _: None)
    assert begun == []
