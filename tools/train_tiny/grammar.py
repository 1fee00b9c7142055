"""What prompts of the tiny model's world say, both ways: a random prompt of a scene, and the scene that a prompt names.

The language is a list of phrases, each with a meaning, and three rules (`understand`). Words that are no phrase are
skipped. What a prompt leaves out is a white, still circle of medium size at night, without a sound.
"""

from __future__ import annotations

import random
import re
from itertools import chain, pairwise
from typing import NamedTuple

import torch

from tools.train_tiny.world import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    NUM_OBJECTS,
    PITCHES,
    RHYTHMS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
)

EXAMPLES = (
    "A small red ball bounces over a green meadow, humming low.",
    "A golden star drifts from left to right at night with a soft, high pulse.",
    "A large blue square rests in the fog while a tiny orange disc orbits, ticking.",
    "At sunset, a huge purple triangle rises to a deep drone.",
    "Over the sea, a little white sphere hops with a bright ticking tone.",
    "A big green star circles around in the evening, and a small cyan box glides to the left.",
    "A yellow pyramid sinks through the mist, throbbing at a low pitch.",
    "A cyan cube flies from right to left above the ocean with a medium-pitched hum.",
    "A tiny red star leaps beside a giant blue ball that hovers under a starry sky. A shrill rattle is heard.",
    "On the grass, an orange block moves right and a violet orb floats up, pulsing.",
)
"""Prompts to begin with: every shape, colour, motion, background and sound is in one of them."""

DEFAULT_THING = Thing(SHAPES.index("circle"), COLOURS.index("white"), SIZES.index("medium"), MOTIONS.index("still"))
DEFAULT_BACKGROUND = BACKGROUNDS.index("night")

_SHAPE_WORDS = {
    "circle": ("circle", "ball", "disc", "disk", "sphere", "orb", "dot"),
    "square": ("square", "box", "block", "cube", "tile"),
    "triangle": ("triangle", "pyramid", "wedge", "cone"),
    "star": ("star", "starlet", "pentagram"),
}
_ANY_SHAPE_WORDS = ("thing", "object", "shape", "figure")
_COLOUR_WORDS = {
    "red": ("red", "crimson", "scarlet", "ruby"),
    "orange": ("orange", "amber", "tangerine"),
    "yellow": ("yellow", "golden", "gold", "lemon"),
    "green": ("green", "emerald", "lime"),
    "cyan": ("cyan", "turquoise", "teal", "aqua"),
    "blue": ("blue", "navy", "cobalt", "sapphire"),
    "purple": ("purple", "violet", "magenta", "lilac"),
    "white": ("white", "ivory", "snow-white"),
}
_SIZE_WORDS = {
    "small": ("small", "tiny", "little", "mini"),
    "medium": ("medium", "medium-sized", "mid-sized", "average"),
    "large": ("large", "big", "huge", "giant", "enormous"),
}


class _Motion(NamedTuple):
    """How a motion is said. Finite forms ("bounces") pair with participles ("bouncing")."""

    verbs: tuple[tuple[str, str], ...]
    """Verbs that say it alone."""
    ways: tuple[str, ...] = ()
    """Phrases that say it behind any verb of `_GOES`."""
    adjectives: tuple[str, ...] = ()
    """Forms that stand before a noun."""


