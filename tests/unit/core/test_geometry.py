from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import geometry
from core.geometry import (
    MAX_FRAMES,
    MIN_FRAMES,
    chunk_positions,
    chunk_table,
    dense_positions,
    full_chunks,
    latent_size,
    num_audio_latents,
    num_audio_rows,
    num_clip_rows,
    num_rows,
    num_samples,
    num_video_latents,
    rows_per_video_latent,
    spatial_axis,
    text_positions,
    valid_frame_counts,
    video_latent_time,
)

frame_counts = st.sampled_from(valid_frame_counts())


def test_shortest_clip_has_one_full_chunk_and_a_tail() -> None:
    chunks = chunk_table(22)
    assert [(c.video_start, c.video_stop, c.audio_start, c.audio_stop) for c in chunks] == [
        (0, 5, 0, 29),
        (5, 7, 29, 37),
    ]
    assert [c.is_tail for c in chunks] == [False, True]


def test_longest_clip_starts_its_audio_where_the_reference_says() -> None:
    starts = [0, 29, 57, 85, 114, 142, 170, 199, 227, 255, 284, 312, 340, 369, 397, 425, 454, 482, 510, 539, 567, 595]
    chunks = chunk_table(362)
    assert [c.audio_start for c in chunks] == starts
    assert (chunks[-1].audio_stop, chunks[-1].video_start, chunks[-1].video_stop) == (603, 105, 107)


def test_valid_frame_counts_are_21_from_22_to_362() -> None:
    counts = valid_frame_counts()
    assert len(counts) == 21
    assert (counts[0], counts[1], counts[-1]) == (22, 39, 362)
    assert (MIN_FRAMES, MAX_FRAMES) == (22, 362)


@pytest.mark.parametrize("num_frames", [-12, 0, 4, 5, 6, 21, 23, 38, 40, 361, 363, 379])
def test_frame_counts_off_the_grid_are_refused(num_frames: int) -> None:
    with pytest.raises(ValueError, match=rf"^{num_frames} frames are not 17k \+ 5 with k from 1 to 21$"):
        full_chunks(num_frames)


def test_golden_layout_covers_every_valid_frame_count(layout: Any) -> None:
    assert tuple(int(n) for n in layout["frames"]) == valid_frame_counts()


@pytest.mark.parametrize("num_frames", valid_frame_counts())
def test_chunk_table_equals_the_golden_layout(layout: Any, num_frames: int) -> None:
    golden = layout["frames"][str(num_frames)]
    chunks = chunk_table(num_frames)
    assert full_chunks(num_frames) == golden["k"]
    assert num_video_latents(num_frames) == golden["latent_t"]
    assert num_audio_latents(num_frames) == golden["audio_t"]
    assert len(chunks) == golden["num_chunks"]
    assert [[c.video_start, c.video_stop] for c in chunks] == golden["video"]
    assert [[c.audio_start, c.audio_stop] for c in chunks] == golden["audio"]


@given(frame_counts)
def test_every_latent_belongs_to_exactly_one_chunk(num_frames: int) -> None:
    chunks = chunk_table(num_frames)
    assert [n for c in chunks for n in range(c.video_start, c.video_stop)] == list(range(num_video_latents(num_frames)))
    assert [j for c in chunks for j in range(c.audio_start, c.audio_stop)] == list(range(num_audio_latents(num_frames)))
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert [c.is_tail for c in chunks] == [False] * (len(chunks) - 1) + [True]


@given(frame_counts)
def test_audio_latents_lie_in_the_time_of_their_chunk(num_frames: int) -> None:
    # In units of 1/3 of an audio latent, so that nothing is rounded: a chunk lasts 85 of them.
    for chunk in chunk_table(num_frames):
        assert all(85 * chunk.index <= 3 * j for j in range(chunk.audio_start, chunk.audio_stop))
        if not chunk.is_tail:
            assert all(3 * j < 85 * (chunk.index + 1) for j in range(chunk.audio_start, chunk.audio_stop))


@given(frame_counts)
def test_tail_has_two_video_and_eight_audio_latents(num_frames: int) -> None:
    tail = chunk_table(num_frames)[-1]
    assert (tail.num_video_latents, tail.num_audio_latents) == (2, 8)


