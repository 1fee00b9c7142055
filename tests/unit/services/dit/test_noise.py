from __future__ import annotations

import dataclasses

import torch

from core.geometry import chunk_table
from h3stream.request import ClipSpec
from services.dit.noise import ClipNoise, dense_noise
from services.dit.rows import audio_rows

CPU = torch.device("cpu")


def test_the_global_generator_is_neither_read_nor_written(clip: ClipSpec) -> None:
    chunk = chunk_table(clip.num_frames)[0]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = ClipNoise(clip, CPU).step(chunk)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(ClipNoise(clip, CPU).step(chunk).video, first.video)


def test_every_seed_of_a_request_is_accepted_and_torch_uses_its_low_32_bits(clip: ClipSpec) -> None:
    chunk = chunk_table(clip.num_frames)[0]
    seeds = (0, 1, 2**64 - 1, 2**63)
    noises = [ClipNoise(dataclasses.replace(clip, seed=seed), CPU).initial(chunk).video for seed in seeds]
    assert len({noise.sum().item() for noise in noises[:3]}) == 3
    assert torch.equal(noises[3], noises[0])


def test_draws_are_successive_and_whole_clip_draws_come_first(clip: ClipSpec) -> None:
    generator = torch.Generator().manual_seed(clip.seed)
    sizes = ((1, 24, 22, 2, 4), (1, 32, 2, 122))
    whole = [torch.randn(size, generator=generator) for size in (*sizes, *sizes)]
    chunks = chunk_table(clip.num_frames)
    noise = ClipNoise(clip, CPU)
    assert torch.equal(noise.initial(chunks[1]).video, whole[0][:, :, 5:10])
    assert torch.equal(noise.initial(chunks[1]).audio, whole[1][..., 29:57])
    assert torch.equal(noise.context(chunks[4]).video, whole[2][:, :, 20:22])
    assert torch.equal(noise.context(chunks[4]).audio, whole[3][..., 114:122])
    step = noise.step(chunks[4])
    assert torch.equal(step.video, torch.randn(1, 24, 2, 2, 4, generator=generator))
    assert torch.equal(step.audio, torch.randn(1, 32, 2, 8, generator=generator))


def test_a_restored_state_repeats_its_draws(clip: ClipSpec) -> None:
    chunk = chunk_table(clip.num_frames)[0]
    noise = ClipNoise(clip, CPU)
    state = noise.state(chunk)
    first = noise.step(chunk)
    assert not torch.equal(noise.step(chunk).audio, first.audio)
    noise.restore(chunk, state)
    assert torch.equal(noise.step(chunk).audio, first.audio)


def test_dense_noise_is_video_latents_and_then_audio_rows(clip: ClipSpec) -> None:
    generator = torch.Generator().manual_seed(clip.seed)
    before = torch.get_rng_state()
    noise = dense_noise(clip, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(noise.video, torch.randn(1, 24, 22, 2, 4, generator=generator))
    assert torch.equal(audio_rows(noise.audio), torch.randn(2 * 122, 32, generator=generator))
    assert noise.audio.shape == (1, 32, 2, 122)
