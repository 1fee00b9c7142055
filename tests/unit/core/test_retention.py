from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.retention import retained_entries

TEXT = 0


def test_nothing_is_retained_before_the_first_commit() -> None:
    assert retained_entries(0, sink=2, window=2) == ()
    assert retained_entries(0, sink=1, window=None) == ()


def test_default_policy_keeps_text_first_chunk_and_two_recent_chunks() -> None:
    kept = [retained_entries(n, sink=2, window=2) for n in range(1, 7)]
    assert kept == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 4), (0, 1, 4, 5)]


def test_window_zero_keeps_the_sink_alone() -> None:
    assert [retained_entries(n, sink=2, window=0) for n in range(1, 5)] == [(0,), (0, 1), (0, 1), (0, 1)]


def test_sink_one_keeps_the_text_and_the_window() -> None:
    assert [retained_entries(n, sink=1, window=1) for n in range(1, 5)] == [(0,), (0, 1), (0, 2), (0, 3)]


def test_without_a_window_everything_stays() -> None:
    assert retained_entries(22, sink=1, window=None) == tuple(range(22))


def test_a_window_longer_than_the_clip_keeps_everything() -> None:
    assert retained_entries(22, sink=1, window=64) == tuple(range(22))


@given(st.integers(1, 64), st.one_of(st.none(), st.integers(0, 64)), st.integers(1, 40))
def test_evicted_entry_stays_evicted(sink: int, window: int | None, num_commits: int) -> None:
    before: set[int] = set()
    for n in range(1, num_commits + 1):
        kept = retained_entries(n, sink, window)
        assert list(kept) == sorted(set(kept))
        assert set(kept) <= before | {n - 1}
        assert TEXT in kept
        before = set(kept)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 40))
def test_retained_entries_are_the_sink_and_the_window(sink: int, window: int, n: int) -> None:
    expected = {entry for entry in range(n) if entry < sink or entry >= n - window}
    assert set(retained_entries(n, sink, window)) == expected


@pytest.mark.parametrize("window", [0, 2, None])
def test_the_entry_committed_last_is_seen_unless_window_is_zero(window: int | None) -> None:
    assert (9 in retained_entries(10, 1, window)) == (window != 0)