_GOES = (
    ("moves", "moving"),
    ("drifts", "drifting"),
    ("flies", "flying"),
    ("glides", "gliding"),
    ("slides", "sliding"),
    ("travels", "travelling"),
    ("goes", "going"),
    ("sails", "sailing"),
    ("rolls", "rolling"),
    ("shoots", "shooting"),
)
"""Verbs of any direction."""
_MOTION_WORDS = {
    "still": _Motion(
        (
            ("rests", "resting"),
            ("stands still", "standing still"),
            ("hovers", "hovering"),
            ("floats", "floating"),
            ("stays in place", "staying in place"),
            ("sits still", "sitting still"),
            ("does not move", "not moving"),
            ("is motionless", "motionless"),
        ),
        adjectives=("motionless", "still", "hovering", "floating", "resting"),
    ),
    "right": _Motion(
        (),
        (
            "right",
            "to the right",
            "rightwards",
            "towards the right",
            "from left to right",
            "from the left to the right",
        ),
    ),
    "left": _Motion(
        (),
        ("left", "to the left", "leftwards", "towards the left", "from right to left", "from the right to the left"),
    ),
    "up": _Motion(
        (("rises", "rising"), ("climbs", "climbing"), ("ascends", "ascending"), ("floats up", "floating up")),
        ("up", "upwards", "to the top", "from bottom to top"),
        ("rising", "climbing", "ascending"),
    ),
    "down": _Motion(
        (("falls", "falling"), ("sinks", "sinking"), ("descends", "descending"), ("drops", "dropping")),
        ("down", "downwards", "to the bottom", "from top to bottom"),
        ("falling", "sinking", "descending"),
    ),
    "bounce": _Motion(
        (
            ("bounces", "bouncing"),
            ("hops", "hopping"),
            ("jumps", "jumping"),
            ("leaps", "leaping"),
            ("jumps up and down", "jumping up and down"),
        ),
        ("up and down",),
        ("bouncing", "hopping", "jumping"),
    ),
    "orbit": _Motion(
        (
            ("orbits", "orbiting"),
            ("circles around", "circling around"),
            ("circles", "circling"),
            ("goes round", "going round"),
            ("spins around", "spinning around"),
            ("revolves", "revolving"),
            ("rotates", "rotating"),
            ("loops", "looping"),
        ),
        ("in circles", "in a circle", "round and round", "around in circles"),
        ("orbiting", "circling", "spinning", "revolving"),
    ),
}


class _Background(NamedTuple):
    nouns: tuple[str, ...]
    """Words that name it."""
    places: tuple[str, ...]
    """How a sentence says it."""


_BACKGROUND_WORDS = {
    "night": _Background(
        ("night", "midnight", "dark sky", "darkness", "starry sky", "moonlight"),
        (
            "at night",
            "under a dark sky",
            "at midnight",
            "in darkness",
            "under a starry sky",
            "by night",
            "in the moonlight",
            "in the night",
            "under the night sky",
            "across the night sky",
        ),
    ),
    "sunset": _Background(
        ("sunset", "dusk", "evening", "sundown", "twilight"),
        (
            "at sunset",
            "at dusk",
            "in the evening",
            "at sundown",
            "in the twilight",
            "under an evening sky",
            "before a red sunset",
            "under a purple dusk",
        ),
    ),
    "meadow": _Background(
        ("meadow", "field", "grass", "lawn", "day", "daylight"),
        (
            "over a meadow",
            "on a green field",
            "above the grass",
            "over a green meadow",
            "on a lawn",
            "by day",
            "in daylight",
            "in a meadow",
            "over the field",
            "on the grass",
            "across a green field",
            "on a sunny day",
        ),
    ),
    "fog": _Background(
        ("fog", "mist", "haze", "foggy", "misty", "hazy"),
        ("in the fog", "in mist", "in a grey haze", "in thick fog", "through the mist", "in white mist", "in the haze"),
    ),
    "sea": _Background(
        ("sea", "ocean", "water", "waves"),
        (
            "over the sea",
            "above the ocean",
            "over blue water",
            "by the sea",
            "over the waves",
            "at sea",
            "above the water",
            "over the ocean",
            "over a blue sea",
            "into the sea",
            "from the sea",
        ),
    ),
}


class _Pitch(NamedTuple):
    words: tuple[str, ...]
    """Words that say it anywhere."""
    beside_tone: tuple[str, ...]
    """Words that say it next to a tone alone: elsewhere a sky is bright and a blue is deep."""


_PITCH_WORDS = {
    "low": _Pitch(("low-pitched", "bass", "low pitch", "deep pitch"), ("low", "deep")),
    "middle": _Pitch(("medium-pitched", "mid-pitched", "middle pitch", "medium pitch"), ("middle", "mid", "medium")),
    "high": _Pitch(("high-pitched", "shrill", "treble", "high pitch"), ("high", "bright")),
}


class _Rhythm(NamedTuple):
    nouns: tuple[str, ...]
    verbs: tuple[tuple[str, str], ...]


