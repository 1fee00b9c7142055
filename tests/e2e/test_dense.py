"""Dense clips through the whole service: valid, repeatable, cancellable, and without a trace in what streams after."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
from pathlib import Path

import pytest

from core.artifacts import DEFAULT_ARTIFACTS
from core.geometry import num_samples
from h3stream import (
    Accepted,
    AsyncClient,
    Client,
    Completed,
    Event,
    Fragment,
    GenerateRequest,
    InitSegment,
    JobCancelledError,
    PhaseChange,
    Progress,
    StreamComplete,
)
from services.common.ledger import overlaps, read_ledger
from tests.e2e.conftest import Server
from tests.job_logs import JOB_FILES
from tests.tools.check_fmp4 import violations

SMALL = GenerateRequest("a fox in the snow", num_frames=39, width=96, height=64, steps=2)
DENSE = GenerateRequest("a fox in the snow", num_frames=39, width=96, height=64, steps=3, mode="dense")


def events_of(server: Server, request: GenerateRequest) -> list[Event]:
    with Client(server.address) as client:
        return list(client.generate(request))


def media(events: list[Event]) -> bytes:
    return b"".join(event.media for event in events)


def digest(events: list[Event]) -> str:
    completed = events[-1]
    assert isinstance(completed, Completed)
    return completed.latents_sha256


@pytest.mark.parametrize(
    ("num_frames", "width", "height", "steps"), [(22, 64, 64, 1), (39, 256, 160, 2), (73, 64, 96, 4)]
)
def test_a_dense_clip_has_exactly_the_frames_and_samples_asked_for(
    server: Server, num_frames: int, width: int, height: int, steps: int
) -> None:
    request = GenerateRequest("a fox", num_frames=num_frames, width=width, height=height, steps=steps, mode="dense")
    assert violations(media(events_of(server, request)), frames=num_frames, samples=num_samples(num_frames)) == []


def test_its_events_are_those_of_any_clip_but_for_the_sampling(server: Server) -> None:
    events = events_of(server, DENSE)
    assert [event.seq for event in events] == list(range(len(events)))
    accepted = events[0]
    assert isinstance(accepted, Accepted)
    assert (accepted.plan.num_noise_forwards, accepted.plan.num_clean_forwards) == (3, 0)
    phases = [(e.phase, e.chunk_index) for e in events if isinstance(e, PhaseChange) and e.phase != "encode"]
    decodes = [("decode", index) for index in range(3)]
    assert phases == [("prefill", -1), ("denoise", -1), *decodes, ("finish", -1)]
    steps = [(e.step, e.num_steps, e.chunk_index) for e in events if isinstance(e, Progress) and not e.is_heartbeat]
    assert [s for s in steps if s[0]] == [(1, 3, -1), (2, 3, -1), (3, 3, -1)]

    fragments = [e for e in events if isinstance(e, Fragment)]
    (init,) = [e for e in events if isinstance(e, InitSegment)]
    assert events.index(init) < events.index(fragments[0])
    for before, after in itertools.pairwise(fragments):
        assert before.start_ticks + before.duration_ticks == after.start_ticks
        assert before.first_frame + before.num_frames == after.first_frame
    (complete,) = [e for e in events if isinstance(e, StreamComplete)]
    assert (complete.num_frames, complete.num_samples) == (39, num_samples(39))
    assert complete.num_bytes == len(media(events))
    completed = events[-1]
    assert isinstance(completed, Completed)
    assert completed.timings.num_frames_before_sampling_end == 0
    assert 0 < completed.timings.sampling_s < completed.timings.first_fragment_s < completed.timings.total_s


def test_its_final_file_is_whole_and_is_what_its_digest_says(server: Server, tmp_path: Path) -> None:
    with Client(server.address) as client:
        done = client.save(DENSE, tmp_path / "clip.mp4")
    (artifact,) = [a for a in done.artifacts if a.name == "final.mp4"]
    data = (server.data / artifact.relative_path).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (artifact.size_bytes, artifact.sha256)
    left = sorted(p.name for p in (server.data / "jobs" / done.job_id).iterdir())
    assert left == sorted([*JOB_FILES, *DEFAULT_ARTIFACTS])


def test_the_same_request_gives_the_same_bytes_whatever_was_made_before(server: Server) -> None:
    streamed = events_of(server, SMALL)
    first = events_of(server, DENSE)
    again = events_of(server, DENSE)
    assert (digest(again), media(again)) == (digest(first), media(first))
    later = events_of(server, SMALL)
    assert (digest(later), media(later)) == (digest(streamed), media(streamed))
    assert digest(first) != digest(streamed)
    assert overlaps(read_ledger(server.ledger)) == []


def test_the_prompt_the_seed_the_steps_and_the_shifts_matter(server: Server) -> None:
    with Client(server.address) as client:
        changes: list[dict[str, object]] = [{}, {"seed": 1}, {"steps": 2}, {"video_shift": 5.0}, {"audio_shift": 5.0}]
        clips = [list(client.generate(DENSE, **change)) for change in changes]  # type: ignore[arg-type]
        clips.append(list(client.generate(dataclasses.replace(DENSE, prompt="a bear"))))
    assert len({digest(clip) for clip in clips}) == len(clips)


async def test_cancel_stops_within_one_forward_and_the_next_jobs_run(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        undisturbed = [event async for event in client.generate(DENSE)]

        async def until_step(step: int) -> None:
            async for event in stream:
                if isinstance(event, Progress) and event.step == step:
                    return

        stream = client.generate("a fox", num_frames=39, width=512, height=288, steps=50, mode="dense")
        await until_step(2)
        cancelling = asyncio.create_task(client.cancel(stream.job_id))
        with pytest.raises(JobCancelledError) as cancelled:
            await until_step(5)  # one forward may be done, one under way and one announced; never three more
        assert (cancelled.value.phase, cancelled.value.chunk_index) == ("denoise", -1)
        assert (await cancelling).state == "cancelled"
        assert digest([event async for event in client.generate(DENSE)]) == digest(undisturbed)
        assert digest([event async for event in client.generate(SMALL)])
    assert overlaps(read_ledger(server.ledger)) == []
