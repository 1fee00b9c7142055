from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.geometry import chunk_table
from h3stream.request import ClipSpec
from services.dit.noise import ClipNoise, NoiseSegment, dense_noise
from services.dit.rows import ChunkLatents, audio_rows

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


def draws(noise: ClipNoise, clip: ClipSpec) -> list[list[ChunkLatents]]:
    """All draws of each chunk, drawn in the order in which a rollout draws them."""
    return [
        [noise.initial(chunk), *(noise.step(chunk) for _ in range(clip.steps)), noise.context(chunk)]
        for chunk in chunk_table(clip.num_frames)
    ]


@given(
    first_chunks=st.sets(st.integers(1, 4), max_size=4),
    seeds=st.lists(st.sampled_from((7, 8, 2**40)), min_size=5, max_size=5),
)
@settings(max_examples=30)
def test_from_its_first_chunk_on_a_seed_draws_what_its_own_clip_would(first_chunks: set[int], seeds: list[int]) -> None:
    clip = ClipSpec(73, 64, 32, 2, 12.0, 3.0, 1, 1, "gpu", 7)
    segments = [NoiseSegment(*pair) for pair in zip((0, *sorted(first_chunks)), seeds, strict=False)]
    found = draws(ClipNoise(clip, CPU, segments), clip)
    for index, drawn in enumerate(found):
        seed = max((s for s in segments if s.first_chunk <= index), key=lambda s: s.first_chunk).seed
        expected = draws(ClipNoise(dataclasses.replace(clip, seed=seed), CPU), clip)[index]
        for ours, theirs in zip(drawn, expected, strict=True):
            assert torch.equal(ours.video, theirs.video)
            assert torch.equal(ours.audio, theirs.audio)


def test_a_clip_of_many_seeds_holds_no_more_noise_than_one_of_one(clip: ClipSpec) -> None:
    segments = [NoiseSegment(index, index) for index in range(5)]
    for noise in (ClipNoise(clip, CPU), ClipNoise(clip, CPU, segments)):
        for kept in (noise._initial, noise._context):
            assert kept.video.untyped_storage().nbytes() == 4 * 24 * 22 * 2 * 4
            assert kept.audio.untyped_storage().nbytes() == 4 * 32 * 2 * 122
