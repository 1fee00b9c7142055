"""Artifacts of a job: which there are, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.artifacts import ARTIFACTS, DEFAULT_ARTIFACTS, FRAMES
from h3stream.aio import AsyncClient
from h3stream.client import Client
from h3stream.errors import ArtifactNotFoundError, BrokenStreamError, JobNotFoundError
from h3stream.events import Artifact
from h3stream.v1 import video_pb2
from tests.service.conftest import Service
from tests.service.test_cancel_and_queue import start, until


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
    told = next(event for event in events if event.warning.reason == "STREAM_FAILED")
    chunks = [event.progress.chunk_index for event in events if event.HasField("progress") and event.seq < told.seq]
    assert max(chunks) == 2, "as soon as it is known"


async def test_a_stream_that_there_will_not_be_is_told_before_anything_is_sampled(service: Service) -> None:
    service.script.stream_end, service.script.stream_failure = 0, "no encoder can be opened"
    events = await service.generate()
    told = next(event for event in events if event.warning.reason == "STREAM_FAILED")
    assert told.warning.message.endswith("no encoder can be opened")
    assert not any(event.progress.step for event in events if event.seq < told.seq)
    assert [event.warning.reason for event in events if event.HasField("warning")] == ["STREAM_FAILED"]
    assert events[-1].HasField("completed")


async def finished(service: Service) -> str:
    """A job that has ended and left its artifacts."""
    return (await service.generate())[0].job_id


def content(name: str) -> bytes:
    return name.encode() * 40_000


async def pieces(service: Service, job_id: str, name: str, offset: int) -> list[video_pb2.DownloadArtifactResponse]:
    request = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name, offset_bytes=offset)
    return [response async for response in service.stub.DownloadArtifact(request)]


async def test_a_download_says_what_it_is_and_starts_anywhere(service: Service) -> None:
    job_id = await finished(service)
    data = content("final.mp4")
    for offset in (0, 1, len(data) - 1, len(data)):
        first, *rest = await pieces(service, job_id, "final.mp4", offset)
        assert (first.artifact.name, first.artifact.size_bytes) == ("final.mp4", len(data))
        assert first.artifact.sha256 == hashlib.sha256(data).hexdigest()
        assert b"".join(response.data for response in rest) == data[offset:]
        assert all(response.ByteSize() < 1 << 20 for response in rest)
    assert len((await pieces(service, job_id, "final.mp4", 0))[1:]) > 1, "in several messages"
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=job_id))).job
    assert {artifact.name for artifact in job.artifacts} == set(DEFAULT_ARTIFACTS)


@pytest.mark.parametrize(
    ("name", "offset", "code", "words"),
    [
        ("frames.mkv", 0, grpc.StatusCode.NOT_FOUND, "has no artifact 'frames.mkv'; it has stream.mp4, final.mp4, "),
        ("../lock", 0, grpc.StatusCode.NOT_FOUND, "has no artifact '../lock'"),
        ("final.mp4", 360_001, grpc.StatusCode.INVALID_ARGUMENT, "offset_bytes is 360001; final.mp4 has 360000 bytes"),
        ("final.mp4", -1, grpc.StatusCode.INVALID_ARGUMENT, "offset_bytes is -1; "),
    ],
)
async def test_a_wrong_download_is_refused(
    service: Service, name: str, offset: int, code: grpc.StatusCode, words: str
) -> None:
    job_id = await finished(service)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pieces(service, job_id, name, offset)
    assert caught.value.code() == code
    assert words in (caught.value.details() or "")


async def test_a_file_that_is_no_longer_what_it_was_is_not_sent(service: Service, tmp_path: Path) -> None:
    job_id = await finished(service)
    (service.data / "jobs" / job_id / "final.mp4").write_bytes(b"other")
    (service.data / "jobs" / job_id / "audio.flac").unlink()
    async with AsyncClient(service.address) as client:
        for name in ("final.mp4", "audio.flac"):
            with pytest.raises(ArtifactNotFoundError, match=f"{name} of job {job_id} is no longer what the job left"):
                await client.download(job_id, name, tmp_path / "mine")
        with pytest.raises(JobNotFoundError, match="there is no job 'none'"):
            await client.download("none", "final.mp4", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    assert not (tmp_path / "mine.part").exists()


async def test_artifacts_come_once_the_job_has_ended(service: Service) -> None:
    service.script.gates["finish"] = asyncio.Event()
    _, job_id = await start(service)
    await until(service, "finish")
    with pytest.raises(grpc.aio.AioRpcError, match="has not ended"):
        await pieces(service, job_id, "final.mp4", 0)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "left",
    [b"", content("final.mp4")[:100_000], content("final.mp4"), b"wrong", bytes(500_000)],
    ids=["nothing", "a part", "all", "a part of something else", "more than there is"],
)
async def test_the_sdk_goes_on_where_it_was_and_verifies(
    service: Service, tmp_path: Path, left: bytes, is_async: bool
) -> None:
    job_id = await finished(service)
    path = tmp_path / "mine.mp4"
    path.write_bytes(b"older")
    (tmp_path / "mine.mp4.part").write_bytes(left)

    def block() -> Artifact:
        with Client(service.address) as client:
            return client.download(job_id, "final.mp4", path)

    if is_async:
        async with AsyncClient(service.address) as client:
            artifact = await client.download(job_id, "final.mp4", path)
    else:
        artifact = await asyncio.to_thread(block)
    assert (artifact.name, artifact.size_bytes) == ("final.mp4", 360_000)
    assert path.read_bytes() == content("final.mp4")
    assert [entry.name for entry in tmp_path.glob("mine*")] == ["mine.mp4"]


async def test_what_is_damaged_on_the_server_is_not_kept(service: Service, tmp_path: Path) -> None:
    job_id = await finished(service)
    data = content("final.mp4")
    (service.data / "jobs" / job_id / "final.mp4").write_bytes(b"x" + data[1:])
    async with AsyncClient(service.address) as client:
        with pytest.raises(BrokenStreamError, match="its checksum is another"):
            await client.download(job_id, "final.mp4", tmp_path / "mine.mp4")
    assert list(tmp_path.glob("mine*")) == []


async def test_the_command_lists_and_downloads(service: Service, tmp_path: Path) -> None:
    job_id = await finished(service)

    async def run(*arguments: str) -> tuple[int | None, str, str]:
        command = (sys.executable, "-m", "h3stream.cli", "download", *arguments, "--server", service.address)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    status, out, _ = await run(job_id)
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[:3]] == [
        ["name", "bytes"],
        ["stream.mp4", "400000"],
        ["final.mp4", "360000"],
    ]
    path = str(tmp_path / "mine.mp4")
    assert await run(job_id, "final.mp4", "-o", path) == (0, f"{path}\n", "")
    assert Path(path).read_bytes() == content("final.mp4")
    status, _, err = await run(job_id, "final.mp3", "-o", path)
    assert (status, err.split(":")[1]) == (1, " ARTIFACT_NOT_FOUND")
    status, _, err = await run(job_id, "final.mp4", "-o", str(tmp_path / "none" / "mine.mp4"))
    assert (status, "cannot write" in err) == (2, True)


@pytest.mark.parametrize("kept_bytes", [1])
async def test_an_artifact_removed_to_make_room_says_so(service: Service, kept_bytes: int) -> None:
    job_id = await finished(service)
    assert len(await pieces(service, job_id, "final.mp4", 0)) > 1, "the newest job keeps its own"
    await finished(service)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pieces(service, job_id, "final.mp4", 0)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "has been removed: artifacts took more than 1 bytes (kept_bytes)" in (caught.value.details() or "")
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=job_id))).job
    assert list(job.artifacts) == []
    assert {gone.name for gone in job.removed_artifacts} == set(DEFAULT_ARTIFACTS)
    assert (service.data / "removed.jsonl").read_text().count("\n") == 1
