from __future__ import annotations

import itertools

import pytest

from core.phases import HOLDER, MOVES, Phase, Worker
from h3stream.v1 import types_pb2


def test_every_phase_has_a_holder_and_moves() -> None:
    assert set(HOLDER) == set(Phase)
    assert set(MOVES) == set(Phase)


def test_only_decoding_encoding_and_commits_follow_themselves() -> None:
    for phase, successors in MOVES.items():
        assert successors <= set(Phase)
        assert (phase in successors) == (phase in (Phase.DECODE, Phase.ENCODE, Phase.COMMIT))


def test_every_phase_is_reached_from_the_queue_and_reaches_the_end() -> None:
    assert _reachable(Phase.QUEUED) | {Phase.QUEUED} == set(Phase)
    for phase in set(Phase) - {Phase.FINISH}:
        assert Phase.FINISH in _reachable(phase), phase


def test_a_finished_clip_is_refined_or_nothing_more() -> None:
    assert MOVES[Phase.FINISH] == {Phase.ENCODE, Phase.REFINE}


def test_a_job_of_three_chunks_is_a_walk_through_the_table() -> None:
    first = [Phase.DENOISE, Phase.COMMIT]
    second = [Phase.DENOISE, Phase.DECODE, Phase.DECODE, Phase.COMMIT]
    tail = [Phase.DENOISE, Phase.DECODE]
    walk = [Phase.QUEUED, Phase.ENCODE, Phase.PREFILL, *first, *second, *tail, Phase.FINISH]
    assert all(after in MOVES[before] for before, after in itertools.pairwise(walk))


def test_a_dense_job_is_a_walk_through_the_table() -> None:
    walk = [Phase.QUEUED, Phase.PREFILL, Phase.DENOISE, *[Phase.DECODE] * 3, Phase.FINISH]
    assert all(after in MOVES[before] for before, after in itertools.pairwise(walk))


@pytest.mark.parametrize("texts", [[], [Phase.ENCODE], [Phase.ENCODE, Phase.ENCODE]])
def test_a_refinement_is_a_walk_through_the_table(texts: list[Phase]) -> None:
    """Behind the clip in its job, and as a job of its own; without a word, with the one or with both to encode."""
    refined = [*texts, Phase.REFINE, Phase.DECODE, Phase.DECODE, Phase.FINISH]
    for begin in ([Phase.QUEUED], [Phase.DENOISE, Phase.DECODE, Phase.FINISH]):
        assert all(after in MOVES[before] for before, after in itertools.pairwise([*begin, *refined]))


def test_a_known_prompt_skips_the_text_encoder() -> None:
    assert Phase.PREFILL in MOVES[Phase.QUEUED]


def test_a_job_that_is_taken_up_again_is_a_walk_through_the_table() -> None:
    """Its finished chunks are decoded again or not, put back into the cache or not."""
    for decoded in ([], [Phase.DECODE, Phase.DECODE]):
        for begun in ([Phase.PREFILL], [Phase.ENCODE, Phase.PREFILL]):
            for committed in ([], [Phase.COMMIT, Phase.COMMIT]):
                walk = [Phase.QUEUED, *decoded, *begun, *committed, Phase.DENOISE, Phase.DECODE, Phase.FINISH]
                assert all(after in MOVES[before] for before, after in itertools.pairwise(walk))
        assert all(
            after in MOVES[before] for before, after in itertools.pairwise([Phase.QUEUED, *decoded, Phase.FINISH])
        )


def test_nothing_is_committed_or_sampled_before_the_text_is_there() -> None:
    for phase in (Phase.COMMIT, Phase.DENOISE):
        assert {before for before, after in MOVES.items() if phase in after} <= {
            Phase.PREFILL, Phase.DENOISE, Phase.DECODE, Phase.COMMIT,
        }  # fmt: skip


def test_each_worker_holds_the_device_in_some_phase() -> None:
    assert {holder for holder in HOLDER.values() if holder} == set(Worker)


def test_phase_values_are_the_names_on_the_wire() -> None:
    on_the_wire = {name.removeprefix("PHASE_").lower() for name in types_pb2.Phase.keys()} - {"unspecified"}  # noqa: SIM118
    assert {phase.value for phase in Phase} == on_the_wire


def _reachable(start: Phase) -> set[Phase]:
    found: set[Phase] = set()
    pending = [start]
    while pending:
        for successor in MOVES[pending.pop()] - found:
            found.add(successor)
            pending.append(successor)
    return found
