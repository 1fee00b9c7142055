"""Stills on the way: when they come, who decides, and that a job without them is the same."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from core.phases import Worker
from h3stream.codec import server_info_from_proto
from h3stream.errors import InvalidRequestError
from h3stream.request import PreviewSpec
from h3stream.status import from_rpc_error
from h3stream.v1 import types_pb2, video_pb2
from tests.service.conftest import Service


def spec(max_side: int, every_steps: int) -> types_pb2.PreviewSpec:
    return types_pb2.PreviewSpec(max_side=max_side, every_steps=every_steps)


def steps_shown(events: list[video_pb2.Event]) -> list[tuple[int, int]]:
    return [(e.preview.chunk_index, e.preview.step) for e in events if e.HasField("preview")]


def result(events: list[video_pb2.Event]) -> tuple[str, list[bytes]]:
    return events[-1].completed.latents_sha256, [e.fragment.data for e in events if e.HasField("fragment")]


async def test_the_first_still_leaves_behind_the_first_forward_of_chunk_0(service: Service) -> None:
    release = service.script.gates["sample:0.2"] = asyncio.Event()
    events = []
    stream = service.stub.Generate(video_pb2.GenerateRequest(prompt="a fox", seed=3))
    async for response in stream:
        events.append(response.event)
        if response.event.HasField("preview"):
            break
    assert "sample:0.2" not in service.script.calls[:-1]
    before, still = events[-2:]
    assert (before.progress.chunk_index, before.progress.step) == (0, 1)
    assert (still.preview.width, still.preview.num_steps, still.preview.media_type) == (256, 2, "image/jpeg")
    assert still.preview.data == b"still"
    release.set()
    events += [response.event async for response in stream]
    assert steps_shown(events) == [(chunk, step) for chunk in range(3) for step in (1, 2)]
    assert [event.seq for event in events] == list(range(len(events)))


async def test_a_request_turns_them_off_or_down_and_gets_the_same_clip(service: Service) -> None:
    default = await service.generate(seed=3)
    off = await service.generate(seed=3, preview=spec(0, 1))
    seldom = await service.generate(seed=3, preview=spec(64, 2))
    assert steps_shown(off) == []
    assert steps_shown(seldom) == [(0, 2), (1, 2), (2, 2)]
    assert {e.preview.width for e in seldom if e.HasField("preview")} == {64}
    assert result(default) == result(off) == result(seldom)
    plans = [events[0].accepted.plan.preview for events in (default, off, seldom)]
    assert plans == [spec(256, 1), spec(0, 1), spec(64, 2)]
    info = server_info_from_proto(await service.stub.GetServerInfo(video_pb2.GetServerInfoRequest()))
    assert info.default_preview == PreviewSpec(256, 1)


async def test_a_dense_clip_is_shown_as_a_whole(service: Service) -> None:
    events = await service.generate(mode=types_pb2.SAMPLING_MODE_DENSE, preview=spec(64, 2))
    assert steps_shown(events) == [(-1, 2), (-1, 4), (-1, 5)]


async def test_stills_that_cannot_be_made_are_refused_with_the_rest(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        await service.generate(num_frames=40, preview=spec(5, 0))
    error = from_rpc_error(raised.value)
    assert isinstance(error, InvalidRequestError)
    assert [v.field for v in error.violations] == ["num_frames", "preview.max_side", "preview.every_steps"]


def warnings(events: list[video_pb2.Event]) -> list[tuple[str, str]]:
    return [(e.warning.reason, e.warning.message) for e in events if e.HasField("warning")]


async def test_without_an_encoder_the_clip_is_made_and_the_caller_told_once(service: Service) -> None:
    expected = result(await service.generate(seed=3))
    service.script.no_encoder = "stills cannot be made here: no mjpeg"
    events = await service.generate(seed=3)
    assert warnings(events) == [("PREVIEW_UNAVAILABLE", "stills cannot be made here: no mjpeg")]
    assert steps_shown(events) == []
    assert result(events) == expected
    assert warnings(await service.generate(preview=spec(0, 1))) == []


async def test_without_a_map_the_clip_is_made_and_the_caller_told_once(service: Service) -> None:
    expected = result(await service.generate(seed=3))
    service.host.preview_map = None
    await service.host.kill(Worker.DIT)  # found before the next job, for which the lane is started anew
    events = await service.generate(seed=3)
    ((reason, message),) = warnings(events)
    assert reason == "PREVIEW_UNAVAILABLE"
    assert "could not make their map" in message
    assert steps_shown(events) == []
    assert result(events) == expected


async def test_where_stills_fail_midway_the_clip_is_made_and_the_caller_told_once(service: Service) -> None:
    expected = result(await service.generate(seed=3))
    service.script.no_stills_from = 1
    events = await service.generate(seed=3)
    ((reason, message),) = warnings(events)
    assert (reason, message.startswith("stills of this clip could not be made")) == ("PREVIEW_UNAVAILABLE", True)
    assert steps_shown(events) == [(0, 1), (0, 2)]
    assert result(events) == expected
