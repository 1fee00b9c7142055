from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear

from h3stream.errors import CheckpointError
from services.checkpoints.adapter_registry import bind, read_adapter, read_registry
from services.checkpoints.dit_modules import Architecture, module_rows, official_modules, parameter_shapes
from services.checkpoints.header import content_digest
from services.checkpoints.key_map import Rows, Rule
from services.common.config import AdapterSource
from services.dit.adapters import (
    Adapter,
    AdapterBank,
    LowRankPair,
    add_residuals,
    fit_adapters,
    load_adapter,
    load_adapters,
)
from services.dit.weights import load_transformer
from tests.adapter_files import named, official_pairs, write
from tests.raven_vectors import FIXTURES, architecture, extra_adapter, load, raven_adapter

RAVEN_FILE = FIXTURES / "lora_raven.safetensors"
EXTRA_FILE = FIXTURES / "lora_extra.safetensors"
QKV_B = "base_model.model.dit.blocks.0.attn.qkv_proj.lora_B.weight"


@pytest.fixture
def transformer(model_directory: Path) -> Any:
    return load_transformer(model_directory / "transformer", "float32")


# --- from a file ------------------------------------------------------------------------------------------------------


def test_every_module_of_ravens_file_is_bound(transformer: Any) -> None:
    adapter = raven_adapter(transformer)
    linears = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    assert adapter.residuals.keys() == linears
    assert {scale for _, _, scale in adapter.residuals.values()} == {1.5}  # alpha 6 of the metadata, rank 4


def test_the_parts_of_a_fused_projection_share_one_down_matrix(transformer: Any) -> None:
    adapter = raven_adapter(transformer)
    parts = [adapter.residuals[f"transformer_blocks.0.attn.to_{part}"] for part in "qkv"]
    assert parts[0][0] is parts[1][0] is parts[2][0]
    assert torch.equal(torch.cat([up for _, up, _ in parts]), load_file(RAVEN_FILE)[QKV_B])
    parameters = sum(parameter.numel() for parameter in adapter.parameters())
    assert parameters == sum(tensor.numel() for tensor in load_file(RAVEN_FILE).values())


def test_modules_have_their_own_ranks_and_scales(transformer: Any) -> None:
    tensors, adapter = load_file(EXTRA_FILE), extra_adapter(transformer)
    for i in range(3):
        stem = f"diffusion_model.blocks.{i}.mlp.fc2"
        down, up, scale = adapter.residuals[f"transformer_blocks.{i}.ff.net.2"]
        assert torch.equal(down, tensors[f"{stem}.lora_down.weight"])
        assert torch.equal(up, tensors[f"{stem}.lora_up.weight"])
        assert scale == tensors[f"{stem}.alpha"].item() / len(down)
    assert len({len(down) for down, _, _ in adapter.residuals.values()}) > 1


def test_a_file_that_was_cut_off_after_its_header_was_read_is_refused(transformer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", named(official_pairs(), "diffusion_model."))
    binding = bind(read_adapter(AdapterSource("a", path)), architecture(transformer))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="has changed"):
        load_adapter(binding.modules, num_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_stay_in_the_dtype_of_the_file(dtype: torch.dtype, transformer: Any, tmp_path: Path) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in named(official_pairs(), "diffusion_model.").items()}
    adapter = load(transformer, write(tmp_path / "a.safetensors", tensors))
    assert sum(parameter.nbytes for parameter in adapter.parameters()) == sum(t.nbytes for t in tensors.values())


def test_what_is_told_of_adapters_are_the_facts_of_their_files(transformer: Any) -> None:
    registry = read_registry((AdapterSource("raven", RAVEN_FILE), AdapterSource("extra", EXTRA_FILE, 0.5)), None)
    fitted = fit_adapters(registry, architecture(transformer), "fl2va", allow_partial=False)
    bank, (raven, extra) = load_adapters(transformer, fitted)
    assert (raven.name, raven.format, raven.is_streaming, raven.num_bound_modules) == ("raven", "raven", True, 31)
    assert (raven.min_rank, raven.max_rank, raven.min_alpha, raven.max_alpha) == (4, 4, 6, 6)
    assert raven.num_parameters == sum(tensor.numel() for tensor in load_file(RAVEN_FILE).values())
    assert (extra.num_bound_modules, extra.num_modules, extra.default_strength) == (20, 20, 0.5)
    assert (extra.min_rank, extra.max_rank, extra.min_alpha, extra.max_alpha) == (2, 4, 1, 4)
    assert extra.sha256 == content_digest(EXTRA_FILE)
    assert extra.file_name == "lora_extra.safetensors"
    with bank.using((("raven", 1.0), ("extra", 0.5))):
        pass


