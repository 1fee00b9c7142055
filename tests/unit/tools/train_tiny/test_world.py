from __future__ import annotations

import itertools

import torch

from tools.train_tiny.picture import EDGE
from tools.train_tiny.training import generator
from tools.train_tiny.world import (
    BOUNCE_FRAMES,
    CYCLIC,
    FIRST_PHASES,
    GROUND,
    HEIGHT,
    MOTIONS,
    PHASE_SPREAD,
    RADII,
    SPEED_X,
    SPEED_Y,
    WIDTH,
    Scene,
    Scenes,
    Thing,
    audibility,
    batch,
    beginnings,
    click_amplitudes,
    gains,
    pan,
    positions,
    random_scene,
    tone_amplitudes,
    touches,
)

FRAMES = torch.arange(192)
LAP = 120


def scene_of(motion: str, size: int = 1, pitch: int = 1) -> Scene:
    return Scene((Thing(0, 0, size, MOTIONS.index(motion)),), 0, pitch, 0)


def scenes_of(*motions: str, free: float = 0.3) -> Scenes:
    return batch([scene_of(motion) for motion in motions], torch.full((len(motions), 2, 2), free))


def test_movers_cross_the_canvas_and_come_in_again_from_the_other_side() -> None:
    ways = {"right": (SPEED_X, 0.0), "left": (-SPEED_X, 0.0), "up": (0.0, -SPEED_Y), "down": (0.0, SPEED_Y)}
    edge = torch.tensor([WIDTH / 2, HEIGHT / 2])
    for free in (0.0, 0.999):
        for track, way in zip(positions(scenes_of(*ways, free=free), FRAMES)[:, 0], ways.values(), strict=True):
            steps = track[1:] - track[:-1]
            jumps = (steps - torch.tensor(way, dtype=torch.float64)).norm(dim=1) > 1e-6
            assert 1 <= int(jumps.sum()) <= 2
            # A jump is out of sight, for the largest object too.
            out_of_sight = (track.abs() - edge).amax(1) > 1.3 * max(RADII) + EDGE / 2
            assert bool((out_of_sight[1:] & out_of_sight[:-1])[jumps].all())
            assert torch.allclose(track[LAP:], track[:-LAP])
            assert (track[0].abs() < edge).all()
            assert (track[38].abs() < edge).all()


def test_a_still_object_keeps_its_place_and_an_orbit_its_distance() -> None:
    still, orbit = positions(scenes_of("still", "orbit"), FRAMES)[:, 0]
    assert (still == still[0]).all()
    centre = (orbit[:60].amin(0) + orbit[:60].amax(0)) / 2
    assert torch.allclose((orbit - centre).norm(dim=1), torch.tensor(22.0, dtype=torch.float64), atol=0.05)


def test_a_bouncing_object_touches_the_ground_when_it_says_so() -> None:
    for size, radius in enumerate(RADII):
        scenes = batch([scene_of("bounce", size)], torch.full((1, 2, 2), 0.8))
        instants = [instant for _, instant in touches(scenes, 192)[0]]
        assert [round(b - a) for a, b in itertools.pairwise(instants)] == [BOUNCE_FRAMES] * 5
        lowest = positions(scenes, torch.tensor(instants))[0, 0, :, 1] + radius
        assert torch.allclose(lowest, torch.tensor(GROUND, dtype=torch.float64))
        assert (positions(scenes, FRAMES)[0, 0, :, 1] + radius <= GROUND + 1e-9).all()


def test_a_click_begins_in_the_latent_that_holds_the_touch() -> None:
    scenes = batch([scene_of("bounce")], torch.full((1, 2, 2), 0.8))
    clicks = click_amplitudes(scenes, 73, 122)[0].sum(0)
    expected = [int(instant / 24 * 40) for _, instant in touches(scenes, 73)[0]]
    assert clicks.nonzero().flatten().tolist() == expected


def test_two_objects_begin_on_their_own_sides() -> None:
    generator = torch.Generator().manual_seed(0)
    scenes = [Scene((Thing(0, 0, 0, 0), Thing(1, 1, 0, 0)), 0, 0, 0)] * 50
    at = positions(batch(scenes, torch.rand(50, 2, 2, generator=generator)), FRAMES[:1])[..., 0, 0]
    assert (at[:, 0] < -20).all()
    assert (at[:, 1] > 20).all()


def test_a_sound_comes_from_where_its_object_is() -> None:
    scenes = scenes_of("right", "still")
    tone = tone_amplitudes(scenes, 320)
    left, right = tone[0].sum(0)
    middle = (torch.arange(320) + 0.5) * 24 / 40
    at = positions(scenes, middle)[0, 0]
    heard = left + right > 0
    assert 0 < heard.sum() < 320  # for a while it is out of sight
    assert torch.allclose(((right - left) / (left + right))[heard], pan(at[heard, 0]), atol=1e-5)
    assert torch.allclose(gains(at).sum(-1), audibility(at))


def test_a_sound_fades_where_its_object_leaves_the_canvas() -> None:
    heard = audibility(torch.tensor([[0.0, 0.0], [WIDTH / 2, 0.0], [WIDTH / 2 + 15, 0.0], [0.0, HEIGHT / 2 + 40]]))
    assert heard.tolist() == [1.0, 1.0, 0.5, 0.0]


def test_a_silent_scene_has_no_tone() -> None:
    assert not tone_amplitudes(batch([scene_of("right", pitch=0)], torch.zeros(1, 2, 2)), 65).any()


def test_about_one_scene_in_six_is_held_out() -> None:
    generator = torch.Generator().manual_seed(0)
    share = sum(random_scene(generator).is_held_out for _ in range(3000)) / 3000
    assert abs(share - 1 / 6) < 0.02


def test_what_goes_in_cycles_begins_at_about_one_place_of_them_and_all_else_anywhere() -> None:
    random = generator(0, "test")
    scenes = [random_scene(random) for _ in range(2000)]
    free = beginnings(scenes, random)
    kept = [(i, thing, free[b, i]) for b, scene in enumerate(scenes) for i, thing in enumerate(scene.things)]
    for i, middle in enumerate(FIRST_PHASES):
        cyclic = torch.stack([f for n, thing, f in kept if n == i and MOTIONS[thing.motion] in CYCLIC])
        assert (cyclic[:, 0] - middle).abs().max() <= PHASE_SPREAD / 2
        assert cyclic[:, 0].std() > 0.25 * PHASE_SPREAD
        assert cyclic[:, 1].std() > 0.25
        turns = 2 * torch.pi * cyclic[:, 0]
        assert torch.hypot(turns.cos().mean(), turns.sin().mean()) > 0.9  # their mean is nearly one of them
        others = torch.stack([f for n, thing, f in kept if n == i and MOTIONS[thing.motion] not in CYCLIC])
        assert (others.std(0) > 0.25).all()
