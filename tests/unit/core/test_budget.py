from __future__ import annotations

import dataclasses

import pytest

from core.budget import (
    FFN_BLOCK_ROWS,
    GIB,
    KvRows,
    MemoryBudget,
    ModelSize,
    expected_stream_bytes,
    kv_rows,
    memory_budget,
)
from core.request import ClipValues
from h3stream.request import ClipSpec

H3 = ModelSize(num_layers=50, num_heads=56, head_dim=128, hidden=5376, ffn=14_336, compute_bytes=2)
DECODE = int(0.635 * GIB)
CLIP = ClipSpec(
    num_frames=192,
    width=1376,
    height=768,
    steps=4,
    video_shift=12.0,
    audio_shift=3.0,
    sink=2,
    window=2,
    kv_storage="cpu_pinned",
    seed=0,
)


def test_shortest_clip_is_widest_in_its_tail() -> None:
    rows = kv_rows(dataclasses.replace(CLIP, num_frames=22), num_tokens=128)
    # The tail attends to the text and chunk 0 and is never committed.
    assert rows == KvRows(
        peak=128 + 5218,
        most_retained=128 + 5218,
        steady=128 + 5218,
        widest_attention=128 + 5218 + 2080,
        widest_forward=5218,
    )


def test_window_zero_retains_the_sink_alone() -> None:
    rows = kv_rows(dataclasses.replace(CLIP, sink=1, window=0), num_tokens=128)
    assert (rows.steady, rows.most_retained, rows.peak) == (128, 128, 128 + 5218)


def test_without_a_window_every_committed_row_stays() -> None:
    rows = kv_rows(dataclasses.replace(CLIP, window=None), num_tokens=128)
    committed = 128 + 4 * 5218 + 7 * 5216
    assert rows.steady == rows.most_retained == rows.peak == committed
    assert rows.widest_attention == committed + 2080


def test_a_long_text_is_the_widest_forward() -> None:
    rows = kv_rows(dataclasses.replace(CLIP, width=64, height=64), num_tokens=1000)
    assert rows.widest_forward == 1000


def test_worked_example_of_the_reference() -> None:
    assert kv_rows(CLIP, num_tokens=128) == KvRows(
        peak=20_996, most_retained=15_780, steady=15_780, widest_attention=20_996, widest_forward=5218
    )
    budget = memory_budget(CLIP, 128, H3, DECODE)
    assert H3.kv_bytes_per_row == 1_433_600
    assert budget.kv_device == 0
    assert budget.kv_host == 30_099_865_600
    assert budget.kv_host_steady == 22_622_208_000
    assert budget.kv_merged == 601_997_312
    assert budget.activations == 972_468_224
    assert budget.forward == budget.working == 1_641_574_400
    assert budget.latent_buffers == 79_944_192
    assert budget.safety == 743_453_144
    assert budget.device_total == 2_464_971_736


def test_longest_clip_of_the_reference() -> None:
    budget = memory_budget(dataclasses.replace(CLIP, num_frames=362), 128, H3, DECODE)
    assert round(budget.latent_buffers / GIB, 3) == 0.130
    assert round(budget.device_total / GIB, 3) == 2.358


def test_cache_on_the_device_of_the_reference() -> None:
    budget = memory_budget(dataclasses.replace(CLIP, kv_storage="gpu"), 128, H3, DECODE)
    assert round(budget.device_total / GIB, 2) == 33.54
    assert budget.kv_device == 30_099_865_600
    assert (budget.kv_host, budget.kv_host_steady) == (0, 0)
    assert budget.kv_merged == 2 * 15_780 * 7168 * 2


def test_a_decode_larger_than_a_forward_takes_its_place() -> None:
    small, large = (memory_budget(CLIP, 128, H3, decode) for decode in (0, 3 * GIB))
    assert small.working == small.forward
    assert large.working == 3 * GIB
    extra = large.working - small.working
    assert large.device_total - small.device_total == pytest.approx(1.12 * extra, abs=1)


