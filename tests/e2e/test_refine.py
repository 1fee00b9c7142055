"""The sound of a clip refined by a whole service: behind the clip, of its job, and of its uploaded latents."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from core.artifacts import DEFAULT_ARTIFACTS, REFINED, REFINED_LATENTS, REFINED_SOUND
from core.geometry import num_samples
from core.latents_file import FORMAT, latent_shapes
from h3stream import (
    AsyncClient,
    Client,
    ClipSpec,
    Completed,
    Event,
    FrozenCacheSpec,
    GenerateRequest,
    InvalidRequestError,
    JobCancelledError,
    RefinedAudio,
    RefineProgress,
    RefineSpec,
    RefineStarted,
)
from services.common.ledger import overlaps, read_ledger
from tests.e2e.conftest import Server
from tests.job_logs import JOB_FILES
from tests.tools.check_fmp4 import violations

FRAMES = 39
CLIP = GenerateRequest(
    "a fox in the snow", num_frames=FRAMES, width=96, height=64, steps=2, video_shift=5.1, audio_shift=2.2, seed=3
)
SPEC = RefineSpec(steps=3)


def only(kind: type[Event], events: list[Event]) -> Any:
    (found,) = [event for event in events if isinstance(event, kind)]
    return found


def packets(path: Path) -> list[tuple[bytes, int | None, int | None, int | None]]:
    """The video packets of a file with their times."""
    with av.open(path) as file:
        return [(bytes(p), p.pts, p.dts, p.duration) for p in file.demux(video=0) if p.size]


def decoded_samples(data: bytes | Path) -> int:
    with av.open(BytesIO(data) if isinstance(data, bytes) else data) as file:
        return sum(frame.samples for frame in file.decode(audio=0))


@pytest.mark.parametrize("mode", ["streaming", "dense"])
def test_a_sound_is_refined_behind_its_clip_of_its_job_and_of_its_file(
    server: Server, tmp_path: Path, mode: Any
) -> None:
    with Client(server.address) as client:
        plain = list(client.generate(CLIP, mode=mode))
        both = list(client.generate(CLIP, mode=mode, refine_audio=SPEC))
        job_id = both[0].job_id
        for name in (*DEFAULT_ARTIFACTS, REFINED, REFINED_SOUND, REFINED_LATENTS):
            client.download(job_id, name, tmp_path / name)
        of_job = list(client.refine(plain[0].job_id, SPEC))
        uploaded = list(client.refine(tmp_path / "latents.safetensors", SPEC, prompt=CLIP.prompt))
        source_id = client.job(of_job[0].job_id).source_job_id
        refined_files = {artifact.name for artifact in client.job(of_job[0].job_id).artifacts}

    # The clip is what it is without.
    assert b"".join(event.media for event in both) == b"".join(event.media for event in plain)
    assert only(Completed, both).latents_sha256 == only(Completed, plain).latents_sha256

    # The same sound, whichever way it came.
    refined = only(RefinedAudio, both)
    assert [only(RefinedAudio, events).latents_sha256 for events in (of_job, uploaded)] == [refined.latents_sha256] * 2
    assert source_id == plain[0].job_id
    assert {REFINED, REFINED_SOUND, REFINED_LATENTS} <= refined_files
    assert 0 < refined.change.latents < 10
    assert refined.change.log_mel_db > 0
    modes = [event.mode for event in both if isinstance(event, RefineProgress)]
    assert modes == ["build", "cached", "cached"]
    assert only(RefineStarted, both).num_live_rows < only(RefineStarted, both).num_rows

    # A rendition of the sound alone; with pictures where there were none to take over.
    sound, pictures = (b"".join(event.refined_media for event in events) for events in (both, uploaded))
    assert sound == b"".join(event.refined_media for event in of_job)
    assert violations(sound, frames=0, samples=num_samples(FRAMES)) == []
    assert violations(pictures, frames=FRAMES, samples=num_samples(FRAMES)) == []

    # The refined file has the clip's pictures, packet by packet, and a sound as long as before.
    assert packets(tmp_path / REFINED) == packets(tmp_path / "final.mp4")
    assert decoded_samples(tmp_path / REFINED) == decoded_samples(tmp_path / "final.mp4")
    with (
        safe_open(tmp_path / "latents.safetensors", "np") as before,
        safe_open(tmp_path / REFINED_LATENTS, "np") as after,
    ):
        np.testing.assert_array_equal(after.get_tensor("video"), before.get_tensor("video"))
        assert not np.array_equal(after.get_tensor("audio"), before.get_tensor("audio"))
    assert overlaps(read_ledger(server.ledger)) == []


def test_a_video_that_may_move_comes_with_new_pictures(server: Server, tmp_path: Path) -> None:
    with Client(server.address) as client:
        events = list(client.generate(CLIP, refine_audio=RefineSpec(steps=2, video_denoise=0.3)))
        for name in ("latents.safetensors", "final.mp4", REFINED, REFINED_LATENTS):
            client.download(events[0].job_id, name, tmp_path / name)
    rendition = b"".join(event.refined_media for event in events)
    assert violations(rendition, frames=FRAMES, samples=num_samples(FRAMES)) == []
    assert packets(tmp_path / REFINED) != packets(tmp_path / "final.mp4")
    assert not only(RefineStarted, events).has_cache
    assert only(RefinedAudio, events).change.log_mel_db > 0
    with (
        safe_open(tmp_path / "latents.safetensors", "np") as before,
        safe_open(tmp_path / REFINED_LATENTS, "np") as after,
    ):
        for name in ("video", "audio"):
            assert before.get_tensor(name).shape == after.get_tensor(name).shape
            assert not np.array_equal(after.get_tensor(name), before.get_tensor(name))


def test_guidance_and_a_comparison(server: Server) -> None:
    spec = RefineSpec(
        steps=2, cfg=2.0, negative_prompt="hiss", compare=True, cache=FrozenCacheSpec(contents="kv", precision="bf16")
    )
    with Client(server.address) as client:
        source = list(client.generate(CLIP))
        events = list(client.refine(source[0].job_id, spec))
        names = {artifact.name for artifact in only(Completed, events).artifacts}
    refined = only(RefinedAudio, events)
    assert "refine-compare.png" in names
    assert refined.against_exact is not None
    assert 0 < refined.against_exact.latents < refined.change.latents
    assert refined.speed_ratio > 0


def test_uploaded_latents_that_are_not_finite_are_refused_by_the_worker(server: Server, tmp_path: Path) -> None:
    shapes = latent_shapes(ClipSpec(22, 64, 64, 1, 12.0, 3.0, 0, None, "gpu", 0, "dense"))
    latents = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    latents["audio"][0, 5, 1, 7] = np.nan
    about = {"format": FORMAT, "num_frames": "22", "width": "64", "height": "64"}
    save_file(latents, tmp_path / "latents.safetensors", about)
    with Client(server.address) as client, pytest.raises(InvalidRequestError, match="audio"):
        list(client.refine(tmp_path / "latents.safetensors", SPEC, prompt=CLIP.prompt))


async def test_a_refinement_that_is_cancelled_leaves_a_clip_that_can_be_refined(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.generate(CLIP, refine_audio=RefineSpec(steps=100, cache=FrozenCacheSpec(enabled=False)))

        async def until_refining() -> None:
            async for event in stream:
                if isinstance(event, RefineStarted):
                    return

        async def to_the_end() -> None:
            async for _ in stream:
                pass

        await until_refining()
        cancelling = asyncio.create_task(client.cancel(stream.job_id))
        with pytest.raises(JobCancelledError):
            await to_the_end()
        job = await cancelling
        assert {artifact.name for artifact in job.artifacts} == set(DEFAULT_ARTIFACTS)
        left = {path.name for path in (server.data / "jobs" / stream.job_id).iterdir()}
        assert left == {*JOB_FILES, *DEFAULT_ARTIFACTS}
        again = [event async for event in client.refine(stream.job_id, SPEC)]
        fresh = [event async for event in client.generate(CLIP, refine_audio=SPEC)]
    assert only(RefinedAudio, again).latents_sha256 == only(RefinedAudio, fresh).latents_sha256
    assert overlaps(read_ledger(server.ledger)) == []
