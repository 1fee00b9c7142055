from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from h3stream.errors import InvalidRequestError, UnsupportedError
from h3stream.request import KV_STORAGES, ClipSpec, KvStorage
from services.common.verbs import VerbCancelled
from services.dit.adapters import AdapterBank, AdapterMix
from services.dit.model import H3Dit
from services.dit.noise import NoiseSegment
from services.dit.rollout import Rollout
from services.dit.rows import ChunkLatents
from services.dit.weights import load_transformer
from tests.raven_vectors import raven_adapter

CPU = torch.device("cpu")
TAIL = 4
RAVEN: AdapterMix = (("raven", 1.0),)


@pytest.fixture(scope="module")
def parts(model_directory: Path) -> tuple[H3Dit, AdapterBank]:
    transformer = load_transformer(model_directory / "transformer", "bfloat16")
    return H3Dit(transformer), AdapterBank(transformer, {"raven": raven_adapter(transformer)})


@pytest.fixture
def open_rollout(
    parts: tuple[H3Dit, AdapterBank], context: torch.Tensor, token_tags: torch.Tensor
) -> Callable[..., Rollout]:
    def make(clip: ClipSpec, mix: AdapterMix = RAVEN) -> Rollout:
        rollout = Rollout(*parts, mix, clip, len(context), CPU)
        rollout.prefill(context, token_tags)
        return rollout

    return make


def never() -> bool:
    return False


def ignore(step: int) -> None:
    pass


def run(rollout: Rollout) -> list[ChunkLatents]:
    """All chunks of a clip."""
    latents = []
    for index in range(TAIL + 1):
        latents.append(rollout.sample(index, ignore, never))
        if index < TAIL:
            rollout.commit(index)
    return latents


def assert_same(ours: list[ChunkLatents], theirs: list[ChunkLatents]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.video, other.video)
        assert torch.equal(one.audio, other.audio)


def test_the_same_clip_twice_has_the_same_bits(open_rollout: Any, clip: ClipSpec) -> None:
    assert_same(run(open_rollout(clip)), run(open_rollout(clip)))


@pytest.mark.parametrize("window", [0, 1, 2, None])
@pytest.mark.parametrize("storage", KV_STORAGES[1:])
def test_every_storage_gives_the_same_bits(
    open_rollout: Any, clip: ClipSpec, storage: KvStorage, window: int | None
) -> None:
    clip = dataclasses.replace(clip, window=window)
    assert_same(run(open_rollout(dataclasses.replace(clip, kv_storage=storage))), run(open_rollout(clip)))


def test_seed_window_and_adapter_decide_the_clip(open_rollout: Any, clip: ClipSpec) -> None:
    base = run(open_rollout(clip))
    for other in (
        run(open_rollout(dataclasses.replace(clip, seed=8))),
        run(open_rollout(clip, mix=())),
    ):
        assert not torch.equal(other[0].video, base[0].video)
    wider = run(open_rollout(dataclasses.replace(clip, window=2)))
    assert_same(wider[:2], base[:2])  # the window drops its first chunk after two
    assert not torch.equal(wider[2].video, base[2].video)


def test_steps_are_reported_and_forwards_counted(open_rollout: Any, clip: ClipSpec) -> None:
    rollout = open_rollout(clip)
    steps: list[int] = []
    rollout.sample(0, steps.append, never)
    assert steps == [1, 2]
    assert (rollout.num_noise_forwards, rollout.num_clean_forwards) == (2, 0)
    rollout.commit(0)
    assert rollout.num_clean_forwards == 1


@pytest.mark.parametrize("polls", range(3))
def test_a_cancelled_chunk_stops_within_one_forward_and_can_be_sampled_again(
    open_rollout: Any, clip: ClipSpec, polls: int
) -> None:
    expected = run(open_rollout(clip))
    rollout = open_rollout(clip)
    answers = iter([False] * polls + [True])
    with pytest.raises(VerbCancelled):
        rollout.sample(0, ignore, lambda: next(answers))
    assert rollout.num_noise_forwards == polls
    assert rollout.sampled(0) is None
    assert_same(run(rollout), expected)


