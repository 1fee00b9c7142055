from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes import FakeVideoService, serve_video


@pytest.fixture
def service() -> FakeVideoService:
    """A small VideoService that behaves, and can be told not to."""
    return FakeVideoService()


@pytest.fixture
async def address(service: FakeVideoService) -> AsyncIterator[str]:
    """Where it listens, on a real socket."""
    async with serve_video(service) as address:
        yield address
