"""Artifacts of a job: which there are, and what becomes of those that fail."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from core.artifacts import ARTIFACTS, DEFAULT_ARTIFACTS, FRAMES
from h3stream.v1 import video_pb2
from tests.service.conftest import Service


def warnings(events: list[video_pb2.Event]) -> dict[str, str]:
    return {event.warning.reason: event.warning.message for event in events if event.HasField("warning")}


def kinds(events: list[video_pb2.Event]) -> set[str | None]:
    return {event.WhichOneof("payload") for event in events}


@pytest.mark.parametrize(("named", "kept"), [((), DEFAULT_ARTIFACTS), ((FRAMES,), (FRAMES,))])
async def test_a_job_keeps_what_its_plan_says(service: Service, named: tuple[str, ...], kept: tuple[str, ...]) -> None:
    events = await service.generate(artifacts=named)
    assert tuple(events[0].accepted.plan.artifacts) == kept
    assert {artifact.name for artifact in events[-1].completed.artifacts} == set(kept)


async def test_the_server_tells_what_may_be_named(service: Service) -> None:
    told = await service.stub.GetServerInfo(video_pb2.GetServerInfoRequest())
    assert tuple(told.artifacts) == tuple(ARTIFACTS)
    assert tuple(told.default_artifacts) == DEFAULT_ARTIFACTS
    assert FRAMES not in DEFAULT_ARTIFACTS


@pytest.mark.parametrize(
    ("artifacts", "words"),
    [
        (["final.mp3"], "artifacts[0] is 'final.mp3'; the nearest is final.mp4; there are stream.mp4, final.mp4, "),
        (["audio.flac", "audio.flac"], "artifacts[1] is 'audio.flac', which is named twice"),
    ],
)
async def test_wrong_names_are_refused(service: Service, artifacts: Any, words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.generate(artifacts=artifacts)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")


async def test_an_artifact_that_fails_is_told_and_the_job_succeeds(service: Service) -> None:
    service.script.full = ("final.mp4",)
    events = await service.generate()
    assert warnings(events)["ARTIFACT_FAILED"] == "artifact final.mp4 was given up: the disk is full"
    assert {artifact.name for artifact in events[-1].completed.artifacts} == {*DEFAULT_ARTIFACTS} - {"final.mp4"}
    assert "stream_complete" in kinds(events)


async def test_a_stream_that_ends_early_is_told_and_the_job_succeeds(service: Service) -> None:
    service.script.stream_end, service.script.stream_failure = 17, "the encoder is out of order"
    events = await service.generate(num_frames=73)
    assert [event.fragment.num_frames for event in events if event.HasField("fragment")] == [17]
    assert "stream_complete" not in kinds(events), "it is not"
    assert warnings(events)["STREAM_FAILED"].endswith("the encoder is out of order")
    assert {artifact.name for artifact in events[-1].completed.artifacts} == set(DEFAULT_ARTIFACTS)
