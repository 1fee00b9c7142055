"""Latents that a caller uploads: streamed to disk, and whatever is wrong with them costs neither lane nor disk."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.artifacts import REFINED, REFINED_LATENTS, REFINED_SOUND
from h3stream.v1 import video_pb2
from orchestrator import source, upload
from orchestrator.lane import Lane
from orchestrator.latents import MAX_FILE_BYTES
from orchestrator.scheduler import INCOMING, Scheduler
from services.common import rpc
from tests.service.callers import callers, sent, status_of
from tests.service.conftest import CLIP, Service
from tests.service.fake_workers import FakeLaneHost, Script, latents_file
from tests.service.test_cancel_and_queue import start, until
from tests.service.test_generate import kinds
from tests.service.test_refine import SPEC, check_clip, provenance
from tests.service.test_refine_jobs import refine, refused

FILE = latents_file(CLIP, seed=4)


def header(data: bytes = FILE, **fields: Any) -> video_pb2.RefineAudioRequest:
    told = {"prompt": "a fox", "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **fields}
    return video_pb2.RefineAudioRequest(header=video_pb2.RefineHeader(upload=told, spec=SPEC))


def data_messages(data: bytes, piece: int = 10_000) -> list[video_pb2.RefineAudioRequest]:
    return [video_pb2.RefineAudioRequest(data=data[i : i + piece]) for i in range(0, len(data), piece)]


async def send(service: Service, messages: Iterable[video_pb2.RefineAudioRequest]) -> list[video_pb2.Event]:
    return [response.event async for response in service.stub.RefineAudio(iter(messages))]


def changed(tensors: dict[str, Any] | None = None, **about: str | None) -> bytes:
    """The file with another header in front of the same bytes."""
    length = int.from_bytes(FILE[:8], "little")
    content = json.loads(FILE[8 : 8 + length])
    metadata = {**content["__metadata__"], **about}
    content["__metadata__"] = {name: value for name, value in metadata.items() if value is not None}
    for name, entry in (tensors or {}).items():
        content[name] = entry if entry is None else {**content.get(name, content["video"]), **entry}
    text = json.dumps({name: entry for name, entry in content.items() if entry is not None}).encode()
    return len(text).to_bytes(8, "little") + text + FILE[8 + length :]


async def test_uploaded_latents_are_refined_as_a_jobs_are(service: Service) -> None:
    events = await send(service, [header(), *data_messages(FILE)])
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-2:] == ["refined_audio", "completed"]
    plan = events[0].accepted.plan
    assert (plan.clip.num_frames, plan.clip.width, plan.clip.height, plan.clip.seed) == (39, 64, 64, 4)
    assert plan.refine_audio.seed == 4
    assert [e.refined_fragment.num_frames for e in events if e.HasField("refined_fragment")] == [17, 22]
    job_id = events[0].job_id
    await check_clip(service, job_id, {REFINED, REFINED_SOUND, REFINED_LATENTS, "timeline.json", "provenance.json"})
    job = (await service.stub.GetJob(video_pb2.GetJobRequest(job_id=job_id))).job
    assert job.source_job_id == ""
    told = provenance(service, job_id)
    assert told["source"] == {"job_id": "", "latents_sha256": hashlib.sha256(FILE).hexdigest(), "has_video": False}
    assert told["request"]["upload"]["prompt"] == "a fox"
    assert not (service.data / INCOMING).exists() or not list((service.data / INCOMING).iterdir())


async def test_the_latents_of_a_job_give_the_same_uploaded_and_from_the_job(service: Service) -> None:
    source_id = (await service.generate(video_shift=5.1, audio_shift=1 / 3))[0].job_id
    data = (service.data / "jobs" / source_id / "latents.safetensors").read_bytes()
    both = [await refine(service, source_id), await send(service, [header(data), *data_messages(data)])]
    digests = {e.refined_audio.latents_sha256 for events in both for e in events if e.HasField("refined_audio")}
    assert len(digests) == 1
    assert service.script.refine_inputs[0] == service.script.refine_inputs[1]
    shifts = [(header.clip.video_shift, header.clip.audio_shift) for header in service.script.refine_headers]
    assert shifts == [(5.1, 1 / 3)] * 2


async def test_jobs_may_lie_on_another_file_system(service: Service) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == service.data.stat().st_dev:
        pytest.skip("there is no other file system")
    with tempfile.TemporaryDirectory(dir=other) as elsewhere:
        shutil.rmtree(service.data / "jobs")
        (service.data / "jobs").symlink_to(elsewhere)
        events = await send(service, [header(), *data_messages(FILE)])
    assert kinds(events)[-1] == "completed"


async def test_what_need_not_be_told_may_be_left_out(service: Service) -> None:
    data = changed(seed=None, video_shift=None, audio_shift=None, refined="true")
    events = await send(service, [header(data, sha256=""), *data_messages(data)])
    clip = events[0].accepted.plan.clip
    assert (clip.seed, clip.video_shift, clip.audio_shift) == (0, 12, 3), "the server's defaults"
    assert kinds(events)[-1] == "completed"


WRONG_HEADERS = [
    ({"size_bytes": 0}, "upload.size_bytes is 0; it must be from 1 to"),
    ({"size_bytes": -5}, "upload.size_bytes is -5"),
    ({"size_bytes": MAX_FILE_BYTES + 1}, "which the longest clip on the largest canvas needs"),
    ({"size_bytes": 2**62}, f"upload.size_bytes is {2**62}"),
    ({"sha256": "ab"}, "upload.sha256 is 'ab'; it must be 64 hexadecimal digits"),
    ({"sha256": "AB" * 32}, "in lower case"),
    ({"prompt": ""}, "upload.prompt: the prompt is empty"),
    ({"prompt": "a <|image_pad|>"}, "upload.prompt"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG_HEADERS)
async def test_a_wrong_announcement_is_refused_before_a_byte_is_kept(
    service: Service, fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "receive", None)
    error = await refused(service, header(**fields), *data_messages(FILE))
    assert (error.code(), words in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()
    assert service.jobs() == []


WRONG_FILES = {
    "cut off": (FILE[:-1], "lies at bytes"),
    "longer than its header says": (FILE + b"x", "1 bytes behind the last tensor belong to no tensor"),
    "a header alone": (FILE[:8], "is cut off or not a safetensors file"),
    "three bytes": (b"abc", "is not a safetensors file: it is 3 bytes long"),
    "a zip archive": (b"PK\x03\x04" + bytes(5000), "a zip archive"),
    "another format": (changed(format="other"), "says 'other' as its format"),
    "no format": (changed(format=None), "says None as its format"),
    "no frames": (changed(num_frames=None), "says '' as its num_frames; it must be a number"),
    "no number": (changed(width="6x4"), "says '6x4' as its width"),
    "another number's digits": (changed(width="٦٤"), "as its width; it must be a number"),
    "no valid clip": (changed(num_frames="40"), "is of no valid clip"),
    "too large a seed": (changed(seed=str(2**64)), "as its seed; it must be at most"),
    "no decimal shift": (changed(video_shift="nan"), "says 'nan' as its video_shift; it must be a decimal number from"),
    "no shift": (changed(audio_shift=""), "says '' as its audio_shift; it must be a decimal number from 0.01 to 100"),
    "too large a shift": (changed(video_shift="100.5"), "video_shift is 100.5; it must be from 0.01 to 100"),
    "an endless shift": (changed(audio_shift="9" * 400), "audio_shift is infinite (inf); it must be from 0.01"),
    "other frames": (changed(num_frames="56"), "for 56 frames of 64x64 it must hold 'video' F32 [1, 24, 17, 4, 4]"),
    "another size": (changed(width="96"), "for 39 frames of 96x64"),
    "the axes exchanged": (changed({"video": {"shape": [1, 12, 24, 4, 4]}}), "'video' F32 [1, 12, 24, 4, 4]"),
    "another type": (changed({"video": {"dtype": "I32"}}), "'video' I32"),
    "another name": (changed({"vidio": {}, "video": None}), "'vidio' F32"),
    "a huge header": ((1 << 16 | 8).to_bytes(8, "little") + bytes(1 << 17), "has a header of 65544 bytes; at most"),
    "not JSON": ((100).to_bytes(8, "little") + b"{" * 200, "the header is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_FILES)
async def test_a_file_that_is_none_is_refused_once_it_is_there(service: Service, case: str) -> None:
    data, words = WRONG_FILES[case]
    error = await refused(service, header(data), *data_messages(data))
    assert (error.code(), words in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()
    assert str(service.data) not in error.details(), "paths of the server are no caller's business"
    assert service.jobs() == []


async def test_what_comes_must_be_what_was_announced_and_in_order(service: Service) -> None:
    other = "00" * 32
    cases = [
        ([header(), *data_messages(FILE[:-1])], f"the upload ended after {len(FILE) - 1} of {len(FILE)} bytes"),
        ([header()], f"the upload ended after 0 of {len(FILE)} bytes"),
        ([header(), *data_messages(FILE + b"x")], f"has more than the {len(FILE)} bytes that were announced"),
        ([header(sha256=other), *data_messages(FILE)], f"not {other}"),
        ([*data_messages(FILE), header()], "the first message must hold a header; it holds data"),
        ([header(), header(), *data_messages(FILE)], "a message after the header holds header; it must hold data"),
        ([header(), *data_messages(FILE), header()], "a message after the header holds header; it must hold data"),
        ([header(), video_pb2.RefineAudioRequest()], "a message after the header holds nothing; it must hold data"),
    ]
    for messages, words in cases:
        error = await refused(service, *messages)
        assert (error.code(), words in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()
    assert service.jobs() == []
    assert kinds(await send(service, [header(), *data_messages(FILE)]))[-1] == "completed"


def spec_of(message: video_pb2.RefineAudioRequest, **spec: Any) -> video_pb2.RefineAudioRequest:
    del message.header.spec.adapters[:]
    message.header.spec.MergeFrom(type(message.header.spec)(**spec))
    return message


async def test_the_refinement_is_checked_as_early_as_can_be(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    clips_own = spec_of(header(), audio_range={"start_s": 1, "end_s": 2})
    error = await refused(service, clips_own, *data_messages(FILE))
    assert "spec.audio_range.end_s is 2" in error.details()
    monkeypatch.setattr(source, "receive", None)
    for spec, words in (
        ({"audio_range": {"start_s": 1, "end_s": 16}}, "spec.audio_range.end_s is 16"),
        ({"adapters": [{"name": "styl"}]}, "spec.adapters[0].name is 'styl'"),
        ({"sampler": "heuns"}, "the nearest is heun"),
    ):
        error = await refused(service, spec_of(header(), **spec), *data_messages(FILE))
        assert (error.code(), words in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.details()


async def endless(first: list[video_pb2.RefineAudioRequest]) -> AsyncIterator[video_pb2.RefineAudioRequest]:
    """Messages of a caller that never ends."""
    for message in first:
        yield message
    await asyncio.Event().wait()


@pytest.mark.parametrize("num_pieces", [None, 0, 1])
async def test_an_uploader_that_falls_silent_is_sent_away(
    service: Service, monkeypatch: pytest.MonkeyPatch, num_pieces: int | None
) -> None:
    monkeypatch.setattr(upload, "IDLE_S", 0.2)
    first = [] if num_pieces is None else [header(), *data_messages(FILE)[:num_pieces]]
    call = service.stub.RefineAudio(endless(first))
    async with asyncio.timeout(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "nothing came for" in caught.value.details()
    assert not list((service.data / INCOMING).glob("*"))


async def test_an_upload_that_never_ends_is_sent_away(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "UPLOAD_S", 0.3)

    async def dripping() -> AsyncIterator[video_pb2.RefineAudioRequest]:
        yield header()
        for message in data_messages(FILE, 10):
            yield message
            await asyncio.sleep(0.02)

    monkeypatch.setattr(rpc, "LAST_WRITES_S", 0.2)
    async with asyncio.timeout(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in service.stub.RefineAudio(dripping())]
    # A caller that is cut off while it writes may get gRPC's own word in place of ours.
    assert caught.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)
    assert not list((service.data / INCOMING).glob("*"))


async def test_an_uploader_that_goes_leaves_nothing_and_held_nothing(service: Service) -> None:
    async with asyncio.timeout(20):
        call = service.stub.RefineAudio(endless([header(), *data_messages(FILE)[:1]]))
        reading = asyncio.create_task(anext(aiter(call)))
        while not [path for path in (service.data / INCOMING).glob("*/*") if path.stat().st_size]:
            await asyncio.sleep(0.01)
        assert kinds(await service.generate())[-1] == "completed", "a lane is free meanwhile"
        call.cancel()
        while list((service.data / INCOMING).glob("*")):
            await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(service.jobs()) == 1


async def test_more_uploads_than_there_are_places_are_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_UPLOADS", 1)
    async with asyncio.timeout(20):
        call = service.stub.RefineAudio(endless([header()]))
        reading = asyncio.create_task(anext(aiter(call)))
        while not list((service.data / INCOMING).glob("*/*")):
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(service, [header(), *data_messages(FILE)])
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        while list((service.data / INCOMING).glob("*")):
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert kinds(await send(service, [header(), *data_messages(FILE)]))[-1] == "completed"


async def test_one_of_several_tenants_has_at_most_half_of_the_uploads(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_UPLOADS", 2)
    async with callers(service, ("studio", "generate"), ("other", "generate")) as [studio, other]:
        for num_tenants, num_places in ((2, 1), (1, 2)):
            monkeypatch.setattr(service.scheduler.tenants, "num_tenants", lambda number=num_tenants: number)
            async with asyncio.timeout(20):
                calls = []
                for number in range(num_places):
                    calls.append(studio.refinement(endless([header()])))
                    while len(list((service.data / INCOMING).glob("*/*"))) == number:
                        await asyncio.sleep(0.01)
                status, message = await status_of(studio.refinement(sent([header(), *data_messages(FILE)])).read())
                assert status == "RESOURCE_EXHAUSTED"
                if num_tenants == 2:
                    assert "tenant studio has 1 uploads under way of at most 1, half of the server's 2" in message
                    assert (await other.refinement(sent([header(), *data_messages(FILE)])).read()).job_id
                for call in calls:
                    call.cancel()
                while list((service.data / INCOMING).glob("*")):
                    await asyncio.sleep(0.01)
        assert (await studio.refinement(sent([header(), *data_messages(FILE)])).read()).job_id


@pytest.mark.parametrize("max_queued_jobs", [1])
async def test_a_full_queue_is_told_before_anything_is_sent(
    service: Service, max_queued_jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.script.gates["sample:0.1"] = asyncio.Event()
    running, _ = await start(service)
    await until(service, "sample:0.1")
    waiting, _ = await start(service)
    monkeypatch.setattr(source, "receive", None)
    error = await refused(service, header(), *data_messages(FILE))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert running is not None
    assert waiting is not None


async def test_a_disk_that_is_full_is_told(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(upload, "to_its_end", full)
    error = await refused(service, header(), *data_messages(FILE))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details() == "the upload cannot be written: No space left on device"


async def test_what_an_earlier_run_was_interrupted_in_is_removed(tmp_path: Path) -> None:
    half = tmp_path / INCOMING / "ab" / ".source.safetensors"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    scheduler = Scheduler([Lane(FakeLaneHost(tmp_path, Script()))], tmp_path, max_queued_jobs=1, kept_jobs=1)
    scheduler.open()
    assert not half.parent.exists()
    await scheduler.stop(0, asyncio.Event())
