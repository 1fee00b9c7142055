from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from h3stream.request import ClipSpec
from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator.caller import Caller
from orchestrator.config import Settings
from orchestrator.edge import Edge
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.model_info import ModelInfo, dense_clip
from orchestrator.scheduler import Scheduler
from orchestrator.servicer import SERVICE_NAME, add_services
from orchestrator.tenants import NoLimits, TenantPolicy
from services.common.rpc import RpcServer, connect
from tests.service.fake_workers import ADAPTERS, FakeLaneHost, Script

CLIP = ClipSpec(
    num_frames=39, width=64, height=64, steps=2, video_shift=12.0, audio_shift=3.0, sink=2, window=2,
    kv_storage="gpu", seed=0,
)  # fmt: skip

MODEL = ModelInfo("fake", CLIP, dense_clip(CLIP, 5), "made of fakes", ("A fox.", "A kite."))


@asynccontextmanager
async def serving(directory: Path, *core_of: Any) -> AsyncIterator[str]:
    """A core with an edge in front of it, both on this event loop; yields the address for callers.

    directory: the socket between them goes there.  core_of: what `add_services` makes the core of.
    """
    core = RpcServer((SERVICE_NAME,))
    add_services(core.server, *core_of)
    edge = Edge(await core.start(f"unix:{directory}/core.sock"))
    try:
        yield await edge.start("127.0.0.1:0")
    finally:
        await edge.stop(grace_s=0)
        await core.stop(grace_s=0)


@dataclass
class Service:
    """The orchestrator and its edge on real sockets over fake workers."""

    stub: Any
    address: str
    script: Script
    hosts: list[FakeLaneHost]
    scheduler: Scheduler
    data: Path

    @property
    def host(self) -> FakeLaneHost:
        return self.hosts[0]

    def jobs(self) -> list[Job]:
        """All jobs, oldest first."""
        return self.scheduler.page(None, (), "", 1000)[0][::-1]

    def job(self, job_id: str) -> Job:
        return self.scheduler.job(job_id, Caller())

    async def generate(self, prompt: str = "a fox", **fields: Any) -> list[video_pb2.Event]:
        request = video_pb2.GenerateRequest(prompt=prompt, **fields)
        return [response.event async for response in self.stub.Generate(request)]


@pytest.fixture
def num_lanes() -> int:
    return 1


@pytest.fixture
def max_queued_jobs() -> int:
    return 4


@pytest.fixture
def kept_bytes() -> int:
    return 0


@pytest.fixture
def tenants() -> TenantPolicy:
    return NoLimits()


@pytest.fixture
async def service(
    tmp_path: Path, num_lanes: int, max_queued_jobs: int, kept_bytes: int, tenants: TenantPolicy
) -> AsyncIterator[Service]:
    script = Script()
    hosts = []
    for index in range(num_lanes):
        (tmp_path / str(index)).mkdir()
        hosts.append(FakeLaneHost(tmp_path / str(index), script))
    settings = Settings(model=tmp_path, data=tmp_path, lanes=num_lanes, max_queued_jobs=max_queued_jobs)
    scheduler = Scheduler(
        [Lane(host) for host in hosts],
        tmp_path,
        max_queued_jobs=max_queued_jobs,
        kept_jobs=3,
        kept_bytes=kept_bytes,
        tenants=tenants,
    )
    scheduler.open()
    await scheduler.start()
    async with serving(tmp_path, scheduler, MODEL, ADAPTERS, settings) as address, connect(address) as channel:
        yield Service(video_pb2_grpc.VideoServiceStub(channel), address, script, hosts, scheduler, tmp_path)
        for gate in script.gates.values():
            gate.set()
        await scheduler.stop(0, asyncio.Event())
