"""What a clip shows and sounds like, against the scene that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from core.geometry import AUDIO_LATENTS_PER_SECOND, FPS
from tools.train_tiny.measure.motions import touches
from tools.train_tiny.measure.pictures import Picture, SeenThing, read_picture
from tools.train_tiny.measure.sounds import Sound, loudness, read_sound
from tools.train_tiny.world import (
    BACKGROUNDS,
    COLOURS,
    FUNDAMENTALS,
    HARMONICS,
    MOTIONS,
    PARTIALS,
    PITCHES,
    RHYTHMS,
    SHAPES,
    SIZES,
    TONE_LEVEL,
    Scene,
    batch,
    envelopes,
    gains,
    latent_frames,
    pan,
)

ATTRIBUTES = ("objects", "shape", "colour", "size", "motion", "background", "pitch", "rhythm")
"""What is right or wrong of a clip; an object's attributes are right where they are of all objects."""
PAN_LATENTS = 2
"""Audio latents over which a side is measured: 50 ms."""
_LOUD = 0.25
"""Of the loudest: what is below says nothing about its side."""
_BOUNCE = MOTIONS.index("bounce")
_LONE_FRAMES = 2.0
"""A click that is further from every touch belongs to none."""
_TOUCH_REACH = 9.0
"""Nearer to an end of the clip, or to a moment at which a bouncing object is out of sight, touches are not measured."""


@dataclass(frozen=True)
class Reading:
    """What a clip shows and sounds like."""

    picture: Picture
    sound: Sound


@dataclass(frozen=True)
class Clicks:
    """The clicks of a clip against the touches that are seen."""

    errors: tuple[float, ...]
    """Of every touch: its nearest click less it, frames."""
    num_missed: int
    """Touches without a click."""
    num_lone: int
    """Clicks without a touch."""


def read_scene(frames: Tensor, waveform: Tensor) -> Reading:
    """Reads frames `[F, H, W, 3]` uint8 and a waveform `[2, S]` float32 at 32 kHz."""
    return Reading(read_picture(frames), read_sound(waveform))


def paired(picture: Picture, scene: Scene) -> list[SeenThing]:
    """The objects in the scene's order: the one of all orders in which most attributes are right."""
    return list(
        max(
            permutations(picture.things),
            key=lambda order: sum(seen.num_right(thing) for seen, thing in zip(order, scene.things, strict=False)),
        )
    )


def verdicts(reading: Reading, scene: Scene) -> dict[str, bool]:
    """Of every attribute whether it is the scene's."""
    seen = paired(reading.picture, scene)
    is_whole = len(seen) == len(scene.things)
    right = {"objects": is_whole}
    for name in ("shape", "colour", "size", "motion"):
        pairs = zip(seen, scene.things, strict=False)
        right[name] = is_whole and all(getattr(mine, name) == getattr(its, name) for mine, its in pairs)
    right["background"] = reading.picture.background == scene.background
    right["pitch"] = reading.sound.pitch == scene.pitch
    right["rhythm"] = reading.sound.rhythm == scene.rhythm
    return right


def positions_at(seen: SeenThing, instants: Tensor) -> tuple[Tensor, Tensor]:
    """Places `[N, 2]` of an object at instants `[N]` in frames, and whether they were measured, `[N]` bool."""
    before = instants.floor().long().clamp(0, len(seen.track) - 1)
    after = (before + 1).clamp(max=len(seen.track) - 1)
    part = (instants - before)[:, None].clamp(0.0, 1.0)
    place = seen.track[before] + part * (seen.track[after] - seen.track[before])
    return place, seen.reliable[before] & seen.reliable[after]


def pan_errors(sound: Sound, seen: SeenThing) -> Tensor:
    """Of every stretch of 50 ms that is loud while its object is seen: the side heard less the one seen, `[N]`."""
    if not sound.frequency:
        return torch.zeros(0, dtype=torch.float64)
    num = sound.amplitudes.shape[2] // PAN_LATENTS
    left, right = loudness(sound)[:, : num * PAN_LATENTS].view(2, num, PAN_LATENTS).sum(dim=2)
    middle = (torch.arange(num, dtype=torch.float64) + 0.5) * PAN_LATENTS * FPS / AUDIO_LATENTS_PER_SECOND
    place, is_seen = positions_at(seen, middle)
    use = is_seen & (left + right > _LOUD * (left + right).max())
    heard: Tensor = (right - left) / (right + left).clamp(min=1e-9)
    return heard[use] - pan(place[use, 0])


def click_errors(reading: Reading) -> Clicks:
    """The clicks against every touch that is seen."""
    bouncing = [seen for seen in reading.picture.things if seen.motion == _BOUNCE]
    instants = [instant for seen in bouncing for instant in touches(seen.track, seen.reliable)]
    clicks = reading.sound.clicks
    nearest = [min((click - instant for click in clicks), key=abs, default=torch.inf) for instant in instants]
    lone = [
        click
        for click in clicks
        if all(abs(click - instant) > _LONE_FRAMES for instant in instants) and _is_seen(click, bouncing)
    ]
    heard = tuple(error for error in nearest if abs(error) <= _LONE_FRAMES)
    return Clicks(heard, len(nearest) - len(heard), len(lone))


def _is_seen(instant: float, bouncing: list[SeenThing]) -> bool:
    """Whether a touch at an instant would have been measured."""
    around = torch.arange(instant - _TOUCH_REACH, instant + _TOUCH_REACH + 1)
    return all(
        float(around[0]) >= 0 and float(around[-1]) < len(seen.track) and bool(seen.reliable[around.long()].all())
        for seen in bouncing
    )


def tone_error(sound: Sound, seen: SeenThing, scene: Scene) -> float:
    """How far the partials' amplitudes are from those that belong to the scene and to where its object is seen.

    The root of the sum of squares over that of the true ones; of a silent scene, the root mean square over the level of
    a tone.
    """
    num_latents = sound.amplitudes.shape[2]
    place, _ = positions_at(seen, latent_frames(num_latents))
    scenes = batch([scene], torch.zeros(1, 2, 2))
    loud = TONE_LEVEL * envelopes(scenes, num_latents)[0] * gains(place).T  # [2, A]
    true = torch.zeros_like(sound.amplitudes)
    if scene.pitch:
        for harmonic, amplitude in enumerate(HARMONICS, start=1):
            true[PARTIALS.index(harmonic * FUNDAMENTALS[scene.pitch])] = amplitude * loud
    off = sound.amplitudes - true
    if not scene.pitch:
        return float(off.square().mean().sqrt() / TONE_LEVEL)
    return float(off.norm() / true.norm())


def spoken(reading: Reading, scene: Scene) -> dict[str, str]:
    """What was read of every attribute, in words."""
    seen = paired(reading.picture, scene)
    sound = reading.sound

    def words(table: tuple[str, ...], values: list[int | None]) -> str:
        return " and ".join("?" if value is None else table[value] for value in values)

    return {
        "objects": str(len(seen)),
        "shape": words(SHAPES, [thing.shape for thing in seen]),
        "colour": words(COLOURS, [thing.colour for thing in seen]),
        "size": words(SIZES, [thing.size for thing in seen]),
        "motion": words(MOTIONS, [thing.motion for thing in seen]),
        "background": BACKGROUNDS[reading.picture.background],
        "pitch": words(PITCHES, [sound.pitch]),
        "rhythm": words(RHYTHMS, [sound.rhythm]),
    }
