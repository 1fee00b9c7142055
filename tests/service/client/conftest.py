from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from h3stream import AsyncClient, Client, Event
from tests.fakes import FakeVideoService, serve_video

Call = Callable[..., Any]
"""`await call("refine", "job-0")` collects the events of that call."""
CLI = [sys.executable, "-m", "h3stream.cli"]


@dataclass
class Result:
    status: int
    out: bytes
    err: str


Run = Callable[..., Awaitable[Result]]


async def start(*arguments: str, cwd: Path) -> Process:
    return await asyncio.create_subprocess_exec(*CLI, *arguments, cwd=cwd, stdout=PIPE, stderr=PIPE)


async def finish(process: Process) -> Result:
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return Result(process.returncode, out, err.decode())


@pytest.fixture
def run(address: str, tmp_path: Path) -> Run:
    async def run(*arguments: str) -> Result:
        return await finish(await start(*arguments, "--server", address, cwd=tmp_path))

    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def service() -> FakeVideoService:
    """A small VideoService that behaves, and can be told not to."""
    return FakeVideoService()


@pytest.fixture
async def address(service: FakeVideoService) -> AsyncIterator[str]:
    """Where it listens, on a real socket."""
    async with serve_video(service) as address:
        yield address


@pytest.fixture(params=["asyncio", "blocking"])
async def call(request: pytest.FixtureRequest, address: str) -> Call:
    async def with_asyncio(verb: str, *arguments: Any, **options: Any) -> list[Event]:
        async with AsyncClient(address) as client:
            return [event async for event in getattr(client, verb)(*arguments, **options)]

    def block(verb: str, *arguments: Any, **options: Any) -> list[Event]:
        with Client(address) as client:
            return list(getattr(client, verb)(*arguments, **options))

    async def with_threads(*arguments: Any, **options: Any) -> list[Event]:
        return await asyncio.to_thread(block, *arguments, **options)

    return with_asyncio if request.param == "asyncio" else with_threads
