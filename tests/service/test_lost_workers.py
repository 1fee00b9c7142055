"""A worker that is lost costs its own work, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from core.phases import Worker
from h3stream.v1 import video_pb2
from orchestrator.lane import Lane
from orchestrator.recovery import MAX_LOSSES
from tests.service.conftest import Service
from tests.service.test_cancel_and_queue import start, until


async def rest_of(stream: grpc.aio.UnaryStreamCall) -> list[video_pb2.Event]:
    return [response.event async for response in stream]


LOST_EACH_TIME = {f"dit.SampleChunk#{1 + loss}" for loss in range(MAX_LOSSES)}
"""Deaths of the DiT worker whenever it begins with chunk 1."""


async def test_the_others_are_closed_though_one_is_lost_for_good(service: Service) -> None:
    service.script.deaths |= LOST_EACH_TIME
    stream, _ = await start(service)
    with pytest.raises(grpc.aio.AioRpcError) as end:
        await rest_of(stream)
    assert end.value.code() == grpc.StatusCode.UNAVAILABLE
    assert end.value.details() == "the dit worker is gone"
    assert "close" not in service.script.calls
    assert "close_vae" in service.script.calls
    assert (await service.generate())[-1].HasField("completed")


async def test_what_a_worker_leaves_after_the_end_of_its_job_is_removed_with_the_worker(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Lane.restart
    left: list[Path] = []

    async def leave_a_part_and_restart(lane: Lane) -> None:
        left.extend(path.parent / ".frames.mkv.part" for path in service.data.glob("jobs/*/job.binpb"))
        for path in left:
            path.write_bytes(b"part")
        await restart(lane)

    monkeypatch.setattr(Lane, "restart", leave_a_part_and_restart)
    service.script.deaths |= LOST_EACH_TIME
    stream, job_id = await start(service)
    with pytest.raises(grpc.aio.AioRpcError):
        await rest_of(stream)
    assert (await service.generate())[-1].HasField("completed")
    assert len(left) == 1
    found = {path.name for path in (service.data / "jobs" / job_id).iterdir()}
    assert found == {"job.binpb", "events.log", "end.binpb"}


async def test_a_worker_that_is_lost_when_its_work_is_done_costs_no_record(service: Service) -> None:
    gate = service.script.gates["finish"] = asyncio.Event()
    stream, job_id = await start(service)
    await until(service, "finish")
    await service.host.kill(Worker.TEXT_ENCODER)
    gate.set()
    events = await rest_of(stream)
    assert events[-1].HasField("completed")
    assert [event.warning.message for event in events if event.HasField("warning")] == []
    told = json.loads((service.data / "jobs" / job_id / "provenance.json").read_text())
    assert told["workers"].keys() == {"text_encoder", "dit", "vae"}
    assert told["workers"]["text_encoder"]["weight_digests"] == {"text_encoder/model.safetensors": "00" * 32}
    assert all(worker["peak_host_bytes"] > 0 for worker in told["workers"].values())