def test_an_adapter_used_in_part_is_told_and_warned_of(
    transformer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = official_pairs() | {"blocks.3.mlp.fc2": official_pairs()["blocks.0.mlp.fc2"]}
    source = AdapterSource("style", write(tmp_path / "a.safetensors", named(pairs, "diffusion_model.")))
    with caplog.at_level(logging.INFO, "services.dit.adapters"):
        fitted = fit_adapters([read_adapter(source)], architecture(transformer), "fl2va", allow_partial=True)
    warning, note = caplog.messages
    assert warning == "adapter style is used in part: 1 that this DiT does not have: blocks.3.mlp.fc2"
    assert note == "adapter style does not tell whether it is for the fl2va DiT, which is loaded"
    _, (info,) = load_adapters(transformer, fitted)
    assert (info.num_bound_modules, info.num_modules) == (31, 32)


def test_ravens_266_modules_fit_the_published_class_at_full_size() -> None:
    from diffusers import MiniMaxH3Transformer3DModel

    rank, shapes, pairs = 128, parameter_shapes(Architecture()), []
    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel()
        for official, names in official_modules(50, 2).items():
            weights = [shapes[f"{name}.weight"] for name in names]
            pair = LowRankPair(
                torch.empty(rank, weights[0][1]), torch.empty(sum(rows for rows, _ in weights), rank), alpha=128.0
            )
            pairs.append((Rule(names, module_rows(official, "comfyui")), pair))
    adapter = Adapter(pairs)
    AdapterBank(transformer, {"raven": adapter})
    assert len(pairs) == 266
    assert len(adapter.tensors) == 532 + 2 * 52  # the fused projections' up matrices are three each
    assert sum(tensor.numel() for tensor in adapter.tensors) == 1_264_353_280
    for name, (down, up, _) in adapter.residuals.items():
        assert (len(up), down.shape[1]) == tuple(transformer.get_submodule(name).weight.shape)
        assert transformer.get_submodule(name)._forward_hooks


# --- in a pass --------------------------------------------------------------------------------------------------------


def pair(num_in: int, num_out: int, rank: int, seed: int = 0) -> LowRankPair:
    draw = torch.Generator().manual_seed(100 * rank + seed)
    return LowRankPair(
        torch.randn(rank, num_in, generator=draw), torch.randn(num_out, rank, generator=draw), alpha=2.0 * rank
    )


PAIRS = {"first": pair(96, 96, 2), "second": pair(96, 96, 3), "head": pair(96, 96, 1)}


@pytest.fixture
def bank(transformer: Any) -> AdapterBank:
    """Two adapters on `proj_in`; the second also changes `proj_out`. Names may hold dots."""
    return AdapterBank(
        transformer,
        {
            "first": Adapter([(Rule(("proj_in",)), PAIRS["first"])]),
            "second.v1": Adapter([(Rule(("proj_in",)), PAIRS["second"]), (Rule(("proj_out",)), PAIRS["head"])]),
        },
    )


def inputs() -> torch.Tensor:
    return torch.randn(7, 96, generator=torch.Generator().manual_seed(4))


def update(name: str) -> torch.Tensor:
    return 2.0 * inputs() @ PAIRS[name].down.T @ PAIRS[name].up.T


def test_a_pass_uses_the_adapters_it_names_at_their_strengths(bank: AdapterBank, transformer: Any) -> None:
    x = inputs()
    base = transformer.proj_in(x)
    assert torch.equal(base, linear(x, transformer.proj_in.weight, transformer.proj_in.bias))
    with bank.using((("first", 0.5), ("second.v1", -1.0))):
        both = transformer.proj_in(x)
        with bank.using((("second.v1", 1.0),)):
            torch.testing.assert_close(transformer.proj_in(x), base + update("second"))
        with bank.using(()):
            assert torch.equal(transformer.proj_in(x), base)
        assert torch.equal(transformer.proj_in(x), both)
    torch.testing.assert_close(both, base + 0.5 * update("first") - update("second"))
    assert torch.equal(transformer.proj_in(x), base)


def test_a_module_that_an_adapter_leaves_alone_stays_so(bank: AdapterBank, transformer: Any) -> None:
    x = inputs()
    base = transformer.proj_out(x)
    with bank.using((("first", 1.0),)):
        assert torch.equal(transformer.proj_out(x), base)
    with bank.using((("first", 1.0), ("second.v1", 1.0))):
        torch.testing.assert_close(transformer.proj_out(x), base + update("head"))


def test_the_order_of_adapters_moves_no_more_than_a_float32_sum_does(bank: AdapterBank, transformer: Any) -> None:
    x = inputs()
    with bank.using((("first", 0.3), ("second.v1", 0.7))):
        one = transformer.proj_in(x)
    with bank.using((("second.v1", 0.7), ("first", 0.3))):
        other = transformer.proj_in(x)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)  # values up to 40: a few units in the last place