def test_more_frames_never_need_less() -> None:
    totals = [
        memory_budget(dataclasses.replace(CLIP, num_frames=17 * k + 5), 128, H3, DECODE).device_total
        for k in range(1, 22)
    ]
    assert totals == sorted(totals)


def test_any_clip_with_the_right_values_can_be_budgeted() -> None:
    clip: ClipValues = CLIP
    assert memory_budget(clip, 1, H3, 0).device_total > 0


def test_a_budget_is_told_in_a_sentence() -> None:
    none = MemoryBudget(**{field.name: 0 for field in dataclasses.fields(MemoryBudget)})
    reserve = none.safety
    assert reserve == GIB // 2
    assert str(none) == "about 0.50 GiB on the device beside the weights (0.50 GiB in reserve)"
    streaming = dataclasses.replace(none, kv_host=3 * GIB, activations=GIB, decode=5 * GIB, latent_buffers=GIB // 4)
    assert str(streaming) == (
        "about 6.38 GiB on the device beside the weights (5.00 GiB for a decode, 0.25 GiB of latents, 1.13 GiB in "
        "reserve), and 3.00 GiB of KV cache on the host"
    )
    dense = dataclasses.replace(none, kv_device=2 * GIB, activations=GIB, kv_merged=GIB, modulation=GIB)
    assert str(dense) == (
        "about 6.10 GiB on the device beside the weights (2.00 GiB of KV cache, 2.00 GiB for a forward, 1.00 GiB of "
        "modulation, 1.10 GiB in reserve)"
    )


DENSE = dataclasses.replace(CLIP, num_frames=243, steps=50, sink=0, window=None, mode="dense")


def test_a_dense_clip_of_ten_seconds_needs_its_rows_at_once_and_no_cache() -> None:
    budget = memory_budget(DENSE, 128, H3, DECODE)
    rows = 128 + 75_114
    assert (budget.kv_device, budget.kv_host, budget.kv_host_steady, budget.kv_merged) == (0, 0, 0, 0)
    # Input, norm, queries, keys, values and output of the attention.
    assert budget.activations == rows * (2 * 5376 + 4 * 7168) * 2
    # The first of 50 steps has one timestep, the others two; a timestep's modulation is a figure of the reference.
    assert budget.modulation == 99 * 9_698_304
    assert budget.latent_buffers == 4 * 6 * (24 * 72 * 48 * 86 + 32 * 2 * 405)
    assert budget.working == budget.forward
    assert round(budget.device_total / GIB, 1) == 7.9


def test_a_dense_clip_of_few_rows_is_widest_in_its_feed_forward() -> None:
    budget = memory_budget(dataclasses.replace(DENSE, num_frames=22, width=256, height=160), 128, H3, DECODE)
    rows = 128 + 7 * 40 + 2 * 37
    assert budget.activations == rows * (4 * 5376 + 4 * 14_336) * 2


def test_the_feed_forward_of_every_chunk_is_one_block() -> None:
    widest = max(kv_rows(dataclasses.replace(CLIP, num_frames=frames), 1).widest_forward for frames in (22, 39, 362))
    assert widest == 5218
    assert widest < FFN_BLOCK_ROWS


@pytest.mark.parametrize("larger", [{"num_frames": 260}, {"steps": 51}, {"width": 1408, "height": 768}])
def test_a_larger_dense_clip_needs_more(larger: dict[str, int]) -> None:
    assert memory_budget(dataclasses.replace(DENSE, **larger), 128, H3, 0).device_total > (
        memory_budget(DENSE, 128, H3, 0).device_total
    )


def test_a_second_of_stream_weighs_its_bit_rates() -> None:
    # 192 frames last 8 s, 320 audio latents too.
    assert expected_stream_bytes(192, 6_000_000, 128_000) == 8 * (6_000_000 + 128_000) // 8
    assert expected_stream_bytes(22, 24, 0) == 3  # 22 bits, rounded up to bytes
    assert expected_stream_bytes(22, 0, 40) == 5  # 37 latents are 37 bits
