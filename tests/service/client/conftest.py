from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from h3stream import AsyncClient, Client, Event
from tests.fakes import FakeVideoService, serve_video

Call = Callable[..., Any]
"""`await call("refine", "job-0")` collects the events of that call."""


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