@given(frame_counts)
def test_audio_length_is_the_rounded_length_of_the_frames(num_frames: int) -> None:
    assert num_audio_latents(num_frames) == round(num_frames / 24 * 40)
    excess_in_thirds = 3 * num_samples(num_frames) - 4000 * num_frames
    assert excess_in_thirds == {2: 0, 1: 800, 0: -800}[full_chunks(num_frames) % 3]


def test_rows_of_a_chunk_on_the_largest_canvas() -> None:
    assert rows_per_video_latent(1376, 768) == 1032
    assert [num_rows(c, 1376, 768) for c in chunk_table(39)] == [5218, 5216, 2080]


def test_smallest_canvas_has_one_row_per_video_latent() -> None:
    assert latent_size(32) == 2
    assert [num_rows(c, 32, 32) for c in chunk_table(22)] == [5 + 58, 2 + 16]


@pytest.mark.parametrize("canvas", ["1376x768", "768x1376", "512x288", "1024x1024", "128x64"])
def test_spatial_axes_equal_the_golden_ones_bit_for_bit(positions: Any, canvas: str) -> None:
    width, height = (latent_size(int(side)) for side in canvas.split("x"))
    np.testing.assert_array_equal(spatial_axis(height, height, width), positions[f"h_axis.{canvas}"], strict=True)
    np.testing.assert_array_equal(spatial_axis(width, height, width), positions[f"w_axis.{canvas}"], strict=True)


def test_video_times_equal_the_golden_ones_bit_for_bit(positions: Any, layout: Any) -> None:
    golden = positions["video_t.origin128"]
    assert layout["text_len"] == 128
    np.testing.assert_array_equal([video_latent_time(n, 128) for n in range(107)], golden, strict=True)


@pytest.mark.parametrize("index", [0, 1, 21])
def test_chunk_positions_equal_the_golden_ones_bit_for_bit(positions: Any, index: int) -> None:
    chunk = chunk_table(362)[index]
    rows = chunk_positions(chunk, num_tokens=128, latent_height=4, latent_width=8)
    np.testing.assert_array_equal(np.array(rows), positions[f"positions.128x64.f362.chunk{index}"], strict=True)


def test_audio_rows_come_first_left_then_right() -> None:
    chunk = chunk_table(22)[0]
    rows = chunk_positions(chunk, num_tokens=3, latent_height=2, latent_width=4)
    left, right = spatial_axis(4, 2, 4)
    assert rows[:29] == [(3.0 + j, 0.0, left) for j in range(29)]
    assert rows[29:58] == [(3.0 + j, 0.0, right) for j in range(29)]
    assert rows[58][0] == 3.0


@given(frame_counts, st.integers(1, 4), st.integers(1, 4))
def test_every_row_has_a_position(num_frames: int, columns: int, lines: int) -> None:
    for chunk in chunk_table(num_frames):
        rows = chunk_positions(chunk, num_tokens=7, latent_height=2 * lines, latent_width=2 * columns)
        assert len(rows) == num_rows(chunk, 32 * columns, 32 * lines)


def test_text_rows_count_up_in_time_alone() -> None:
    assert text_positions(3) == [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (2.0, 0.0, 0.0)]


def test_a_row_covers_32_pixels() -> None:
    assert geometry.CANVAS_MULTIPLE == 32
    assert geometry.MAX_CANVAS_PIXELS == 1_056_768


@given(frame_counts, st.integers(1, 3), st.integers(1, 3))
def test_dense_rows_lie_where_the_rows_of_their_chunks_do(num_frames: int, columns: int, lines: int) -> None:
    canvas = (2 * lines, 2 * columns)
    rows = dense_positions(num_frames, 7, *canvas)
    assert rows[:7] == text_positions(7)
    media = iter(rows[7:])
    chunks = [(chunk, chunk_positions(chunk, 7, *canvas)) for chunk in chunk_table(num_frames)]
    for channel in range(2):
        for chunk, positions in chunks:
            count = chunk.num_audio_latents
            assert list(itertools.islice(media, count)) == positions[channel * count : (channel + 1) * count]
    for chunk, positions in chunks:
        video = positions[num_audio_rows(chunk) :]
        assert list(itertools.islice(media, len(video))) == video
    assert list(media) == []
    assert len(rows) == 7 + num_clip_rows(num_frames, 32 * columns, 32 * lines)


def test_rows_of_whole_clips_are_those_of_the_reference() -> None:
    assert num_clip_rows(124, 1376, 768) == 38_598
    assert num_clip_rows(243, 1376, 768) == 75_114
