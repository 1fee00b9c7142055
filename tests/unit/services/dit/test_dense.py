from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from core.geometry import chunk_table
from core.schedule import dense_sigmas
from h3stream.errors import InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec
from services.common.verbs import VerbCancelled
from services.dit.adapters import AdapterBank, AdapterMix
from services.dit.dense import DenseSampler, DenseSession, euler_step
from services.dit.model import H3Dit
from services.dit.rollout import Rollout
from services.dit.rows import ChunkLatents
from services.dit.weights import load_transformer
from tests.raven_vectors import raven_adapter

CPU = torch.device("cpu")
RAVEN: AdapterMix = (("raven", 1.0),)


@pytest.fixture(scope="module")
def parts(model_directory: Path) -> tuple[H3Dit, AdapterBank]:
    transformer = load_transformer(model_directory / "transformer", "bfloat16")
    return H3Dit(transformer), AdapterBank(transformer, {"raven": raven_adapter(transformer)})


@pytest.fixture
def open_session(
    parts: tuple[H3Dit, AdapterBank], context: torch.Tensor, token_tags: torch.Tensor
) -> Callable[..., DenseSession]:
    def make(clip: ClipSpec, mix: AdapterMix = RAVEN) -> DenseSession:
        return DenseSession(DenseSampler(*parts, mix, clip, context, token_tags, CPU))

    return make


def never() -> bool:
    return False


def ignore(step: int) -> None:
    pass


def sampled(session: DenseSession) -> ChunkLatents:
    """The whole clip, put together from its chunks."""
    session.sample(ignore, never)
    chunks = [session.chunk(chunk.index) for chunk in chunk_table(session.clip.num_frames)]
    return ChunkLatents(torch.cat([c.video for c in chunks], 2), torch.cat([c.audio for c in chunks], 3))


def equal(one: ChunkLatents, other: ChunkLatents) -> bool:
    return torch.equal(one.video, other.video) and torch.equal(one.audio, other.audio)


def test_a_clip_comes_in_chunks_any_of_them_as_often_as_asked(open_session: Any, dense_clip: ClipSpec) -> None:
    session = open_session(dense_clip)
    clip = sampled(session)
    assert clip.video.shape == (1, 24, 22, 2, 4)
    assert clip.audio.shape == (1, 32, 2, 122)
    assert clip.video.dtype == clip.audio.dtype == torch.float32
    tail = session.chunk(4)
    assert torch.equal(tail.video, clip.video[:, :, 20:])
    assert torch.equal(tail.audio, clip.audio[..., 114:])
    assert equal(session.chunk(0), session.chunk(0))


def test_every_forward_is_reported_and_none_is_repeated(open_session: Any, dense_clip: ClipSpec) -> None:
    session = open_session(dense_clip)
    steps: list[int] = []
    session.sample(steps.append, never)
    session.sample(steps.append, never)
    assert steps == [1, 2, 3]
    assert session.num_noise_forwards == 3


def test_there_are_no_chunks_before_the_clip_is_sampled(open_session: Any, dense_clip: ClipSpec) -> None:
    session = open_session(dense_clip)
    with pytest.raises(UnsupportedError, match="chunk 0 is not there yet: sample the dense clip first"):
        session.chunk(0)
    session.sample(ignore, never)
    for index in (-1, 5):
        with pytest.raises(InvalidRequestError, match=f"chunk {index} does not exist; the clip has chunks 0 to 4"):
            session.chunk(index)


def test_seed_shift_steps_and_adapters_decide_the_clip(open_session: Any, dense_clip: ClipSpec) -> None:
    clip = sampled(open_session(dense_clip))
    assert equal(sampled(open_session(dense_clip)), clip)
    for change in ({"seed": 8}, {"steps": 2}, {"video_shift": 6.0}, {"audio_shift": 4.0}):
        assert not equal(sampled(open_session(dataclasses.replace(dense_clip, **change))), clip)
    mixes: tuple[AdapterMix, ...] = ((), (("raven", 0.5),))
    plain, half = (sampled(open_session(dense_clip, mix)) for mix in mixes)
    assert not equal(plain, clip)
    assert not equal(half, clip)
    assert not equal(half, plain)