def test_a_forward_that_fails_stages_nothing_and_costs_no_draw(
    open_rollout: Any, clip: ClipSpec, parts: tuple[H3Dit, AdapterBank]
) -> None:
    expected = run(open_rollout(clip))
    rollout = open_rollout(clip)
    last_block = parts[0].transformer.transformer_blocks[-1]

    def fail(*_: object) -> None:
        raise MemoryError

    def failing(call: Callable[[], object]) -> None:
        hook = last_block.norm1.register_forward_pre_hook(fail)
        try:
            with pytest.raises(MemoryError):
                call()
        finally:
            hook.remove()

    failing(lambda: rollout.sample(0, ignore, never))
    rollout.sample(0, ignore, never)
    failing(lambda: rollout.commit(0))
    assert rollout.cache.num_committed == 1
    rollout.commit(0)
    assert_same([rollout.sample(1, ignore, never)], expected[1:2])


def test_chunks_come_in_order(open_rollout: Any, clip: ClipSpec) -> None:
    rollout = open_rollout(clip)
    with pytest.raises(UnsupportedError, match="chunk 1 cannot be sampled or restored now: the next one is chunk 0"):
        rollout.sample(1, ignore, never)
    with pytest.raises(UnsupportedError, match="chunk 0 cannot be committed"):
        rollout.commit(0)
    rollout.sample(0, ignore, never)
    rollout.commit(0)
    with pytest.raises(UnsupportedError, match="chunk 0 cannot be committed"):
        rollout.commit(0)
    with pytest.raises(UnsupportedError, match="the next one is chunk 1"):
        rollout.sample(0, ignore, never)
    with pytest.raises(UnsupportedError, match="chunk 1 cannot be committed"):
        rollout.commit(1)


@pytest.mark.parametrize("index", [-1, TAIL + 1])
def test_a_chunk_that_does_not_exist_is_refused(open_rollout: Any, clip: ClipSpec, index: int) -> None:
    rollout = open_rollout(clip)
    latents = rollout.sample(0, ignore, never)
    for call in (lambda: rollout.sample(index, ignore, never), lambda: rollout.restore(index, latents)):
        with pytest.raises(InvalidRequestError, match=f"chunk {index} does not exist; the clip has chunks 0 to 4"):
            call()


def resumed(rollout: Rollout, chunks: list[ChunkLatents]) -> list[ChunkLatents]:
    """The chunks behind those that are restored."""
    for index, latents in enumerate(chunks):
        rollout.restore(index, latents)
        rollout.commit(index)
    rest = []
    for index in range(len(chunks), TAIL + 1):
        rest.append(rollout.sample(index, ignore, never))
        if index < TAIL:
            rollout.commit(index)
    return rest


def test_restored_chunks_come_in_order_and_the_last_one_may_be_restored_again(
    open_rollout: Any, clip: ClipSpec
) -> None:
    expected = run(open_rollout(clip))
    rollout = open_rollout(clip)
    with pytest.raises(UnsupportedError, match="chunk 1 cannot be sampled or restored now: the next one is chunk 0"):
        rollout.restore(1, expected[1])
    rollout.restore(0, expected[0])
    rollout.restore(0, expected[0])
    with pytest.raises(InvalidRequestError, match="chunk 0 stands with other latents, which are not replaced"):
        rollout.restore(0, expected[1])
    assert rollout.sampled(0) is not None
    rollout.commit(0)
    rollout.restore(0, expected[0])  # also when its answer came late
    assert rollout.is_committed(0)
    with pytest.raises(UnsupportedError, match="chunk 0 cannot be committed"):
        rollout.commit(0)
    assert_same([rollout.sample(1, ignore, never)], expected[1:2])
    with pytest.raises(UnsupportedError, match="the next one is chunk 1"):
        rollout.restore(0, expected[0])
    assert (rollout.num_noise_forwards, rollout.num_clean_forwards) == (2, 1)


