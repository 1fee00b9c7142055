"""A prompt goes in over the SDK; a clip that players accept comes out, while later chunks are still being sampled."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

from core.artifacts import DEFAULT_ARTIFACTS
from core.geometry import num_samples
from h3stream import AsyncClient, Client, Completed, Fragment, InitSegment, Progress
from h3stream.events import PhaseChange, StreamComplete
from services.common.ledger import overlaps, read_ledger
from tests.e2e.conftest import Clip, Server
from tests.job_logs import JOB_FILES
from tests.tools.check_fmp4 import violations


def make(server: Server, prompt: str = "a fox in the snow", **options: object) -> Clip:
    clip = Clip()
    with Client(server.address) as client:
        for event in client.generate(prompt, **options):  # type: ignore[arg-type]
            clip.job_id = event.job_id
            clip.media += event.media
            if isinstance(event, Fragment):
                clip.fragments.append(event.data)
            if isinstance(event, Completed):
                clip.latents_sha256 = event.latents_sha256
    return clip


@pytest.mark.parametrize(
    ("num_frames", "width", "height"),
    [(22, 64, 64), (39, 256, 160), (73, 96, 64), (22, 512, 288)],
)
def test_a_clip_has_exactly_the_frames_and_samples_asked_for(
    server: Server, num_frames: int, width: int, height: int
) -> None:
    clip = make(server, num_frames=num_frames, width=width, height=height, steps=2)
    assert violations(clip.media, frames=num_frames, samples=num_samples(num_frames)) == []


async def test_fragments_leave_while_later_chunks_are_still_to_be_sampled(server: Server) -> None:
    """Two reads of the same fact: the order of events, and what the server counted."""
    last_chunk_started = False
    frames_before = 0
    async with AsyncClient(server.address) as client:
        async for event in client.generate("a fox in the snow", num_frames=73, width=64, height=64):
            if isinstance(event, PhaseChange) and (event.phase, event.chunk_index) == ("denoise", 4):
                last_chunk_started = True
            if isinstance(event, Fragment) and not last_chunk_started:
                frames_before += event.num_frames
    assert isinstance(event, Completed)
    assert frames_before == event.timings.num_frames_before_sampling_end == 51
    assert 0 < event.timings.first_fragment_s < event.timings.sampling_s < event.timings.total_s


@pytest.mark.parametrize(("num_frames", "bound"), [(22, 0), (39, 17), (192, 170), (362, 340)])
def test_pictures_leave_as_early_as_geometry_allows_and_nothing_waits_for_the_end(
    server: Server, num_frames: int, bound: int
) -> None:
    """17 of a chunk need two latents of the next; whatever the last chunk completes leaves with its decode."""
    with Client(server.address) as client:
        events = list(client.generate("a fox in the snow", num_frames=num_frames, width=32, height=32, steps=1))
    last = (num_frames - 5) // 17
    sampled = next(
        i
        for i, event in enumerate(events)
        if isinstance(event, PhaseChange) and (event.phase, event.chunk_index) == ("denoise", last)
    )
    assert sum(event.num_frames for event in events[:sampled] if isinstance(event, Fragment)) == bound
    after = [
        (event.phase, event.chunk_index) if isinstance(event, PhaseChange) else type(event).__name__
        for event in events[sampled:]
        if isinstance(event, PhaseChange | Fragment | StreamComplete | Completed)
    ]
    decodes = [("decode", 0)] if num_frames == 22 else []  # chunk 0 completes nothing, so it is decoded with chunk 1
    assert after == [
        ("denoise", last),
        *decodes,
        ("decode", last),
        "Fragment",
        "Fragment",
        "StreamComplete",
        ("finish", -1),
        "Completed",
    ]
    assert isinstance(events[-1], Completed)
    assert events[-1].timings.num_frames_before_sampling_end == bound
    media = b"".join(event.media for event in events)
    assert violations(media, frames=num_frames, samples=num_samples(num_frames)) == []


def test_fragments_join_without_gap_and_each_chunk_starts_with_a_keyframe(server: Server) -> None:
    with Client(server.address) as client:
        events = list(client.generate("a fox in the snow", num_frames=73, width=64, height=64, steps=1))
    fragments = [e for e in events if isinstance(e, Fragment)]
    assert [f.fragment_index for f in fragments] == list(range(len(fragments)))
    for before, after in itertools.pairwise(fragments):
        assert before.first_frame + before.num_frames == after.first_frame
        assert before.start_ticks + before.duration_ticks == after.start_ticks
    assert all(f.is_keyframe for f in fragments if f.first_frame % 17 == 0 and f.num_frames)
    assert sum(f.num_frames for f in fragments) == 73
    (init,) = [e for e in events if isinstance(e, InitSegment)]
    assert init.mime_type.startswith('video/mp4; codecs="avc1.')
    assert events.index(init) < events.index(fragments[0])
    assert [e.seq for e in events] == list(range(len(events)))


def test_steps_are_announced_one_by_one(server: Server) -> None:
    with Client(server.address) as client:
        events = list(client.generate("a fox in the snow", num_frames=22, width=64, height=64, steps=3))
    steps = [(e.chunk_index, e.step) for e in events if isinstance(e, Progress) and not e.is_heartbeat]
    assert [s for s in steps if s[1]] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


def test_the_same_request_gives_the_same_bytes_wherever_the_cache_lives(server: Server) -> None:
    clips = [
        make(server, num_frames=73, width=64, height=64, seed=5, kv_storage=storage)
        for storage in ("gpu", "gpu", "cpu", "cpu_pinned")
    ]
    assert len({clip.latents_sha256 for clip in clips}) == 1
    assert all(clip.fragments == clips[0].fragments for clip in clips)
    other = make(server, num_frames=73, width=64, height=64, seed=6)
    assert other.latents_sha256 != clips[0].latents_sha256


def test_the_prompt_the_window_and_the_steps_matter(server: Server) -> None:
    size = {"num_frames": 73, "width": 64, "height": 64}
    digests = {
        make(server, **size).latents_sha256,
        make(server, "a bear on a bicycle", **size).latents_sha256,
        make(server, window=0, **size).latents_sha256,
        make(server, steps=2, **size).latents_sha256,
        make(server, audio_shift=5.0, **size).latents_sha256,
    }
    assert len(digests) == 5


def test_no_two_workers_were_ever_on_the_device_together(server: Server) -> None:
    make(server, "a prompt of its own for the ledger", num_frames=39, width=64, height=64)
    entries = read_ledger(server.ledger)
    assert {e.worker for e in entries} == {"text_encoder", "dit", "vae"}
    assert overlaps(entries) == []
    assert all(e.device_weight_bytes > 0 for e in entries if e.event == "enter")
    assert {e.event for e in entries[::2]} == {"enter"}
    assert {e.event for e in entries[1::2]} <= {"leave", "lost"}  # other tests kill workers of this server


def test_a_prompt_seen_before_skips_the_text_phase(server: Server) -> None:
    prompt = "a prompt that is said twice"
    make(server, prompt, num_frames=22, width=64, height=64, steps=1)
    before = len(read_ledger(server.ledger))
    make(server, prompt, num_frames=22, width=64, height=64, steps=1, seed=9)
    later = read_ledger(server.ledger)[before:]
    assert [e.worker for e in later if e.event == "enter"] == ["dit", "vae"]


def test_the_final_file_is_whole_and_is_what_its_digest_says(server: Server, tmp_path: Path) -> None:
    with Client(server.address) as client:
        done = client.save("a fox in the snow", tmp_path / "clip.mp4", num_frames=39, width=64, height=64)
    artifact = next(a for a in done.artifacts if a.name == "final.mp4")
    data = (server.data / artifact.relative_path).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (artifact.size_bytes, artifact.sha256)
    assert data.index(b"moov") < data.index(b"mdat"), "a player would have to read it to its end first"
    left = sorted(p.name for p in (server.data / "jobs" / done.job_id).iterdir())
    assert left == sorted([*JOB_FILES, *DEFAULT_ARTIFACTS])
