"""A server that is told to stop while its model is still being loaded does not load it to the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.phases import Worker
from orchestrator.__main__ import StopSignal, make_scheduler, serve_jobs
from orchestrator.config import Settings
from tests.service.conftest import MODEL


class LoadingHost:
    """A lane that reads its weights for ever."""

    def __init__(self) -> None:
        self.is_loading = asyncio.Event()
        self.is_stopped = False

    async def start(self) -> Mapping[Worker, str]:
        self.is_loading.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        self.is_stopped = True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_while_the_model_is_loaded_ends_the_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    host = LoadingHost()
    settings = Settings(model=tmp_path, data=tmp_path, listen="127.0.0.1:0")
    stop = StopSignal(exit_with_parent=False)
    scheduler = make_scheduler(settings, [host])
    scheduler.open()
    serving = asyncio.create_task(serve_jobs(settings, MODEL, (), stop, scheduler, tmp_path))
    async with asyncio.timeout(10):
        await host.is_loading.wait()
        os.kill(os.getpid(), number)
        await serving
    assert host.is_stopped
    assert "listening on" not in capsys.readouterr().out