_RHYTHM_WORDS = {
    "hum": _Rhythm(("hum", "drone", "held tone", "tone", "note"), (("hums", "humming"), ("drones", "droning"))),
    "pulse": _Rhythm(
        ("pulse", "beat", "throb", "heartbeat", "pulsing tone", "throbbing tone"),
        (("pulses", "pulsing"), ("throbs", "throbbing"), ("beats", "beating")),
    ),
    "tick": _Rhythm(
        ("tick", "ticking", "rattle", "beeping", "ticking tone", "rattling tone"),
        (("ticks", "ticking"), ("rattles", "rattling"), ("beeps", "beeping")),
    ),
}
_SILENCE_WORDS = ("silence", "silent", "silently", "without a sound", "no sound", "without sound", "soundlessly")
_ARTICLES = ("a", "an", "the", "another", "one")
_JOINTS = ("and", ",")
"""What may stand between the adjectives of one noun."""
_BORDERS = (
    *(
        ".",
        ";",
        ":",
        "!",
        "?",
        "while",
        "with",
        "as",
        "beside",
        "at",
        "in",
        "on",
        "over",
        "above",
        "below",
        "under",
        "by",
    ),
    *("before", "behind", "through", "near", "of", "is", "are", "it", "that", "which", "to", "from", "there"),
    *("into", "across"),
)

_FILLERS = (
    *("beautiful", "cinematic", "4k", "detailed", "realistic", "gently", "slowly", "gracefully", "smoothly", "lovely"),
    *("calm", "nice", "very", "soft", "simple", "elegant", "quickly", "happily", "shiny", "glowing", "vivid", "steady"),
    *("perfect", "strange", "magical", "8k", "hd", "lonely", "cute", "bold", "pretty", "really", "softly", "quiet"),
    *(
        "dog",
        "cat",
        "runs",
        "park",
        "house",
        "music",
        "happy",
        "old",
        "young",
        "city",
        "man",
        "woman",
        "tree",
        "walking",
    ),
    *("slow", "fast", "scene", "camera", "style", "dark", "light", "pale", "nothing", "else", "please", "for", "my"),
    *("just", "same", "time", "morning", "sun", "behold", "quick", "brown", "fox", "hello", "world", "this", "dancing"),
)
_SHADES = ("bright", "dark", "light", "deep", "pale")
"""What may stand before a colour."""
_PAIR_OPENINGS = ("two objects", "two shapes", "two things")
_OPENINGS = ("A video of", "A clip of", "Imagine", "Show me", "Please make", "An animation of", "Picture", "We see")
_ENDINGS = (", cinematic", ", 4k", ", highly detailed", ". Cinematic", ". Very detailed", ", in a smooth style")


class _Mark(NamedTuple):
    """A phrase found in a text."""

    kind: str
    """shape, colour, size, motion, background, pitch, tone, silence, beside (a pitch, if a tone is next to it),
    article, joint or border."""
    value: int
    """Index into the world's table; -1 where there is none: the shape of any object, the rhythm of any tone."""


def _lexicon() -> dict[tuple[str, ...], _Mark]:
    """Every phrase, in words, with its meaning."""
    table: dict[tuple[str, ...], _Mark] = {}

    def add(kind: str, value: int, *phrases: str) -> None:
        for phrase in phrases:
            table[_words(phrase)] = _Mark(kind, value)

    for kind, names, said in (
        ("shape", SHAPES, _SHAPE_WORDS),
        ("colour", COLOURS, _COLOUR_WORDS),
        ("size", SIZES, _SIZE_WORDS),
    ):
        for value, name in enumerate(names):
            add(kind, value, *said[name])
    add("shape", -1, *_ANY_SHAPE_WORDS)
    for value, name in enumerate(MOTIONS):
        motion = _MOTION_WORDS[name]
        add("motion", value, *(form for verb in motion.verbs for form in verb), *motion.ways, *motion.adjectives)
    for value, name in enumerate(BACKGROUNDS):
        add("background", value, *_BACKGROUND_WORDS[name].nouns)
    for value, name in enumerate(PITCHES[1:], start=1):
        add("pitch", value, *_PITCH_WORDS[name].words)
        add("beside", value, *_PITCH_WORDS[name].beside_tone)
    for value, name in enumerate(RHYTHMS):
        rhythm = _RHYTHM_WORDS[name]
        add("tone", value, *rhythm.nouns, *(form for verb in rhythm.verbs for form in verb))
    add("tone", -1, "tone", "note", "sound")
    add("silence", 0, *_SILENCE_WORDS)
    add("article", 0, *_ARTICLES)
    add("joint", 0, *_JOINTS)
    add("border", 0, *_BORDERS)
    return table


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+|[^\w\s]", re.sub(r"[-_]", " ", text.lower())))


