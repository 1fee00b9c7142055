"""The edge as a child: there again after it dies, gone with its parent, stopped when its streams have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3stream.errors import StartupError
from orchestrator.edge_process import EdgeProcess
from services.common.rpc import RpcServer, connect

PARENT = """
import asyncio, sys
from orchestrator.edge_process import EdgeProcess

async def main():
    print(await EdgeProcess("unix:/nowhere").start("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[str]:
    server = RpcServer(())
    yield await server.start(f"unix:{tmp_path}/core.sock")
    await server.stop(grace_s=0)


def edges_below(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "orchestrator.edge" in child.cmdline()]


async def gone(process: psutil.Process) -> None:
    async with asyncio.timeout(20):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def answers(address: str) -> None:
    """Returns once the edge at an address tells the core's health."""
    async with asyncio.timeout(20):
        while True:
            async with connect(address) as channel:
                with suppress(grpc.aio.AioRpcError):
                    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                    return
            await asyncio.sleep(0.05)


async def test_one_that_is_killed_is_there_again_on_its_address(core: str) -> None:
    edge = EdgeProcess(core)
    address = await edge.start("127.0.0.1:0")
    await answers(address)
    (first,) = edges_below(os.getpid())
    first.kill()
    await gone(first)
    await answers(address)
    (second,) = edges_below(os.getpid())
    assert second.pid != first.pid
    await edge.stop()
    await gone(second)
    assert edges_below(os.getpid()) == []


async def test_an_address_that_is_taken_is_told_as_by_any_server(core: str) -> None:
    taken = RpcServer(())
    address = await taken.start("127.0.0.1:0")
    edge = EdgeProcess(core)
    with pytest.raises(StartupError, match=f"^cannot listen on {address}: "):
        await edge.start(address)
    await edge.stop()
    await taken.stop(grace_s=0)


async def test_it_knows_nothing_of_rays_and_what_else_the_server_knows(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    edge = EdgeProcess(core)
    await edge.start("127.0.0.1:0")
    (process,) = edges_below(os.getpid())
    environment = process.environ()
    await edge.stop()
    assert [name for name in environment if name.startswith("RAY_")] == []
    assert environment["GRPC_VERBOSITY"] == "DEBUG"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_the_whole_group_is_left_to_the_parent(core: str, number: signal.Signals) -> None:
    edge = EdgeProcess(core)
    address = await edge.start("127.0.0.1:0")
    (process,) = edges_below(os.getpid())
    process.send_signal(number)
    await answers(address)
    assert edges_below(os.getpid()) == [process]
    await edge.stop()


async def test_it_goes_with_its_parent_however_that_goes() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    address = (await parent.stdout.readline()).decode().strip()
    (edge,) = edges_below(parent.pid)
    parent.kill()
    await parent.wait()
    await gone(edge)
    again = RpcServer(())
    assert await again.start(address) == address, "its address is free"
    await again.stop(grace_s=0)
