from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import (
    AUDIO_MARGIN_LATENTS,
    TICKS_PER_FRAME,
    TICKS_PER_SAMPLE,
    TICKS_PER_SECOND,
    audio_window,
    decoded_frames,
    emission_table,
    final_audio_latents,
    muxable_frames,
    samples_for_frames,
)
from core.geometry import chunk_table, num_audio_latents, num_samples, valid_frame_counts

frame_counts = st.sampled_from(valid_frame_counts())
RAVEN_BLOCK = 28
"""RAVEN decodes audio in blocks of 28 latents; we do not, but the muxing rule is the same."""


def test_ticks_are_the_least_common_multiple_of_both_rates() -> None:
    assert math.lcm(24, 32_000) == TICKS_PER_SECOND == 96_000
    assert (TICKS_PER_FRAME, TICKS_PER_SAMPLE) == (4000, 3)


def test_frames_and_samples_align_every_three_frames() -> None:
    assert [samples_for_frames(n) for n in range(7)] == [0, 1333, 2666, 4000, 5333, 6666, 8000]
    assert 3 * TICKS_PER_FRAME == 4000 * TICKS_PER_SAMPLE


@pytest.mark.parametrize(
    ("samples", "frames"), [(0, 0), (1332, 0), (1333, 1), (2665, 1), (2666, 2), (3999, 2), (4000, 3), (22_400, 16)]
)
def test_a_frame_needs_every_sample_up_to_its_end(samples: int, frames: int) -> None:
    assert muxable_frames(100, samples, is_final=False) == frames


@given(st.integers(0, 10**6), st.integers(0, 362))
def test_muxable_frames_are_the_most_that_have_sound(samples: int, decoded: int) -> None:
    frames = muxable_frames(decoded, samples, is_final=False)
    assert samples_for_frames(frames) <= samples
    assert frames == decoded or samples_for_frames(frames + 1) > samples


def test_the_gate_is_lifted_at_the_end() -> None:
    assert muxable_frames(56, 0, is_final=True) == 56


@pytest.mark.parametrize("num_frames", valid_frame_counts())
def test_ravens_emission_table_follows_from_the_clock(layout: Any, num_frames: int) -> None:
    """The golden table is of blocks of 28 latents, which only wait for whole blocks longer than we do."""
    total = num_audio_latents(num_frames)
    derived = []
    for chunk in chunk_table(num_frames):
        blocks = max(0, chunk.audio_stop - AUDIO_MARGIN_LATENTS) // RAVEN_BLOCK
        samples = blocks * RAVEN_BLOCK * 800
        frames = 17 * chunk.index
        derived.append([chunk.index, frames, samples, muxable_frames(frames, samples, is_final=False)])
    frames = decoded_frames(chunk_table(num_frames)[-1])
    derived.append([-1, frames, total * 800, muxable_frames(frames, total * 800, is_final=True)])
    assert layout["emission_columns"] == ["chunk", "frames_decoded", "samples_decoded", "frames_muxable"]
    assert derived == layout["emission"][str(num_frames)]


@pytest.mark.parametrize("num_frames", valid_frame_counts())
def test_every_decoded_frame_leaves_with_its_chunk(num_frames: int) -> None:
    """The margin never holds a frame back: 17(k - 1) frames are out before the last chunk is sampled."""
    table = emission_table(num_frames)
    k = len(table) - 1
    assert table == (*(17 * c for c in range(k)), num_frames)
    assert table[-2] == 17 * (k - 1)


def test_shortest_clip_leaves_whole_at_its_end() -> None:
    assert emission_table(22) == (0, 22)


def test_192_frames_are_170_out_before_the_last_chunk() -> None:
    assert emission_table(192)[-2:] == (170, 192)


@given(frame_counts, st.integers(0, 40))
def test_a_larger_margin_only_delays(num_frames: int, margin: int) -> None:
    early, late = emission_table(num_frames, margin), emission_table(num_frames, margin + 1)
    assert all(a >= b for a, b in zip(early, late, strict=True))
    assert early[-1] == late[-1] == num_frames


@given(frame_counts)
def test_frames_last_as_long_as_their_chunks(num_frames: int) -> None:
    chunks = chunk_table(num_frames)
    assert [decoded_frames(c) for c in chunks] == [*range(0, 17 * (len(chunks) - 1), 17), num_frames]


def test_audio_before_the_margin_is_not_final() -> None:
    assert final_audio_latents(0, 37) == 0
    assert final_audio_latents(17, 37) == 0
    assert final_audio_latents(29, 37) == 12
    assert final_audio_latents(36, 37) == 19
    assert final_audio_latents(37, 37) == 37


def test_audio_window_invents_no_context_at_the_edges() -> None:
    first = audio_window(0, 12, 65)
    assert (first.decode_start, first.decode_stop, first.skip_samples, first.num_samples) == (0, 29, 0, 9600)
    last = audio_window(40, 65, 65)
    assert (last.decode_start, last.decode_stop, last.skip_samples, last.num_samples) == (23, 65, 13_600, 20_000)


@given(frame_counts)
def test_windows_keep_every_sample_once_and_need_only_sampled_latents(num_frames: int) -> None:
    total = num_audio_latents(num_frames)
    kept = samples = 0
    for chunk in chunk_table(num_frames):
        stop = final_audio_latents(chunk.audio_stop, total)
        window = audio_window(kept, stop, total)
        assert window.decode_stop <= chunk.audio_stop
        assert window.skip_samples in (0, AUDIO_MARGIN_LATENTS * 800) or window.decode_start == 0
        kept, samples = stop, samples + window.num_samples
    assert samples == num_samples(num_frames)


@given(st.integers(0, 10_000))
def test_samples_for_frames_rounds_the_exact_time_down(num_frames: int) -> None:
    assert samples_for_frames(num_frames) == math.floor(Fraction(num_frames, 24) * 32_000)