_LEXICON = _lexicon()
_LONGEST = max(map(len, _LEXICON))
VOCABULARY = tuple(sorted({word for phrase in _LEXICON for word in phrase if word.isalpha()}))
"""Every word that is part of a phrase."""


def understand(text: str) -> Scene:
    """The scene that a text names; every text names one.

    1. Phrases are found from left to right, the longest first; a pitch that is one only beside a tone counts where
       the phrase before or behind it is a tone.
    2. Colours and sizes directly before a background are the background's ("a green meadow") and say nothing.
    3. An object's phrase begins at the article before its noun, with nothing but attributes and joints between, or
       else at the colours and sizes directly before the noun. What is said up to the next object's phrase is said of
       this one; what comes before the first is said of the first.

    Of two values the first counts, but a bounce or an orbit counts more than a direction, that more than rest, and a
    stroke more than a hum.
    """
    marks = _without_background_colours(_with_pitches(_marks(text)))
    nouns = [i for i, mark in enumerate(marks) if mark.kind == "shape" and (i == 0 or marks[i - 1].kind != "shape")]
    starts = [0, *(_phrase_start(marks, noun) for noun in nouns[1:]), len(marks)]
    spans = list(pairwise(starts))[:NUM_OBJECTS]
    tones = _values(marks, "tone")
    pitches = _values(marks, "pitch")
    is_silent = not tones and not pitches
    return Scene(
        things=tuple(_thing(marks[start:stop]) for start, stop in spans),
        background=next(iter(_values(marks, "background")), DEFAULT_BACKGROUND),
        pitch=0 if is_silent else next(iter(pitches), PITCHES.index("middle")),
        rhythm=next((tone for tone in tones if tone > 0), 0),
    )


def _marks(text: str) -> list[_Mark]:
    words = _words(text)
    marks, at = [], 0
    while at < len(words):
        for length in range(_LONGEST, 0, -1):
            mark = _LEXICON.get(words[at : at + length])
            if mark is not None:
                marks.append(mark)
                at += length
                break
        else:
            at += 1
    return marks


def _with_pitches(marks: list[_Mark]) -> list[_Mark]:
    """The marks with those of kind `beside` turned into pitches, or gone. "Medium" that is no pitch is the default
    size, so nothing is lost.
    """
    kept = []
    for i, mark in enumerate(marks):
        if mark.kind != "beside":
            kept.append(mark)
        elif "tone" in [near.kind for near in (*marks[max(i - 1, 0) : i], *marks[i + 1 : i + 2])]:
            kept.append(mark._replace(kind="pitch"))
    return kept


def _without_background_colours(marks: list[_Mark]) -> list[_Mark]:
    kept: list[_Mark] = []
    for mark in marks:
        if mark.kind == "background":
            while kept and kept[-1].kind in ("colour", "size"):
                kept.pop()
        kept.append(mark)
    return kept


def _phrase_start(marks: list[_Mark], noun: int) -> int:
    """Where the phrase of a later object begins."""
    start = noun
    while marks[start - 1].kind in ("colour", "size", "motion", "joint"):
        start -= 1
    if marks[start - 1].kind == "article":
        return start - 1
    start = noun
    while marks[start - 1].kind in ("colour", "size"):
        start -= 1
    return start


def _thing(marks: list[_Mark]) -> Thing:
    return Thing(
        shape=next((value for value in _values(marks, "shape") if value >= 0), DEFAULT_THING.shape),
        colour=next(iter(_values(marks, "colour")), DEFAULT_THING.colour),
        size=next(iter(_values(marks, "size")), DEFAULT_THING.size),
        motion=max(_values(marks, "motion"), key=_motion_rank, default=DEFAULT_THING.motion),
    )


def _motion_rank(motion: int) -> int:
    return {"still": 0, "bounce": 2, "orbit": 2}.get(MOTIONS[motion], 1)


def _values(marks: list[_Mark], kind: str) -> list[int]:
    return [mark.value for mark in marks if mark.kind == kind]


_ARTICLE = "<a>"
"""Stands for "a" or "an" until the next word is known."""
_Units = list[str]
"""Phrases and punctuation in order; other words may come between two of them, but not within one."""


def plainer(scene: Scene, generator: torch.Generator) -> Scene:
    """The scene with every second of its attributes, and its second object, as where a prompt says nothing."""
    rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
    things = tuple(
        Thing(*(rng.choice(pair) for pair in zip(thing, DEFAULT_THING, strict=True))) for thing in scene.things
    )
    is_silent = rng.random() < 0.5
    return Scene(
        things[: rng.choice((1, NUM_OBJECTS))],
        rng.choice((scene.background, DEFAULT_BACKGROUND)),
        0 if is_silent else scene.pitch,
        0 if is_silent else scene.rhythm,
    )


