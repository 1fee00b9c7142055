from __future__ import annotations

import math

import pytest
import torch

from core.refine import FROZEN, refine_sigmas
from core.schedule import float32, timestep
from h3stream.errors import InvalidRequestError
from services.dit.adapters import AdapterBank
from services.dit.dense import DenseSampler, DenseSession
from services.dit.model import H3Dit
from services.dit.refine.masks import MaskedStreams, Masks, audio_range_mask, renoised, uniform_video_mask
from services.dit.rows import ChunkLatents
from tests import refine_vectors
from tests.refine_vectors import CLIP, CPU

SIZE = (7, 4, 4)
SIGMAS = refine_sigmas(4, 0.5, 12.0, 3.0)


def streams(masks: Masks) -> MaskedStreams:
    return MaskedStreams(masks, refine_vectors.latents(), refine_vectors.noise())


def noisy() -> ChunkLatents:
    """A clip that is nowhere what it was."""
    draw = torch.Generator().manual_seed(9)
    return ChunkLatents(torch.randn(1, 24, *SIZE, generator=draw), torch.randn(1, 32, 2, 37, generator=draw))


def test_a_mask_of_one_everywhere_is_no_mask() -> None:
    masks = Masks(video=torch.ones(SIZE), audio=torch.full((2, 37), 0.999))
    assert masks.video is None
    assert masks.audio is None
    free, latents = streams(masks), noisy()
    fed, labels = free.feed(latents), free.labels((0.8, 0.5))
    assert fed.video is latents.video
    assert fed.audio is latents.audio
    assert labels.timesteps == (timestep(0.8), timestep(0.5))
    assert labels.video.which is labels.audio.which is None


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_a_mask_lies_between_0_and_1(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"the mask of the audio lies between .* it must lie between 0 and 1"):
        Masks(audio=torch.tensor([[1.0, value]]))


