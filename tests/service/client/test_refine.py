"""Both clients where a sound is refined: as a job of its own, from a file, and behind a clip."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from h3stream import (
    AdapterChoice,
    AsyncClient,
    Client,
    DeadlineError,
    DeviceMemoryError,
    Event,
    FrozenCacheSpec,
    GenerateRequest,
    InvalidRequestError,
    JobNotFoundError,
    NotReadyError,
    RefinedFragment,
    RefinedInitSegment,
    RefineSpec,
    TimeRange,
)
from h3stream.client import Generation
from h3stream.codec import refine_spec_from_proto
from h3stream.upload import PIECE_BYTES
from tests.fakes import (
    FakeVideoService,
    Script,
    artifact_of,
    media_of,
    plan_of,
    refine_events_of,
)
from tests.service.client.conftest import Call

PLAN = plan_of(GenerateRequest("a fox"))
SPEC = RefineSpec(
    steps=4, audio_denoise=0.4, video_denoise=0.1, sampler="heun", scheduler="native", cfg=2.0, negative_prompt="hum",
    seed=5, adapters=(AdapterChoice("style", 0.5),), audio_range=TimeRange(0.5, 1.0), compare=True,
    cache=FrozenCacheSpec(contents="kv", precision="fp8", text="kept", refresh_interval=2, backend="disk",
                          allow_disk=True, vram_margin_gb=2.0, on_no_room="exact"),
)  # fmt: skip


def made(spec: RefineSpec | None = None, job_id: str = "refine-0") -> list[Event]:
    plan = plan_of(GenerateRequest("a fox", refine_audio=spec or RefineSpec()))
    names = ("refined.mp4", "refined.flac", "refine-compare.png")
    return list(refine_events_of(plan, tuple(artifact_of(job_id, name) for name in names), job_id))


@pytest.fixture
def latents(tmp_path: Path) -> Path:
    path = tmp_path / "latents.safetensors"
    path.write_bytes(os.urandom(2 * PIECE_BYTES + 17))
    return path


async def test_a_job_s_sound_is_refined_with_every_default(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    assert await call("refine", "job-0") == made()
    (header,) = service.headers
    assert (header.job_id, header.HasField("upload"), header.cancel_on_disconnect) == ("job-0", False, False)
    assert refine_spec_from_proto(header.spec, "spec") == RefineSpec()


async def test_every_option_arrives(call: Call, service: FakeVideoService) -> None:
    await call("generate", "a fox")
    options = {field.name: getattr(SPEC, field.name) for field in dataclasses.fields(SPEC)}
    assert await call("refine", "job-0", **options) == made(SPEC)
    await call("refine", "job-0", SPEC, cancel_on_disconnect=True)
    await call("refine", "job-0", SPEC, steps=9)
    received = [refine_spec_from_proto(header.spec, "spec") for header in service.headers]
    assert received == [SPEC, SPEC, dataclasses.replace(SPEC, steps=9)]
    assert [header.cancel_on_disconnect for header in service.headers] == [False, True, False]


async def test_a_generation_and_a_job_name_their_clip(address: str, service: FakeVideoService) -> None:
    async with AsyncClient(address) as client:
        events = client.generate("a fox")
        assert [event async for event in events]
        assert [event async for event in client.refine(events)] == made()
        job = await client.job("job-0")
        assert [event async for event in client.refine(job)] == made(job_id="refine-1")
        assert (await client.job("refine-1")).source_job_id == "job-0"

    def block() -> None:
        with Client(address) as client:
            events = client.generate("a fox")
            list(events)
            assert list(client.refine(events)) == made(job_id="refine-2")

    await asyncio.to_thread(block)
    assert [header.job_id for header in service.headers] == ["job-0", "job-0", "job-1"]


async def test_the_two_renditions_do_not_mix(call: Call, address: str, tmp_path: Path) -> None:
    events = await call("generate", "a fox", refine_audio=RefineSpec(steps=2))
    assert b"".join(event.media for event in events) == media_of(PLAN)
    refined = [event for event in events if event.refined_media]
    assert [type(event) for event in refined] == [RefinedInitSegment, RefinedFragment]
    assert all(event.media == b"" for event in refined)
    async with AsyncClient(address) as client:
        await client.save("a fox", tmp_path / "clip.mp4", refine_audio=RefineSpec())
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN, "job-1")


async def test_a_file_is_sent_in_pieces_with_its_checksum(call: Call, service: FakeVideoService, latents: Path) -> None:
    assert await call("refine", latents, prompt="a fox") == made()
    (header,) = service.headers
    data = latents.read_bytes()
    assert service.uploads == [data]
    upload = header.upload
    assert (upload.prompt, upload.size_bytes, upload.sha256) == ("a fox", len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (Path("missing.safetensors"), {"prompt": "a fox"}, "source missing.safetensors cannot be read: No such file"),
        (Path("."), {"prompt": "a fox"}, "source . is no regular file"),
        (Path("/dev/null"), {"prompt": "a fox"}, "source /dev/null is no regular file"),
        (Path(__file__), {}, "prompt is missing; it must be the prompt that the latents were made with"),
        ("latents.safetensors", {}, "a job's id as it stands; for a file give a pathlib.Path"),
        ("", {}, "source has no job yet"),
        (7, {}, "source is 7; it must be the id of a job"),
        ("job-0", {"prompt": "a fox"}, "prompt is 'a fox'; the prompt of a job's clip is known; leave it out"),
        ("job-0", {"steps": 0.5, "cache": FrozenCacheSpec(text="gone")}, "steps is 0.5; it must be an integer"),
    ],
    ids=str,
)
async def test_what_cannot_be_asked_for_is_refused_at_once(
    call: Call, service: FakeVideoService, source: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await call("refine", source, **options)
    assert words in caught.value.message
    assert caught.value.violations
    assert (service.headers, service.uploads) == ([], [])


async def test_an_empty_file_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "latents.safetensors").touch()
    with pytest.raises(InvalidRequestError, match=r"is empty; it must be a latents\.safetensors as jobs leave it"):
        await call("refine", tmp_path / "latents.safetensors", prompt="a fox")


@pytest.mark.parametrize("change", ["shorter", "other"])
async def test_a_file_that_changes_on_the_way_is_told_and_makes_no_job(
    call: Call, service: FakeVideoService, latents: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    real, offsets = hashlib.sha256, []

    def hash_and_change(*data: bytes) -> Any:
        offsets.append(len(offsets))
        if len(offsets) == 2:  # the file has been read for its checksum, and is now read to be sent
            with open(latents, "r+b") as file:
                if change == "shorter":
                    file.truncate(PIECE_BYTES + 1)
                else:
                    file.seek(PIECE_BYTES + 1)
                    file.write(b"something else")
        return real(*data)

    monkeypatch.setattr("h3stream.upload.hashlib.sha256", hash_and_change)
    words = {"shorter": f"has become shorter while it was read: {PIECE_BYTES + 1} bytes", "other": "has changed while"}
    with pytest.raises(InvalidRequestError, match=words[change]):
        await call("refine", latents, prompt="a fox")
    assert service.headers == []


async def test_an_upload_that_is_cut_says_so_and_is_not_repeated(
    call: Call, service: FakeVideoService, latents: Path
) -> None:
    service.script = Script(upload_limit=PIECE_BYTES)
    size = latents.stat().st_size
    lost = "(Socket closed|lost while a message was being sent)"  # as it was, or was not, in the middle of one
    with pytest.raises(NotReadyError, match=rf"the upload broke off after \d+ of {size} bytes.*{lost}.*again"):
        await call("refine", latents, prompt="a fox")
    assert (len(service.uploads), service.headers) == (1, [])


async def test_events_go_on_where_they_were_lost_and_the_file_is_sent_once(
    call: Call, service: FakeVideoService, latents: Path
) -> None:
    service.script = Script(lose_at=[1, 5, len(made()) - 1])
    assert await call("refine", latents, prompt="a fox") == made()
    assert (len(service.uploads), len(service.headers)) == (1, 1)
    assert [(request.job_id, request.from_seq) for request in service.attached] == [
        ("refine-0", 1), ("refine-0", 5), ("refine-0", len(made()) - 1),
    ]  # fmt: skip


async def test_nothing_is_tried_again_for_a_job_that_ends_with_its_connection(
    call: Call, service: FakeVideoService
) -> None:
    await call("generate", "a fox")
    service.script = Script(lose_at=[3])
    with pytest.raises(NotReadyError, match="Socket closed"):
        await call("refine", "job-0", cancel_on_disconnect=True)
    assert service.attached == []


async def test_errors_of_the_server_are_raised_as_they_are(
    call: Call, service: FakeVideoService, latents: Path
) -> None:
    with pytest.raises(JobNotFoundError):
        await call("refine", "job-7")
    error = DeviceMemoryError("the cache needs 9.7 GiB; allow_disk, or hidden and int4", job_id="refine-0")
    service.script = Script(fail_at=2, fail_with=error)
    with pytest.raises(DeviceMemoryError, match=r"9\.7 GiB"):
        await call("refine", latents, prompt="a fox")
    service.script = Script(refuse_with=NotReadyError("the server is stopping"))
    with pytest.raises(NotReadyError, match="the server is stopping"):
        await call("refine", latents, prompt="a fox")


async def test_leaving_early_ends_the_call_and_the_job_can_be_cancelled(
    address: str, service: FakeVideoService, latents: Path
) -> None:
    service.script = Script(stall_at=3)

    def leave() -> None:
        with Client(address) as client, client.refine(latents, prompt="a fox") as events:
            assert isinstance(events, Generation)
            assert [next(events).seq for _ in range(4)] == [0, 1, 2, 3]
            assert client.cancel(events.job_id).state == "cancelled"

    await asyncio.to_thread(leave)
    await asyncio.wait_for(service.disconnected.wait(), 5)
    assert service.cancelled == {"refine-0"}


async def test_leaving_in_the_middle_of_an_upload_ends_it(
    address: str, service: FakeVideoService, latents: Path
) -> None:
    service.script = Script(silent_upload=True)
    async with AsyncClient(address) as client:
        events = client.refine(latents, prompt="a fox")
        waiting = asyncio.ensure_future(anext(events))
        while not any(service.uploads):  # a piece has come, and the server takes no more
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        await events.aclose()
        await asyncio.wait_for(service.disconnected.wait(), 5)
    service.disconnected.clear()

    def leave() -> None:
        with Client(address) as client, pytest.raises(DeadlineError):
            next(client.refine(latents, prompt="a fox", stall_timeout_s=0.5))

    await asyncio.to_thread(leave)
    await asyncio.wait_for(service.disconnected.wait(), 5)
    assert service.headers == []
