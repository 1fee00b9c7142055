from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.unit.tools.train_tiny.world_media import pictures, waveform
from tools.train_tiny.grammar import understand
from tools.train_tiny.measure.quality import Case, Measured, held_out_cases, measured_reading, summary
from tools.train_tiny.measure.reading import read_scene
from tools.train_tiny.measure.seams import KINDS, changes
from tools.train_tiny.training import generator
from tools.train_tiny.world import MOTIONS, Scene, Thing, batch

FRAMES = 39


def read(case: Case, frames: Tensor, sound: Tensor) -> Measured:
    return measured_reading(case, frames, read_scene(frames, sound))


def flashing(frames: list[int], num_frames: int) -> Tensor:
    """A grey clip whose level changes by 10 at the steps into these frames, and by 1 at the others."""
    steps = torch.ones(num_frames, dtype=torch.int64)
    steps[frames] = 10
    signs = torch.tensor([1, -1]).repeat(num_frames)[:num_frames]
    return (100 + (steps * signs).cumsum(0)).to(torch.uint8)[:, None, None, None].expand(-1, 4, 4, 3)


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("cut", [17, 34]),
        ("blend", [18, 19, 20, 21, 35, 36, 37, 38]),
        ("border", [1, 5, 9, 13, 22, 26, 30]),
    ],
)
def test_a_change_is_counted_where_it_happens(kind: str, frames: list[int]) -> None:
    kinds = dict(zip(KINDS, changes(flashing(frames, FRAMES)).ratio.tolist(), strict=True))
    assert kinds.pop(kind) == pytest.approx(10)
    assert list(kinds.values()) == pytest.approx([1, 1, 1])


def test_cases_are_unseen_described_by_their_prompts_and_the_same_for_every_run() -> None:
    cases = held_out_cases(20, seed=3)
    assert all(case.scene.is_held_out for case in cases)
    assert all(understand(case.prompt) == case.scene for case in cases)
    assert cases == held_out_cases(20, seed=3)
    assert len({case.seed for case in cases}) == 20


def test_a_summary_of_true_clips_is_perfect_and_one_false_attribute_shows() -> None:
    cases = held_out_cases(3, seed=2)
    clips = []
    for index, case in enumerate(cases):
        scenes = batch([case.scene], torch.rand(1, 2, 2, generator=generator(6, index)))
        clips.append(read(case, pictures(scenes, FRAMES), waveform(scenes, FRAMES)))
    found = summary(clips)
    assert found.all_right == 1.0
    assert found.pan.worst < 0.01
    assert found.tone.worst < 0.06
    assert all(0.5 < ratio < 1.3 for ratio in found.moving.values())
    other = dataclasses.replace(cases[0].scene, background=(cases[0].scene.background + 1) % 5)
    scenes = batch([other], torch.rand(1, 2, 2, generator=generator(6)))
    clips[0] = read(cases[0], pictures(scenes, FRAMES), waveform(scenes, FRAMES))
    found = summary(clips)
    assert found.all_right == pytest.approx(2 / 3)
    assert [name for name, share in found.right.items() if share < 1] == ["background"]


def test_a_clip_in_which_nothing_should_move_is_told_in_levels() -> None:
    case = dataclasses.replace(
        held_out_cases(1, seed=1)[0], scene=Scene((Thing(0, 0, 1, MOTIONS.index("still")),), 0, 0, 0)
    )
    found = summary([read(case, flashing([17, 34], FRAMES)[:, :1, :1].expand(-1, 96, 160, -1), torch.zeros(2, 52_000))])
    assert found.still["cut"] == pytest.approx(10)
    assert found.still["elsewhere"] == pytest.approx(1)
    assert found.right["objects"] == 0
