from __future__ import annotations

import pytest
import torch

from tools.train_tiny.grammar import DEFAULT_BACKGROUND, DEFAULT_THING, EXAMPLES, describe, plainer, understand
from tools.train_tiny.world import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    PITCHES,
    RHYTHMS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    random_scene,
)


def thing(colour: str, size: str, shape: str, motion: str) -> Thing:
    return Thing(SHAPES.index(shape), COLOURS.index(colour), SIZES.index(size), MOTIONS.index(motion))


def things(text: str) -> tuple[Thing, ...]:
    return understand(text).things


def setting(text: str) -> tuple[str, str, str]:
    scene = understand(text)
    return BACKGROUNDS[scene.background], PITCHES[scene.pitch], RHYTHMS[scene.rhythm]


def test_every_random_prompt_is_understood_as_its_scene() -> None:
    generator = torch.Generator().manual_seed(5)
    for number in range(3000):
        scene = random_scene(generator)
        if number % 3 == 0:
            scene = plainer(scene, generator)
        prompt = describe(scene, generator)
        assert understand(prompt) == scene, prompt


def test_prompts_of_one_scene_differ_and_follow_from_the_generator() -> None:
    scene = understand(EXAMPLES[0])
    prompts = [describe(scene, torch.Generator().manual_seed(seed)) for seed in range(50)]
    assert len(set(prompts)) > 45
    assert prompts == [describe(scene, torch.Generator().manual_seed(seed)) for seed in range(50)]


@pytest.mark.parametrize("text", ["", "  \n", "?!,,.", "Xyzzy 42", "ein roter Ball", "🎈", "</s>", "and and, the"])
def test_a_text_without_known_words_names_a_white_circle_at_night(text: str) -> None:
    assert understand(text) == Scene((DEFAULT_THING,), DEFAULT_BACKGROUND, 0, 0)


def test_unknown_words_change_nothing() -> None:
    plain = "A small red ball bounces over a green meadow and a big blue star drifts to the left with a low hum."
    strange = (
        "Behold, a small vorpal red quux ball zap bounces 17 slithy over a green meadow, lo, and a tove big mimsy blue "
        "star drifts borogove to the left with a low outgrabe hum, 4k."
    )
    assert understand(strange) == understand(plain)
    assert understand(plain.upper()) == understand(plain)


@pytest.mark.parametrize(
    ("text", "motion"),
    [
        ("a ball moves from the left to the right", "right"),
        ("a ball moves from right to left", "left"),
        ("a ball floats", "still"),
        ("a ball floats up", "up"),
        ("a still ball", "still"),
        ("it falls, the ball", "down"),
        ("a ball jumps up and down", "bounce"),
        ("a ball circles to the right", "orbit"),
        ("a ball goes round in a circle", "orbit"),
    ],
)
def test_motions_are_told_apart(text: str, motion: str) -> None:
    assert [MOTIONS[found.motion] for found in things(text)] == [motion]


@pytest.mark.parametrize(
    "text",
    [
        "A small red star rises and a large blue box rests.",
        "A rising, small and red star beside one big blue cube",
        "small red star rising, big blue square",
        "At night, a star that is red and small, rising, with a hum, while a giant block in blue stands still.",
        "A star, tiny and crimson, goes up; a huge motionless navy tile.",
    ],
)
def test_what_is_said_of_one_object_is_not_said_of_the_other(text: str) -> None:
    assert things(text) == (thing("red", "small", "star", "up"), thing("blue", "large", "square", "still"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a ball over a green meadow, with a deep hum", ("meadow", "low", "hum")),
        ("a ball on the deep blue sea", ("sea", "silent", "hum")),
        ("a medium ball, bright and high above the water", ("sea", "silent", "hum")),
        ("the deep blue ball hums", ("night", "middle", "hum")),
        ("a medium pulse", ("night", "middle", "pulse")),
        ("a ball ticks in the mist", ("fog", "middle", "tick")),
        ("a ball drones at a high pitch at dusk", ("sunset", "high", "hum")),
        ("a ball and a pulsing tone, shrill", ("night", "high", "pulse")),
        ("a ball without a sound by day", ("meadow", "silent", "hum")),
    ],
)
def test_background_and_sound_are_heard_through_other_uses_of_their_words(
    text: str, expected: tuple[str, str, str]
) -> None:
    assert setting(text) == expected
    assert len(things(text)) == 1


def test_a_third_object_is_left_out() -> None:
    assert things("a red ball, a blue ball and a small green star that jumps") == things("a red ball, a blue ball")


def test_the_examples_show_the_whole_world() -> None:
    scenes = [understand(text) for text in EXAMPLES]
    assert len(set(scenes)) == 10
    shown = list(zip(*(one for scene in scenes for one in scene.things), strict=True))
    for values, names in zip(shown, (SHAPES, COLOURS, SIZES, MOTIONS), strict=True):
        assert set(values) == set(range(len(names)))
    assert {scene.background for scene in scenes} == set(range(len(BACKGROUNDS)))
    assert {scene.pitch for scene in scenes} == set(range(len(PITCHES)))
    assert {scene.rhythm for scene in scenes} == set(range(len(RHYTHMS)))
    assert {len(scene.things) for scene in scenes} == {1, 2}
