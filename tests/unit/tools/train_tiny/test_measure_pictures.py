from __future__ import annotations

import pytest
import torch

from tests.unit.tools.train_tiny.world_media import pictures, through_h264
from tools.train_tiny.measure.media import contact_sheet
from tools.train_tiny.measure.motions import touches as seen_touches
from tools.train_tiny.measure.pictures import SeenThing, read_picture
from tools.train_tiny.training import generator
from tools.train_tiny.world import (
    COLOURS,
    HEIGHT,
    MOTIONS,
    SHAPES,
    SIZES,
    WIDTH,
    Scene,
    Thing,
    batch,
    positions,
    random_scene,
    touches,
)


def thing(size: str, colour: str, shape: str, motion: str) -> Thing:
    return Thing(SHAPES.index(shape), COLOURS.index(colour), SIZES.index(size), MOTIONS.index(motion))


def attributes(things: tuple[SeenThing, ...]) -> list[tuple[int, int, int, int | None]]:
    return sorted((seen.thing for seen in things), key=str)


@pytest.mark.parametrize("number", range(6))
def test_a_soft_noisy_and_encoded_picture_of_any_scene_is_read_without_a_fault(number: int) -> None:
    random = generator(5, number)
    scene = random_scene(random)
    scenes = batch([scene], torch.rand(1, 2, 2, generator=random))
    picture = read_picture(through_h264(pictures(scenes, 39, random)))
    assert picture.background == scene.background
    assert attributes(picture.things) == sorted(map(tuple, scene.things), key=str)


CROSSING = {
    "of two colours": Scene(
        (thing("small", "red", "star", "right"), thing("large", "yellow", "circle", "left")), 0, 0, 0
    ),
    "of one colour": Scene(
        (thing("medium", "green", "square", "right"), thing("large", "green", "star", "left")), 1, 0, 0
    ),
    "that look the same": Scene(
        (thing("medium", "cyan", "circle", "right"), thing("medium", "cyan", "circle", "still")), 2, 0, 0
    ),
}


@pytest.mark.parametrize("name", CROSSING)
def test_objects_that_pass_before_each_other_keep_their_attributes_and_tracks(name: str) -> None:
    scene = CROSSING[name]
    scenes = batch([scene], torch.full((1, 2, 2), 0.5))
    picture = read_picture(through_h264(pictures(scenes, 73)))
    assert attributes(picture.things) == sorted(map(tuple, scene.things), key=str)
    true = positions(scenes, torch.arange(73))[0]
    for seen in picture.things:
        off = (true[scene.things.index(Thing(*seen.thing))] - seen.track).norm(dim=1)  # type: ignore[arg-type]
        assert float(off[seen.reliable].max()) < 0.8
        assert float(off[seen.reliable].median()) < 0.15


def test_an_object_that_leaves_the_canvas_and_comes_in_again_is_followed_while_it_is_there() -> None:
    scenes = batch([Scene((thing("small", "white", "triangle", "right"),), 3, 0, 0)], torch.full((1, 2, 2), 0.9))
    (seen,) = read_picture(pictures(scenes, 192)).things
    assert seen.thing == thing("small", "white", "triangle", "right")
    true = positions(scenes, torch.arange(192))[0, 0]
    inside = true[:, 0].abs() < WIDTH / 2
    assert bool(seen.reliable[inside].all())
    assert not bool(seen.reliable[true[:, 0].abs() > WIDTH / 2 + 15].any())
    assert float((seen.track - true).norm(dim=1)[inside].max()) < 0.5


def test_touches_are_found_to_a_tenth_of_a_frame() -> None:
    scenes = batch([Scene((thing("medium", "orange", "star", "bounce"),), 4, 0, 0)], torch.full((1, 2, 2), 0.31))
    (seen,) = read_picture(through_h264(pictures(scenes, 73))).things
    assert seen_touches(seen.track, seen.reliable) == pytest.approx(
        [instant for _, instant in touches(scenes, 73)[0]], abs=0.1
    )


def test_a_thing_that_jumps_about_follows_no_motion() -> None:
    scenes = batch(
        [Scene((thing("medium", "red", "circle", "still"),), 0, 0, 0)] * 39,
        torch.rand(39, 2, 2, generator=generator(2)),
    )
    frames = torch.stack(
        [
            pictures(batch([Scene((thing("medium", "red", "circle", "still"),), 0, 0, 0)], free[None]), 1)[0]
            for free in scenes.free
        ]
    )
    (seen,) = read_picture(frames).things
    assert seen.motion is None


def test_an_empty_picture_has_no_objects_and_noise_is_read_too() -> None:
    night = pictures(batch([Scene((thing("small", "red", "circle", "still"),), 0, 0, 0)], torch.rand(1, 2, 2)), 1)[0]
    empty = night[:, :1].expand(22, HEIGHT, WIDTH, 3)
    assert read_picture(empty).things == ()
    noise = torch.rand(22, 6, 10, 3, generator=generator(1)).repeat_interleave(16, 1).repeat_interleave(16, 2)
    read_picture((255 * noise).to(torch.uint8))


def test_a_contact_sheet_shows_the_first_and_the_last_frame() -> None:
    frames = torch.arange(22, dtype=torch.uint8)[:, None, None, None].expand(22, 4, 6, 3)
    sheet = contact_sheet(frames, 3, 2)
    assert sheet.shape == (8, 18, 3)
    assert (int(sheet[0, 0, 0]), int(sheet[-1, -1, 0])) == (0, 21)
