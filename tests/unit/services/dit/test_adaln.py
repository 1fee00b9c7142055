from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from services.dit.adaln import Labels, Modulations, clip_timesteps, distinct, modulation, modulation_table
from services.dit.weights import load_transformer

SCHEDULE = clip_timesteps(4, 12.0, 3.0)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def transformer(request: pytest.FixtureRequest, model_directory: Path) -> Any:
    return load_transformer(model_directory / "transformer", request.param)


def test_timesteps_are_the_float32_ones_the_model_is_fed() -> None:
    assert SCHEDULE == (
        (0.0, 0.0),
        (0.027027010917663574, 0.10000002384185791),
        (0.07692307233810425, 0.25),
        (0.19999998807907104, 0.5),
    )


def test_equal_timesteps_share_a_row_and_others_are_sorted() -> None:
    assert distinct(0.5, 0.2) == (0.2, 0.5)
    assert distinct(0.0, 0.0) == (0.0,)


def test_table_rows_are_ordered_by_timestep_then_tag(transformer: Any) -> None:
    table = modulation(transformer, (0.2, 0.5))
    assert [table.row(t, tag) for t in (0.2, 0.5) for tag in range(3)] == [0, 1, 2, 3, 4, 5]
    assert table.timestep_row(0.5) == 1
    assert table.blocks[0].attn_gate.shape == (6, 96)
    assert table.final_scale.shape == (2, 96)


def test_projections_run_once_per_set_of_timesteps(transformer: Any) -> None:
    calls: Counter[str] = Counter()
    hooks = [
        module.register_forward_hook(lambda m, args, out, name=name: calls.update([name]))
        for name, module in transformer.named_modules()
        if name.endswith(("adaln_proj.linear", "norm_out.linear"))
    ]
    table = modulation_table(transformer, (*SCHEDULE, *SCHEDULE))
    for hook in hooks:
        hook.remove()
    assert table.keys() == {(0.0,), *(distinct(*pair) for pair in SCHEDULE[1:])}
    assert set(calls.values()) == {4}
    assert len(calls) == 4


def test_modulations_asked_for_one_after_the_other_are_those_of_the_table(transformer: Any) -> None:
    calls: Counter[str] = Counter()
    hook = transformer.norm_out.linear.register_forward_hook(lambda m, args, out: calls.update(["computed"]))
    asked = Modulations(transformer)
    first, second, third = (distinct(*pair) for pair in SCHEDULE[:3])
    for timesteps in (first, second, second, first, third, second):  # the last two are kept
        asked[timesteps]
    hook.remove()
    assert calls["computed"] == 3
    table = modulation_table(transformer, SCHEDULE)
    assert torch.equal(asked[second].blocks[1].ffn_gate, table[second].blocks[1].ffn_gate)


def test_rows_find_their_timestep_in_the_table(transformer: Any) -> None:
    video, audio = SCHEDULE[1]
    timesteps = distinct(video, audio)
    table = modulation(transformer, timesteps)
    device = torch.device("cpu")
    assert table.timestep_rows(Labels((audio,)), 3, device).tolist() == [timesteps.index(audio)] * 3
    mixed = Labels((audio, video), torch.tensor([1, 0, 0, 1]))
    expected = [timesteps.index(value) for value in (video, audio, audio, video)]
    assert table.timestep_rows(mixed, 4, device).tolist() == expected


def test_the_table_holds_the_bits_a_forward_would_compute(transformer: Any) -> None:
    video, audio = SCHEDULE[1]
    table = modulation_table(transformer, SCHEDULE)[distinct(video, audio)]
    embedding = transformer.time_embedder(transformer.time_proj(torch.tensor([video, audio])))
    condition = silu(embedding).to(transformer.norm_out.linear.weight.dtype)
    for block, ours in zip(transformer.transformer_blocks, table.blocks, strict=True):
        rows = block.adaln_proj.linear(condition).view(6, 6 * 96)
        expected = list(rows.chunk(6, dim=-1))
        assert torch.equal(ours.attn_shift, expected[0])
        assert torch.equal(ours.attn_scale, 1 + expected[1])
        assert torch.equal(ours.attn_gate, expected[2])
        assert torch.equal(ours.ffn_shift, expected[3])
        assert torch.equal(ours.ffn_scale, 1 + expected[4])
        assert torch.equal(ours.ffn_gate, expected[5])
