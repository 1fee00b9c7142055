"""The model of the repository through the whole service: clips show and sound what their prompts say.

How good it is over hundreds of prompts is measured by `python -m bench.quality`; this is a sample of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from h3stream import Client, Completed
from tests.e2e.conftest import Server, start_server, stop_server
from tools.train_tiny.measure.quality import Case, Measured, held_out_cases, measured, summary

MODEL = Path(__file__).parents[2] / "models" / "tiny"
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(MODEL, tmp_path_factory.mktemp("tiny"))
    yield running
    assert stop_server(running) == 0, running.log.read_text()[-4000:]


def clip_of(client: Client, prompt: str, seed: int, **settings: object) -> tuple[bytes, str]:
    """The stream of a clip, and the digest of its latents."""
    events = list(client.generate(prompt, seed=seed, **settings))
    completed = events[-1]
    assert isinstance(completed, Completed)
    return b"".join(event.media for event in events), completed.latents_sha256


def measure(client: Client, case: Case, **settings: object) -> Measured:
    return measured(case, clip_of(client, case.prompt, case.seed, **settings)[0])


@pytest.fixture(scope="module")
def streamed(tiny_server: Server) -> list[Measured]:
    with Client(tiny_server.address) as client:
        return [measure(client, case, num_frames=39, steps=4) for case in held_out_cases(NUM_PROMPTS, 1)]


def test_streamed_clips_show_and_sound_what_unseen_prompts_say(streamed: list[Measured]) -> None:
    wrong = [(clip.case.prompt, clip.words, clip.right) for clip in streamed if not clip.is_right]
    assert len(wrong) <= 1, wrong


def test_pictures_do_not_jump_at_chunks_and_latents(streamed: list[Measured]) -> None:
    assert max(summary(streamed).moving.values()) <= 1.3


def test_the_sound_keeps_to_the_picture(streamed: list[Measured]) -> None:
    found = summary(streamed)
    assert found.pitch.worst <= 0.01
    assert found.pan.median <= 0.03
    assert found.num_missed_clicks + found.num_lone_clicks <= 1


def test_a_longer_clip_goes_on_as_it_began(tiny_server: Server) -> None:
    with Client(tiny_server.address) as client:
        clips = [measure(client, case, num_frames=107, steps=4) for case in held_out_cases(3, 2)]
    assert sum(not clip.is_right for clip in clips) <= 1


def test_a_dense_clip_shows_it_too(tiny_server: Server) -> None:
    with Client(tiny_server.address) as client:
        clips = [
            measure(client, case, num_frames=39, mode="dense", steps=20) for case in held_out_cases(4, 3)
        ]
    assert sum(not clip.is_right for clip in clips) <= 1


def test_seeds_vary_only_what_the_prompt_leaves_open(tiny_server: Server) -> None:
    (case,) = held_out_cases(1, 4)
    with Client(tiny_server.address) as client:
        made = [clip_of(client, case.prompt, seed, num_frames=39, steps=4) for seed in (1, 2, 3)]
        again = clip_of(client, case.prompt, 1, num_frames=39, steps=4)
    assert again == made[0]
    assert len({digest for _, digest in made}) == 3
    clips = [measured(case, media) for media, _ in made]
    assert all(clip.is_right for clip in clips), [clip.words for clip in clips]
    starts = [clip.tracks[0][0] for clip in clips]
    assert max(float((a - b).norm()) for a in starts for b in starts) > 2.0