def test_what_was_sampled_is_not_replaced_by_what_is_restored(open_rollout: Any, clip: ClipSpec) -> None:
    expected = run(open_rollout(clip))
    rollout = open_rollout(clip)
    rollout.sample(0, ignore, never)
    with pytest.raises(InvalidRequestError, match="stands with other latents"):
        rollout.restore(0, ChunkLatents(expected[0].video, -expected[0].audio))
    rollout.restore(0, expected[0])
    rollout.commit(0)
    assert_same([rollout.sample(1, ignore, never)], expected[1:2])


def test_a_chunk_that_was_cancelled_can_be_restored(open_rollout: Any, clip: ClipSpec) -> None:
    expected = run(open_rollout(clip))
    rollout = open_rollout(clip)
    answers = iter([False, True])
    with pytest.raises(VerbCancelled):
        rollout.sample(0, ignore, lambda: next(answers))
    assert_same(resumed(rollout, expected[:1]), expected[1:])


def test_the_last_chunk_may_be_restored_and_is_never_committed(open_rollout: Any, clip: ClipSpec) -> None:
    expected = run(open_rollout(clip))
    rollout = open_rollout(clip)
    for index, latents in enumerate(expected[:TAIL]):
        rollout.restore(index, latents)
        rollout.commit(index)
    rollout.restore(TAIL, expected[TAIL])
    standing = rollout.sampled(TAIL)
    assert standing is not None
    assert_same([standing], expected[TAIL:])
    with pytest.raises(UnsupportedError, match="the last of the clip"):
        rollout.commit(TAIL)


SEGMENTS = (NoiseSegment(0, 7), NoiseSegment(2, 8), NoiseSegment(3, 9))


def test_a_clip_of_several_seeds_goes_on_from_every_boundary(
    parts: tuple[H3Dit, AdapterBank], context: torch.Tensor, token_tags: torch.Tensor, clip: ClipSpec
) -> None:
    def make() -> Rollout:
        rollout = Rollout(*parts, RAVEN, clip, len(context), CPU, SEGMENTS)
        rollout.prefill(context, token_tags)
        return rollout

    expected = run(make())
    for boundary in range(TAIL + 1):
        assert_same(resumed(make(), expected[:boundary]), expected[boundary:])


def test_a_seed_changes_a_clip_from_its_first_chunk_on_and_the_same_seed_does_not(
    parts: tuple[H3Dit, AdapterBank],
    open_rollout: Any,
    context: torch.Tensor,
    token_tags: torch.Tensor,
    clip: ClipSpec,
) -> None:
    def make(*segments: NoiseSegment) -> list[ChunkLatents]:
        rollout = Rollout(*parts, RAVEN, clip, len(context), CPU, segments)
        rollout.prefill(context, token_tags)
        return run(rollout)

    base = run(open_rollout(clip))
    assert_same(make(NoiseSegment(0, 7), NoiseSegment(2, 7)), base)
    other = make(NoiseSegment(0, 7), NoiseSegment(2, 8))
    assert_same(other[:2], base[:2])
    assert not torch.equal(other[2].video, base[2].video)


def test_the_last_chunk_is_never_committed(open_rollout: Any, clip: ClipSpec) -> None:
    rollout = open_rollout(clip)
    run(rollout)
    with pytest.raises(UnsupportedError, match="the last of the clip"):
        rollout.commit(TAIL)


def test_the_text_goes_into_an_empty_cache_only(
    open_rollout: Any, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(UnsupportedError, match="in the cache already"):
        open_rollout(clip).prefill(context, token_tags)


def test_the_callers_text_is_not_modified(
    open_rollout: Any, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    before = context.clone(), token_tags.clone()
    open_rollout(clip)
    assert torch.equal(context, before[0])
    assert torch.equal(token_tags, before[1])


def test_projections_of_the_timestep_do_not_run_while_sampling(
    open_rollout: Any, clip: ClipSpec, parts: tuple[H3Dit, AdapterBank]
) -> None:
    calls = []
    hook = (
        parts[0]
        .transformer.transformer_blocks[0]
        .adaln_proj.linear.register_forward_hook(lambda module, args, out: calls.append(out))
    )
    run(open_rollout(clip))
    hook.remove()
    assert len(calls) == 3  # two steps and the context, for 5 chunks, 4 commits and the text