def test_every_chunk_sees_all_others_and_the_text(
    open_session: Any, dense_clip: ClipSpec, parts: Any, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    """One forward with other noise in the last chunk alone, and with another last token: every chunk moves."""
    one_step = dataclasses.replace(dense_clip, steps=1)
    base = sampled(open_session(one_step))
    disturbed = DenseSampler(*parts, RAVEN, one_step, context, token_tags, CPU)
    disturbed.latents.video[:, :, 20:].neg_()
    longer = context.clone()
    longer[-1].neg_()
    for sampler in (disturbed, DenseSampler(*parts, RAVEN, one_step, longer, token_tags, CPU)):
        other = sampled(DenseSession(sampler))
        for chunk in chunk_table(one_step.num_frames):
            assert not torch.equal(other.of(chunk).video, base.of(chunk).video)
            assert not torch.equal(other.of(chunk).audio, base.of(chunk).audio)


def test_a_clip_is_the_same_whatever_was_sampled_before_it(
    open_session: Any, dense_clip: ClipSpec, clip: ClipSpec, parts: Any, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    session = open_session(dense_clip)
    rollout = Rollout(*parts, RAVEN, clip, len(context), CPU)
    rollout.prefill(context, token_tags)
    rollout.sample(0, ignore, never)
    sampled(open_session(dataclasses.replace(dense_clip, seed=9), ()))
    rollout.commit(0)
    interleaved = sampled(session)
    assert equal(interleaved, sampled(open_session(dense_clip)))

    fresh = Rollout(*parts, RAVEN, clip, len(context), CPU)
    fresh.prefill(context, token_tags)
    fresh.sample(0, ignore, never)
    fresh.commit(0)
    assert equal(rollout.sample(1, ignore, never), fresh.sample(1, ignore, never))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(
    open_session: Any, dense_clip: ClipSpec, threads: Callable[[int], None]
) -> None:
    # In bfloat16; in float32 the matrix kernels sum in another order, and clips differ by 2e-6.
    clip = dataclasses.replace(dense_clip, num_frames=22, steps=1)
    one = sampled(open_session(clip))
    threads(2)
    assert equal(sampled(open_session(clip)), one)


@pytest.mark.parametrize("polls", range(4))
def test_a_cancelled_clip_stops_within_one_forward_and_goes_on_where_it_stopped(
    open_session: Any, dense_clip: ClipSpec, polls: int
) -> None:
    expected = sampled(open_session(dense_clip))
    session = open_session(dense_clip)
    answers = iter([False] * polls + [True])
    steps: list[int] = []
    with pytest.raises(VerbCancelled):
        session.sample(steps.append, lambda: next(answers))
    assert session.num_noise_forwards == polls
    assert session.is_sampled == (polls == 3)
    session.sample(steps.append, never)
    assert steps == [1, 2, 3]
    assert equal(sampled(session), expected)


@pytest.mark.parametrize("module", ["transformer_blocks.2.norm2", "audio_proj_out"])
def test_a_forward_that_fails_changes_nothing(
    open_session: Any, dense_clip: ClipSpec, parts: tuple[H3Dit, AdapterBank], module: str
) -> None:
    expected = sampled(open_session(dense_clip))
    session = open_session(dense_clip)
    calls = iter([False, True])

    def fail(*_: object) -> None:
        if next(calls):
            raise MemoryError

    hook = parts[0].transformer.get_submodule(module).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        session.sample(ignore, never)
    hook.remove()
    assert session.num_noise_forwards == 1
    assert equal(sampled(session), expected)


def test_text_and_modulation_are_computed_once_per_clip(
    open_session: Any, dense_clip: ClipSpec, parts: tuple[H3Dit, AdapterBank]
) -> None:
    transformer = parts[0].transformer
    calls: list[str] = []
    hooks = [
        transformer.get_submodule(name).register_forward_hook(lambda module, args, out, name=name: calls.append(name))
        for name in ("token_refiner.final_norm", "transformer_blocks.0.adaln_proj.linear")
    ]
    session = open_session(dense_clip)
    opened = sorted(calls)
    session.sample(ignore, never)
    for hook in hooks:
        hook.remove()
    assert opened == ["token_refiner.final_norm", *["transformer_blocks.0.adaln_proj.linear"] * 3]
    assert len(calls) == 4


@pytest.mark.parametrize("block_rows", [64, 100])
def test_the_feed_forward_in_blocks_of_rows_changes_no_bit(
    open_session: Any,
    dense_clip: ClipSpec,
    parts: tuple[H3Dit, AdapterBank],
    monkeypatch: pytest.MonkeyPatch,
    block_rows: int,
) -> None:
    whole = sampled(open_session(dense_clip))
    monkeypatch.setattr("services.dit.model.FFN_BLOCK_ROWS", block_rows)
    sizes: list[int] = []
    session = open_session(dense_clip)
    hook = (
        parts[0]
        .transformer.transformer_blocks[0]
        .ff.register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    )
    blocked = sampled(session)
    hook.remove()
    assert sum(sizes) == 3 * (5 + 2 * 122 + 22 * 2)
    assert max(sizes) == block_rows
    assert equal(blocked, whole)


def test_what_the_forwards_needed_is_free_once_the_clip_is_there(
    parts: tuple[H3Dit, AdapterBank], dense_clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    sampler = DenseSampler(*parts, RAVEN, dense_clip, context, token_tags, CPU)
    table = next(iter(sampler._modulation.values()))
    # On a CPU one of the two buffers is the result itself; after an odd number of steps it is not the first.
    held = [
        weakref.ref(tensor)
        for tensor in (sampler._text, sampler._layout.rotary[0], table.blocks[0].attn_gate, sampler.latents.video)
    ]
    del table
    session = DenseSession(sampler)
    del sampler
    session.sample(ignore, never)
    gc.collect()
    assert [reference() for reference in held] == [None] * 4


@pytest.mark.parametrize("shift", [12.0, 3.0, 0.3])
def test_steps_have_the_bits_of_diffusers_scheduler(shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(9)
    sigmas = dense_sigmas(8, shift)
    assert scheduler.sigmas.tolist() == list(sigmas)
    draw = torch.Generator().manual_seed(1)
    ours = theirs = torch.randn(3, 50, generator=draw)
    for i, t in enumerate(scheduler.timesteps):
        velocity = torch.randn(3, 50, generator=draw)
        theirs = scheduler.step(velocity, t, theirs, return_dict=False)[0]
        out = torch.empty_like(ours)
        euler_step(ours, velocity.clone(), sigmas[i], sigmas[i + 1], out=out)
        ours = out
        assert torch.equal(ours, theirs)