def test_masks_and_latents_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"the mask of the video has shape \[7, 2, 2\].* have \[7, 4, 4\]"):
        streams(Masks(video=torch.zeros(7, 2, 2)))
    with pytest.raises(InvalidRequestError, match=r"the mask of the audio has shape \[37\].* have \[2, 37\]"):
        streams(Masks(audio=torch.zeros(37)))
    latents, noise = refine_vectors.latents(), refine_vectors.noise()
    for wrong, message in (
        (ChunkLatents(latents.video[0], latents.audio), r"video have shape \[24, 7, 4, 4\]; they must have 5 axes"),
        (ChunkLatents(latents.video, latents.audio[0]), r"audio have shape \[32, 2, 37\]; they must have 4 axes"),
        (ChunkLatents(latents.video.repeat(2, 1, 1, 1, 1), latents.audio), "the first of length 1"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            MaskedStreams(Masks(), wrong, noise)


def test_what_a_cache_of_frozen_rows_could_serve() -> None:
    frozen = uniform_video_mask(0.0, SIZE)
    some = frozen.clone()
    some[3, 1, 1] = 0.3
    audio = torch.zeros(2, 37)
    assert Masks(video=frozen).closed_reason == ""
    assert Masks(video=uniform_video_mask(0.0009, SIZE)).closed_reason == ""
    assert Masks(video=uniform_video_mask(FROZEN, SIZE)).closed_reason == "the video may move: its mask reaches 0.001"
    assert Masks(video=frozen, audio=audio_range_mask(22, 0.2, 0.4)).closed_reason == ""
    assert Masks(video=frozen, audio=audio).closed_reason == "the sound is frozen too"
    assert Masks().closed_reason == "the whole video may move"
    assert Masks(video=some).closed_reason == "the video may move: its mask reaches 0.3"


def test_a_frozen_video_is_fed_with_a_thousandth_of_its_noise_at_the_timestep_of_keyframes() -> None:
    video, noise = refine_vectors.latents().video, refine_vectors.noise().video
    for mask in (0.0, 0.0009):  # the latter counts as 0
        frozen = streams(Masks(video=uniform_video_mask(mask, SIZE)))
        fed = frozen.feed(noisy()).video
        assert torch.equal(fed, 0.001 * noise + 0.999 * video)
        assert frozen.feed(refine_vectors.latents()).video is fed
        assert not frozen.moves_video
        for sigma, _ in SIGMAS[:-1]:
            labels = frozen.labels((sigma, 0.5))
            assert labels.video.values == (float32(0.999),)
            assert labels.text == timestep(sigma)
        assert frozen.labels((0.0005, 0.5)).video.values == (timestep(0.0005),)
    clean = streams(Masks(video=uniform_video_mask(0.0, SIZE), injection="clean"))
    assert clean.feed(noisy()).video is video


def test_keyframes_lie_at_their_own_timestep_or_the_texts() -> None:
    free = streams(Masks())
    assert free.labels((0.8, 0.5)).cond is None
    assert free.labels((0.8, 0.5), with_keyframes=True).cond == float32(0.999)
    assert free.labels((0.0005, 0.5), with_keyframes=True).cond == timestep(0.0005)


def test_a_row_is_as_free_as_its_freest_cell_rounded_up_to_a_256th() -> None:
    mask = torch.zeros(SIZE)
    mask[2, 1, 2] = 0.3  # row 2 * 4 + 0 * 2 + 1
    mask[6, 3, 3] = 1.0  # the last row
    masked, latents, sigma = streams(Masks(video=mask)), noisy(), 0.8
    labels = masked.labels((sigma, 0.5)).video
    assert labels.which is not None
    timesteps = torch.tensor(labels.values)[labels.which]
    expected = torch.full((28,), 0.999)
    expected[9], expected[27] = 1 - 77 / 256 * sigma, 1 - sigma
    assert (timesteps - expected).abs().max() <= 1e-7
    fed, injected = (
        masked.feed(latents).video,
        0.001 * refine_vectors.noise().video + 0.999 * refine_vectors.latents().video,
    )
    assert torch.equal(fed[:, :, :2], injected[:, :, :2])
    cells = fed[0, :, 2, :2, 2:]  # all four cells of the row share its level
    assert torch.allclose(cells, 77 / 256 * latents.video[0, :, 2, :2, 2:] + 179 / 256 * injected[0, :, 2, :2, 2:])


def test_an_answer_is_scaled_as_its_row_was_told_and_kept_from_what_is_frozen() -> None:
    mask = torch.zeros(SIZE)
    mask[2, 1, 2] = 0.3
    masked, clean = streams(Masks(video=mask)), refine_vectors.latents().video
    fed, velocity = masked.feed(noisy()).video, torch.full_like(clean, 2.0)
    x0 = masked.denoised_video(fed, velocity, 0.8)
    expected = clean.clone()
    estimate = fed[0, :, 2, 1, 2] + 77 / 256 * 0.8 * 2.0
    expected[0, :, 2, 1, 2] = 0.3 * estimate + 0.7 * clean[0, :, 2, 1, 2]
    assert torch.allclose(x0, expected, atol=1e-6)
    untouched = mask == 0
    assert torch.equal(x0[0, :, untouched], clean[0, :, untouched])


def test_frozen_sound_is_fed_as_it_is_at_timestep_1() -> None:
    mask = torch.ones(2, 37)
    mask[0, 5] = 0.0
    mask[1, 6] = 0.5
    masked = streams(Masks(audio=mask))
    latents, audio = noisy(), refine_vectors.latents().audio
    fed, labels = masked.feed(latents).audio, masked.labels((0.8, 0.4)).audio
    assert labels.which is not None
    timesteps = torch.tensor(labels.values)[labels.which]
    assert timesteps[5] == 1.0
    assert timesteps[37 + 6].item() == pytest.approx(0.8)
    assert timesteps[0].item() == pytest.approx(0.6)
    assert torch.equal(fed[..., 0, 5], audio[..., 0, 5])
    assert torch.equal(fed[..., 0, 4], latents.audio[..., 0, 4])
    assert torch.allclose(fed[..., 1, 6], (latents.audio[..., 1, 6] + audio[..., 1, 6]) / 2)


@pytest.mark.parametrize(
    ("start_s", "end_s", "latents"),
    [
        (3.0, 5.0, range(120, 200)),
        (0.7, 1.1, range(28, 44)),  # in floats 0.7 * 40 is 28 and 1.1 * 40 is 44.00000000000001
        (0.01, 0.02, range(1)),  # within one latent of 25 ms
        (0.02, 0.03, range(2)),  # on both sides of a border
        (2.3, 2.300000001, range(92, 93)),  # ever so short
        (0.024, 5.1667, range(207)),
    ],
)
def test_a_range_frees_every_latent_that_it_touches(start_s: float, end_s: float, latents: range) -> None:
    mask = audio_range_mask(124, start_s, end_s)
    assert mask.shape == (2, 207)
    expected = torch.zeros(2, 207)
    expected[:, latents.start : latents.stop] = 1
    assert torch.equal(mask, expected)


def test_a_range_over_the_whole_clip_is_no_mask() -> None:
    assert Masks(audio=audio_range_mask(22, 0.0, 0.917)).audio is None


def dense_sampler(**values: object) -> DenseSampler:
    transformer = refine_vectors.transformer()
    arguments = (H3Dit(transformer), AdapterBank(transformer, {}), (), CLIP, *refine_vectors.text(), CPU)
    return DenseSampler(*arguments, **values)  # type: ignore[arg-type]


def test_any_dense_pass_takes_masks_a_start_and_a_schedule() -> None:
    """A mask-only pass over a finished clip is the refinement's exact pass."""
    name = "exact.s4_d0.5"
    sampler = dense_sampler(
        start=refine_vectors.latents(),
        sigmas=SIGMAS,
        noise=refine_vectors.noise(),
        masks=refine_vectors.masks(name),
    )
    session = DenseSession(sampler)
    steps: list[int] = []
    session.sample(steps.append, lambda: False)
    assert steps == [1, 2, 3, 4]
    sound = torch.cat([session.chunk(index).audio for index in (0, 1)], -1)
    video = torch.cat([session.chunk(index).video for index in (0, 1)], 2)
    assert refine_vectors.relative_l2(sound, refine_vectors.recorded(name)[3]) <= 1e-5
    assert torch.equal(video, refine_vectors.latents().video)


def test_a_dense_pass_with_a_partial_mask_moves_what_it_may() -> None:
    name = "exact_video_cells.s4_d0.5"
    sampler = dense_sampler(
        start=refine_vectors.latents(), sigmas=SIGMAS, noise=refine_vectors.noise(), masks=refine_vectors.masks(name)
    )
    for _ in range(sampler.num_steps):
        sampler.step()
    expected = refine_vectors.tensors("passes_exact")[f"{name}.video"]
    assert refine_vectors.relative_l2(sampler.latents.video, expected) <= 1e-5
    assert refine_vectors.relative_l2(sampler.latents.audio, refine_vectors.recorded(name)[3]) <= 1e-5


def test_a_dense_pass_leaves_what_it_was_given_alone() -> None:
    noise, latents = refine_vectors.noise(), refine_vectors.latents()
    kept = [tensor.clone() for tensor in (noise.video, noise.audio, latents.video, latents.audio)]
    for start in (None, latents):
        sampler = dense_sampler(noise=noise, start=start)
        for _ in range(3):
            sampler.step()
    for tensor, before in zip((noise.video, noise.audio, latents.video, latents.audio), kept, strict=True):
        assert torch.equal(tensor, before)


def test_renoising_keeps_a_share_of_the_clean_latents() -> None:
    one, noise = torch.full((4,), 2.0), torch.full((4,), 6.0)
    assert renoised(one, noise, 0.25).tolist() == [3.0] * 4
