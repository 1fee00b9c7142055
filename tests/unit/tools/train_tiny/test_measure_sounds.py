from __future__ import annotations

import math

import pytest
import torch

from tests.unit.tools.train_tiny.world_media import pictures, through_aac, waveform
from tools.train_tiny.measure.reading import click_errors, paired, pan_errors, read_scene, tone_error, verdicts
from tools.train_tiny.measure.sounds import read_sound
from tools.train_tiny.training import generator
from tools.train_tiny.world import MOTIONS, PITCHES, RHYTHMS, Scene, Thing, batch

FRAMES = 73
BOUNCE, ORBIT, STILL = (MOTIONS.index(name) for name in ("bounce", "orbit", "still"))
SOUNDS = [(pitch, rhythm) for pitch in range(1, len(PITCHES)) for rhythm in range(len(RHYTHMS))]


@pytest.mark.parametrize(("pitch", "rhythm"), [(0, 0), *SOUNDS])
def test_every_sound_beside_a_bounce_is_told_after_its_encoding(pitch: int, rhythm: int) -> None:
    scenes = batch([Scene((Thing(0, 0, 1, BOUNCE),), 0, pitch, rhythm)], torch.rand(1, 2, 2, generator=generator(4)))
    sound = read_sound(through_aac(waveform(scenes, FRAMES)))
    assert (sound.pitch, sound.rhythm) == (pitch, rhythm)
    assert sound.pitch_error < 1e-4
    assert len(sound.clicks) == 2


def test_a_tone_between_the_pitches_has_none_and_one_nearby_has_its_error_told() -> None:
    second = torch.arange(96_000) / 32_000
    off, near = (torch.sin(2 * math.pi * hz * second).expand(2, -1) / 4 for hz in (300.0, 402.0))
    assert read_sound(off).pitch is None
    assert read_sound(near).pitch == PITCHES.index("middle")
    assert read_sound(near).pitch_error == pytest.approx(0.005, rel=0.01)


def test_strokes_of_another_period_are_no_rhythm() -> None:
    strokes = torch.exp(-torch.remainder(torch.arange(96_000) / 800, 17) / 5)
    tone = strokes * torch.sin(2 * math.pi * 400 * torch.arange(96_000) / 32_000) / 3
    assert read_sound(tone.expand(2, -1)).rhythm is None


@pytest.mark.parametrize("rhythm", range(len(RHYTHMS)))
def test_the_side_that_is_heard_is_the_one_where_the_first_object_is_seen(rhythm: int) -> None:
    scene = Scene((Thing(0, 0, 1, ORBIT), Thing(3, 5, 2, BOUNCE)), 1, 2, rhythm)
    scenes = batch([scene], torch.full((1, 2, 2), 0.3))
    true = read_scene(pictures(scenes, FRAMES), through_aac(waveform(scenes, FRAMES)))
    first, second = paired(true.picture, scene)
    assert all(verdicts(true, scene).values())
    assert float(pan_errors(true.sound, first).abs().median()) < 0.005
    assert float(pan_errors(true.sound, first).abs().max()) < 0.03  # where the other object clicks
    assert float(pan_errors(true.sound, second).abs().median()) > 0.3
    assert tone_error(true.sound, first, scene) < 0.06
    assert tone_error(true.sound, second, scene) > 0.3


def test_clicks_lie_within_a_frame_of_the_touches_and_misplaced_ones_are_told() -> None:
    scene = Scene((Thing(0, 0, 1, BOUNCE), Thing(3, 5, 2, BOUNCE)), 1, 0, 0)
    scenes = batch([scene], torch.tensor([[[0.3, 0.5], [0.8, 0.5]]]))
    frames, sound = pictures(scenes, FRAMES), waveform(scenes, FRAMES)
    clicks = click_errors(read_scene(frames, through_aac(sound)))
    assert len(clicks.errors) >= 3
    assert max(map(abs, clicks.errors)) < 0.75
    assert (clicks.num_missed, clicks.num_lone) == (0, 0)
    late = click_errors(read_scene(frames, sound.roll(8000, dims=1)))
    assert late.num_missed >= 3
    assert late.num_lone >= 3