def describe(scene: Scene, generator: torch.Generator) -> str:
    """A random prompt that `understand` takes for `scene`."""
    rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
    units = _tags(scene, rng) if rng.random() < 0.15 else _sentences(scene, rng)
    return _written(_with_fillers(units, rng), rng)


def _sentences(scene: Scene, rng: random.Random) -> _Units:
    """One to three sentences with articles and verbs."""
    first, *others = scene.things
    says_background = scene.background != DEFAULT_BACKGROUND or rng.random() < 0.5
    says_sound = scene.pitch != 0 or rng.random() < 0.4
    background_at = rng.choice(("first", "middle", "last", "last", "sentence")) if says_background else ""
    sound_at = rng.choice(("first", "middle", "last", "last", "sentence")) if says_sound else ""
    opening: list[_Units] = []
    middle: list[_Units] = []
    closing: list[_Units] = []
    if background_at == "first":
        opening.append([_place(scene, rng), ","] if rng.random() < 0.8 else [_background_noun(scene, rng), ":"])
    if sound_at == "first":
        opening.append([*_sound_aside(scene, rng), ","])
    if background_at == "middle":
        middle.append([_place(scene, rng)])
    if sound_at == "middle":
        middle.append(_sound_after(scene, rng))
    if background_at == "last":
        closing.append([*rng.choice(((), (), (",",))), _place(scene, rng)])
    if sound_at == "last":
        closing.append(_sound_after(scene, rng))
    for parts in opening, middle, closing:
        rng.shuffle(parts)
    sentences = []
    if background_at == "sentence":
        before = rng.choice((("the background is",), ("background", ":"), ("it is",), ()))
        sentences.append([*before, _background_noun(scene, rng)])
    if sound_at == "sentence":
        sentences.append(_sound_sentence(scene, rng))
    units = _flat(opening)
    if others:
        units += [rng.choice(_PAIR_OPENINGS), ":"] if rng.random() < 0.05 else []
        units += [*_object(first, rng), *_flat(middle)]
        units += rng.choice((("and",), (",", "and"), ("while",), ("beside",), ("above",), ("with",), (",",), ("near",)))
        units += [*_object(others[0], rng), *_flat(closing)]
    elif rng.random() < 0.75:
        units += [*_object(first, rng), *_flat(middle + closing)]
    else:
        units += _object_in_two_sentences(first, _flat(middle + closing), rng)
    rng.shuffle(sentences)
    for sentence in sentences:
        units = [*sentence, ".", *units] if rng.random() < 0.3 else [*units, ".", *sentence]
    return units


def _flat(parts: list[_Units]) -> _Units:
    return list(chain.from_iterable(parts))


def _tags(scene: Scene, rng: random.Random) -> _Units:
    """Keywords between commas."""
    tags: list[_Units] = []
    if len(scene.things) == 1 and rng.random() < 0.5:
        thing = scene.things[0]
        tags += [[word] for word in _adjectives(thing, rng)]
        if thing.shape != DEFAULT_THING.shape or rng.random() < 0.8:
            tags.append([_noun(thing, rng)])
        tags.append(_motion(thing, rng, form=1))
        rng.shuffle(tags)
    else:
        for thing in scene.things:
            words = _adjectives(thing, rng)
            tags.append([*words, _noun(thing, rng, is_bare=not words), *_motion(thing, rng, form=1)])
    globals_ = []
    if scene.background != DEFAULT_BACKGROUND or rng.random() < 0.5:
        globals_.append([rng.choice((_place, _background_noun))(scene, rng)])
    if scene.pitch or rng.random() < 0.4:
        globals_.append(_tone(scene, rng, article=()) if scene.pitch else [rng.choice(_SILENCE_WORDS)])
    for tag in globals_:
        tags.insert(rng.choice((0, len(tags), len(tags))), tag)
    units: _Units = []
    for tag in tags:
        units += [*tag, ","] if tag else []
    return units[:-1]


