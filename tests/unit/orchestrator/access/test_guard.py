"""What watches open calls goes on, whatever comes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from orchestrator.access import guard
from orchestrator.access.guard import Guard
from orchestrator.access.store import AccessStore


async def test_a_look_at_open_calls_that_fails_is_logged_and_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "RECHECK_S", 0.0)
    watched = Guard(AccessStore(None), None)
    looked = asyncio.Event()
    outcomes = [OverflowError("nobody has thought of this"), None]

    def recheck() -> None:
        if error := outcomes.pop(0):
            raise error
        looked.set()
        watching.cancel()

    monkeypatch.setattr(watched, "recheck", recheck)
    watching = asyncio.create_task(watched.watch())
    async with asyncio.timeout(10):
        await looked.wait()
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.ERROR, "open calls could not be looked at again")
    ]
