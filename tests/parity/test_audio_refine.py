"""Every recorded pass of the audio refine vectors, step by step.

Tolerances, relative L2: exact steps 1e-5, as any right float32 implementation; passes with a cache 2e-4, since a value
that lies on the border of two stored ones may fall to either side. Whatever its distance, a pass must lie nearer its
own vector than every other one.
"""

import json

import pytest
import torch

from core.refine import refine_sigmas
from services.dit.model import H3Dit
from services.dit.refine.masks import renoised
from services.dit.rows import dense_position_ids, keyframe_position_ids
from tests import refine_vectors

EXACT, CACHED = 1e-5, 2e-4
NAMES = list(refine_vectors.passes())
FIRST_PASS = "cached.s4_d0.5.hidden.int4.text_kept"
"""Whose cache the warm pass starts with."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(refiner):
    """The sound after every step, and the reports."""
    sounds, reports = [], []
    while refiner.num_done < refiner.num_steps:
        reports.append(refiner.step())
        sounds.append(refiner.latents.audio)
    return sounds, reports


def warm_cache():
    cache = refine_vectors.frozen_cache(refine_vectors.spec_of(FIRST_PASS).cache)
    run(refine_vectors.refiner(FIRST_PASS, cache))
    return cache


def cache_of(name):
    if name.startswith("warm"):
        return warm_cache()
    spec = refine_vectors.spec_of(name).cache
    return refine_vectors.frozen_cache(spec) if spec.enabled else None


def comparable(name):
    """Passes of the same steps, whose recorded sound at the end can be confused with this one's."""
    steps = refine_vectors.passes()[name]["steps"]
    return [other for other in NAMES if refine_vectors.passes()[other]["steps"] == steps]


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_agrees_with_its_vectors_and_with_no_others(name, capsys):
    facts = refine_vectors.passes()[name]
    bound = CACHED if facts["contents"] else EXACT
    refiner = refine_vectors.refiner(name, cache_of(name))
    start = refine_vectors.tensors("passes_exact").get(f"{name}.start")
    if start is not None:
        assert refine_vectors.relative_l2(refiner.latents.audio, start) <= EXACT
    sounds, reports = run(refiner)
    assert [report.mode for report in reports] == facts["modes"]
    recorded = refine_vectors.recorded(name)
    assert recorded
    worst = max(refine_vectors.relative_l2(sounds[step], sound) for step, sound in recorded.items())
    with capsys.disabled():
        print(f"\n{name}: {worst:.1e}")
    assert worst <= bound
    last = facts["steps"] - 1
    others = {
        other: refine_vectors.relative_l2(sounds[last], refine_vectors.recorded(other)[last])
        for other in comparable(name)
    }
    assert min(others, key=lambda other: others[other]) == name
    video = refine_vectors.tensors("passes_exact").get(f"{name}.video")
    if video is None:
        assert refiner.latents.video is refine_vectors.tensors("inputs")["video"]
    else:
        assert refine_vectors.relative_l2(refiner.latents.video, video) <= bound


@pytest.mark.parametrize(
    "name", sorted({key.partition(".velocity")[0] for key in refine_vectors.tensors("velocities")})
)
def test_the_velocities_of_a_pass_are_the_recorded_ones(name):
    cache = cache_of(name)
    bound = CACHED if cache else EXACT
    refiner = refine_vectors.refiner(name, cache)
    sigmas = refine_vectors.passes()[name]["sigmas_audio"]
    for step in range(refiner.num_steps):
        before = refiner.latents.audio.double()
        refiner.step()
        velocity = (refiner.latents.audio.double() - before) / (sigmas[step + 1] - sigmas[step])
        expected = refine_vectors.tensors("velocities")[f"{name}.velocity.{step}"]
        assert refine_vectors.relative_l2(velocity, expected) <= bound


@pytest.mark.parametrize("name", ["plain", "keyframe"])
def test_rows_lie_where_the_vectors_have_them(name):
    layout = json.loads((refine_vectors.FIXTURES / "layout.json").read_text())[name]
    expected = refine_vectors.tensors("layout")[f"{name}.positions"]
    frames = refine_vectors.keyframes().frames if name == "keyframe" else ()
    model = H3Dit(refine_vectors.transformer())
    ours = model.dense_layout(22, refine_vectors.text()[1], 4, 4, frames)
    theirs = model._rotary(expected)
    positions = dense_position_ids(22, 9, 4, 4)
    cond = [keyframe_position_ids(frame, 9, 4, 4) for frame in frames]
    assert (torch.cat((positions[:9], *cond, positions[9:])) - expected).abs().max() <= 1e-9
    assert ours.num_rows == layout["rows"]
    assert [0, ours.num_text_rows] == layout["spans"]["text"]
    assert [ours.num_text_rows, ours.audio_start] == layout["spans"]["cond"]
    assert [ours.audio_start, ours.audio_start + ours.num_audio_rows] == layout["spans"]["audio"]
    assert [ours.num_rows - ours.num_video_rows, ours.num_rows] == layout["spans"]["video"]
    assert torch.equal(ours.rotary[0], theirs[0])
    assert torch.equal(ours.rotary[1], theirs[1])


def test_the_levels_are_those_of_the_vectors():
    for facts in refine_vectors.passes().values():
        sigmas = refine_sigmas(facts["steps"], facts["audio_denoise"], 12.0, 3.0)
        for stream, name in enumerate(("sigmas_video", "sigmas_audio")):
            ours = torch.tensor([pair[stream] for pair in sigmas], dtype=torch.float64)
            assert (ours - torch.tensor(facts[name], dtype=torch.float64)).abs().max() <= 1e-6


def test_a_cached_step_is_another_one_than_the_exact_step_once_the_sound_has_moved():
    cached, _ = run(refine_vectors.refiner(FIRST_PASS, cache_of(FIRST_PASS)))
    exact, _ = run(refine_vectors.refiner(FIRST_PASS))
    assert torch.equal(cached[0], exact[0])
    assert all(
        refine_vectors.relative_l2(ours, theirs) > 1e-3 for ours, theirs in zip(cached[1:], exact[1:], strict=True)
    )


def test_the_start_is_the_sound_put_back_to_its_own_level():
    audio, noise = refine_vectors.latents().audio, refine_vectors.noise().audio
    start = refine_vectors.refiner("exact.s4_d0.5").latents.audio
    assert torch.equal(start, renoised(audio, noise, refine_sigmas(4, 0.5, 12.0, 3.0)[0][1]))