def _object(thing: Thing, rng: random.Random) -> _Units:
    """A noun with what is said of it before and behind it."""
    said = _adjectives(thing, rng)
    num_before = len(said) if rng.random() < 0.75 else rng.randrange(len(said) + 1)
    before, behind = said[:num_before], said[num_before:]
    adjectives = _MOTION_WORDS[MOTIONS[thing.motion]].adjectives
    moves_before = bool(adjectives) and rng.random() < 0.15
    if moves_before:
        before.insert(rng.randrange(len(before) + 1), rng.choice(adjectives))
    units = [rng.choice((_ARTICLE, _ARTICLE, _ARTICLE, "the", "one")), *_joined(before, rng), _noun(thing, rng)]
    if behind:
        if len(behind) == 1 and behind[0].split()[-1] in _COLOUR_WORDS[COLOURS[thing.colour]] and rng.random() < 0.5:
            units += ["in", behind[0]]
        elif rng.random() < 0.5:
            units += [rng.choice(("that is", "which is")), *_and(behind)]
        else:
            units += [",", *_and(behind), ","]
    if not moves_before:
        form = rng.randrange(3)
        motion = _motion(thing, rng, form=min(form, 1))
        if form == 0 and motion:
            units += ["and"] if behind else rng.choice(((), (), ("that",), ("which",)))
        units += motion
    return units


def _object_in_two_sentences(thing: Thing, rest: _Units, rng: random.Random) -> _Units:
    """A noun, and a second sentence about it."""
    said = _adjectives(thing, rng)
    num_before = rng.randrange(len(said) + 1)
    motion = _motion(thing, rng, form=0)
    units = [_ARTICLE, *_joined(said[:num_before], rng), _noun(thing, rng)]
    about = ["is", *_and(said[num_before:])] if num_before < len(said) else []
    if rng.random() < 0.5 and about:
        return [*units, *motion, *rest, ".", "it", *about]
    second = [*about, *(("and",) if about and motion else ()), *motion]
    return [*units, *rest, *((".", "it", *second) if second else ())]


def _adjectives(thing: Thing, rng: random.Random) -> _Units:
    """Size and colour in any order; what goes without saying may go unsaid."""
    said = []
    if thing.size != DEFAULT_THING.size or rng.random() < 0.4:
        said.append(rng.choice(_SIZE_WORDS[SIZES[thing.size]]))
    if thing.colour != DEFAULT_THING.colour or rng.random() < 0.7:
        shade = f"{rng.choice(_SHADES)} " if rng.random() < 0.1 else ""
        said.append(shade + rng.choice(_COLOUR_WORDS[COLOURS[thing.colour]]))
    if rng.random() < 0.2:
        said.reverse()
    return said


def _joined(words: _Units, rng: random.Random) -> _Units:
    """Adjectives side by side, or with a comma or an "and" between the first two."""
    joint = rng.choice(((), (), (), (",",), ("and",)))
    return [*words[:1], *(joint if len(words) > 1 else ()), *words[1:]]


def _and(words: _Units) -> _Units:
    return words if len(words) < 2 else [*words[:-1], "and", words[-1]]


def _noun(thing: Thing, rng: random.Random, *, is_bare: bool = False) -> str:
    if thing.shape == DEFAULT_THING.shape and rng.random() < 0.15 and not is_bare:
        return rng.choice(_ANY_SHAPE_WORDS)
    noun = rng.choice(_SHAPE_WORDS[SHAPES[thing.shape]])
    behind = rng.choice((" shape", "-shaped object", " object", "-shaped thing")) if rng.random() < 0.05 else ""
    return noun + behind


def _motion(thing: Thing, rng: random.Random, *, form: int) -> _Units:
    """What the thing does; form 0 is finite, 1 the participle. Rest may go unsaid."""
    name = MOTIONS[thing.motion]
    if name == "still" and rng.random() < 0.4:
        return []
    words = _MOTION_WORDS[name]
    if words.ways and rng.random() < (0.2 if name in ("bounce", "orbit") else 0.7 if words.verbs else 1.0):
        return [rng.choice(_GOES)[form], rng.choice(words.ways)]
    return [rng.choice(words.verbs)[form] + (" high" if rng.random() < 0.03 else "")]


def _place(scene: Scene, rng: random.Random) -> str:
    return rng.choice(_BACKGROUND_WORDS[BACKGROUNDS[scene.background]].places)


def _background_noun(scene: Scene, rng: random.Random) -> str:
    return rng.choice(_BACKGROUND_WORDS[BACKGROUNDS[scene.background]].nouns)