def test_a_failing_pass_leaves_no_adapter_on(bank: AdapterBank, transformer: Any) -> None:
    x = inputs()
    base = transformer.proj_in(x)
    with pytest.raises(ZeroDivisionError), bank.using((("first", 1.0),)):
        raise ZeroDivisionError
    assert torch.equal(transformer.proj_in(x), base)


def test_the_banks_tensors_are_all_of_its_adapters(bank: AdapterBank) -> None:
    sizes = sum(pair.down.numel() + pair.up.numel() for pair in PAIRS.values())
    assert sum(parameter.numel() for parameter in bank.parameters()) == sizes
    assert not any(parameter.requires_grad for parameter in bank.parameters())


class FusedLinear(nn.Linear):
    pass


@pytest.mark.parametrize("change", ["another class", "float8 weights", "children"])
def test_attaching_to_a_module_that_is_no_plain_linear_attaches_nothing(transformer: Any, change: str) -> None:
    if change == "another class":
        transformer.proj_out = FusedLinear(96, 96)
    elif change == "children":
        transformer.proj_out = nn.Sequential(nn.Linear(96, 96))
    else:
        transformer.proj_out.weight.data = transformer.proj_out.weight.data.to(torch.float8_e4m3fn)
    adapter = Adapter([(Rule((name,)), pair(96, 96, 1)) for name in ("proj_in", "proj_out")])
    with pytest.raises(CheckpointError, match="cannot be attached to proj_out"):
        AdapterBank(transformer, {"x": adapter})
    assert not transformer.proj_in._forward_hooks


def test_rows_in_the_order_of_the_heads_are_put_in_that_of_the_parts() -> None:
    rule = Rule(("q", "k", "v"), Rows.PER_HEAD, num_heads=2)
    up = torch.arange(12.0)[:, None]  # head 0: q 0 1, k 2 3, v 4 5; head 1: q 6 7, k 8 9, v 10 11
    residuals = Adapter([(rule, LowRankPair(torch.ones(1, 1), up, 1.0))]).residuals
    assert {name: up.flatten().tolist() for name, (_, up, _) in residuals.items()} == {
        "q": [0, 1, 6, 7],
        "k": [2, 3, 8, 9],
        "v": [4, 5, 10, 11],
    }


# --- the sum ----------------------------------------------------------------------------------------------------------


def test_row_blocks_change_nothing_but_memory() -> None:
    draw = torch.Generator().manual_seed(6)
    x, base = torch.randn(2500, 8, generator=draw), torch.randn(2500, 6, generator=draw)
    down, up = torch.randn(2, 8, generator=draw), torch.randn(6, 2, generator=draw)
    out = add_residuals(x, base.clone(), [(down, up, 0.5)])
    torch.testing.assert_close(out, base + 0.5 * x @ down.T @ up.T)


def test_a_bfloat16_result_is_rounded_once_from_a_float32_sum() -> None:
    draw = torch.Generator().manual_seed(8)
    x, base = torch.randn(300, 8, generator=draw).bfloat16(), torch.randn(300, 6, generator=draw).bfloat16()
    terms = [(torch.randn(2, 8, generator=draw), torch.randn(6, 2, generator=draw), scale) for scale in (0.5, 1e-3)]
    expected = base.float()
    for down, up, scale in terms:
        expected = expected + scale * linear(linear(x.float(), down), up)
    out = add_residuals(x, base.clone(), terms)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-8, atol=0)
    assert not torch.equal(out, add_residuals(x, base.clone(), terms[:1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_in_fewer_bits_give_what_their_float32_copies_give(dtype: torch.dtype) -> None:
    short = dataclasses.replace(pair(8, 6, 2), down=pair(8, 6, 2).down.to(dtype), up=pair(8, 6, 2).up.to(dtype))
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(9)).bfloat16()
    base = torch.zeros(300, 6, dtype=torch.bfloat16)
    kept = add_residuals(x, base.clone(), [(short.down, short.up, 0.7)])
    widened = add_residuals(x, base.clone(), [(short.down.float(), short.up.float(), 0.7)])
    assert torch.equal(kept, widened)
