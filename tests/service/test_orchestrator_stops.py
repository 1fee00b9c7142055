"""A server that is told to stop while its model is still being loaded does not load it to the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.phases import Worker
from h3stream.errors import StartupError
from orchestrator.__main__ import StopSignal, make_scheduler, serve_jobs
from orchestrator.config import Settings
from orchestrator.lanes import RayLane
from services.common.rpc import RpcServer
from tests.service.conftest import MODEL


class LoadingHost:
    """A lane that reads its weights for ever."""

    def __init__(self) -> None:
        self.is_loading = asyncio.Event()
        self.is_stopped = False
        self.fails_to_stop = False

    async def start(self) -> Mapping[Worker, str]:
        self.is_loading.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        self.is_stopped = True
        if self.fails_to_stop:
            raise OSError("it cannot be stopped")


async def test_a_lane_that_has_never_been_started_can_be_stopped(tmp_path: Path) -> None:
    await RayLane(Settings(model=tmp_path, data=tmp_path), tmp_path, 0).stop()


async def test_a_server_whose_address_is_taken_ends_all_that_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = RpcServer(())
    host = LoadingHost()
    settings = Settings(model=tmp_path, data=tmp_path, listen=await taken.start("127.0.0.1:0"))
    scheduler = make_scheduler(settings, [host])
    scheduler.open()
    stop_core = AsyncMock(wraps=RpcServer.stop)
    monkeypatch.setattr(RpcServer, "stop", lambda server, grace_s: stop_core(server, grace_s))
    host.fails_to_stop = True
    with pytest.raises(OSError, match="it cannot be stopped") as failed:
        await serve_jobs(settings, MODEL, (), StopSignal(exit_with_parent=False), scheduler, tmp_path)
    assert isinstance(failed.value.__context__, StartupError)
    assert host.is_stopped
    assert stop_core.await_count == 1, "whatever becomes of the lanes"
    await RpcServer.stop(taken, grace_s=0)


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