def _pitch_word(scene: Scene, rng: random.Random) -> _Units:
    words = _PITCH_WORDS[PITCHES[scene.pitch]]
    adjectives = [word for word in words.words if "pitch" not in word.split()]
    if PITCHES[scene.pitch] == "middle" and rng.random() < 0.4:
        return []
    return [rng.choice((*words.beside_tone, *words.beside_tone, *adjectives))]


def _tone(scene: Scene, rng: random.Random, article: tuple[str, ...] = (_ARTICLE,)) -> _Units:
    """ "a low hum"."""
    return [*article, *_pitch_word(scene, rng), rng.choice(_RHYTHM_WORDS[RHYTHMS[scene.rhythm]].nouns)]


def _sounding(scene: Scene, rng: random.Random, *, form: int) -> _Units:
    """ "humming low"; form as in `_motion`."""
    verb = rng.choice(_RHYTHM_WORDS[RHYTHMS[scene.rhythm]].verbs)[form]
    pitch = _PITCH_WORDS[PITCHES[scene.pitch]]
    if rng.random() < 0.5:
        return [verb, "at", _ARTICLE, rng.choice([word for word in pitch.words if "pitch" in word.split()])]
    if PITCHES[scene.pitch] == "middle":
        return [verb]
    return [verb, rng.choice(pitch.beside_tone)]


def _sound_aside(scene: Scene, rng: random.Random) -> _Units:
    """The sound as words that fit anywhere."""
    if not scene.pitch:
        return [rng.choice(("in silence", "silently", "without a sound", "with no sound"))]
    return [*rng.choice((("with",), ("to",), ("with the sound of",))), *_tone(scene, rng)]


def _sound_after(scene: Scene, rng: random.Random) -> _Units:
    """The sound behind an object or at the end."""
    if not scene.pitch or rng.random() < 0.5:
        return _sound_aside(scene, rng)
    if rng.random() < 0.6:
        return [",", *_sounding(scene, rng, form=1), ","]
    return ["and", *_sounding(scene, rng, form=0)]


def _sound_sentence(scene: Scene, rng: random.Random) -> _Units:
    if not scene.pitch:
        return [rng.choice(("silence", "no sound", "there is no sound", "all is silent"))]
    if rng.random() < 0.25:
        return ["it", *_sounding(scene, rng, form=0)]
    before, behind = rng.choice((((), ("is heard",)), (("sound", ":"), ()), (("we hear",), ()), ((), ())))
    return [*before, *_tone(scene, rng), *behind]


def _with_fillers(units: _Units, rng: random.Random) -> _Units:
    """The phrases with words between them that mean nothing, in about half of all prompts."""
    if not units:
        units = [rng.choice(_FILLERS) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.1:
        units = [rng.choice(_OPENINGS), *units]
    if rng.random() < 0.1:
        units = [*units, rng.choice(_ENDINGS)]
    if rng.random() < 0.5:
        return units
    rate = rng.choice((0.05, 0.1, 0.2))
    filled: _Units = []
    for unit in units:
        while rng.random() < rate:
            filled.append(rng.choice(_FILLERS) if rng.random() < 0.6 else _made_up(rng))
        filled.append(unit)
    return filled


def _made_up(rng: random.Random) -> str:
    """A word that no phrase has, or a number."""
    if rng.random() < 0.1:
        return str(rng.randrange(3000))
    while True:
        letters = [
            rng.choice("bcdfghjklmnprstvwz") + rng.choice(("", "", "l", "r")) + rng.choice("aeiouy")
            for _ in range(rng.randint(1, 3))
        ]
        word = "".join(letters) + rng.choice(("", "n", "r", "s", "k", "m"))
        if word not in VOCABULARY:
            return word


def _written(units: _Units, rng: random.Random) -> str:
    """The phrases as text, with "a" or "an", spaces, capital letters and an end."""
    text = ""
    for i, unit in enumerate(units):
        if unit == _ARTICLE:
            unit = "an" if units[i + 1][0] in "aeiou" else "a"
        if unit[0] in ",.:":
            text = text.rstrip(",.: ") + unit
        else:
            text += " " + unit
    text = re.sub(r"^[,.: ]+|[,.: ]+$", "", text) + rng.choice((".", ".", ".", "", "!"))
    if rng.random() < 0.15:
        return text
    return re.sub(r"(^|[.!] )(\w)", lambda found: found[1] + found[2].upper(), text)
