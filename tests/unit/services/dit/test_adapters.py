from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

from h3stream.errors import CheckpointError
from services.dit.adapters import (
    Adapter,
    AdapterBank,
    LowRankPair,
    add_residuals,
    find_adapter,
    load_raven_adapter,
)
from services.dit.weights import load_transformer
from tests.raven_vectors import FIXTURES

RAVEN_FILE = FIXTURES / "lora_raven.safetensors"
PREFIX = "base_model.model.dit."
QKV_A = f"{PREFIX}blocks.0.attn.qkv_proj.lora_A.weight"
QKV_B = f"{PREFIX}blocks.0.attn.qkv_proj.lora_B.weight"


@pytest.fixture
def transformer(model_directory: Path) -> Any:
    return load_transformer(model_directory / "transformer", "float32")


def damaged(tmp_path: Path, change: Any, metadata: dict[str, str] | None = None) -> Path:
    """The RAVEN vector's file after `change` has worked on its tensors."""
    tensors = load_file(RAVEN_FILE)
    change(tensors)
    path = tmp_path / "damaged.safetensors"
    save_file(tensors, path, metadata=metadata)
    return path


def test_every_module_of_the_file_is_bound(transformer: Any) -> None:
    adapter = load_raven_adapter(RAVEN_FILE, transformer)
    linears = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    assert adapter.residuals.keys() == linears
    assert {scale for _, _, scale in adapter.residuals.values()} == {1.5}  # alpha 6 of the metadata, rank 4


def test_the_parts_of_a_fused_projection_share_one_down_matrix(transformer: Any) -> None:
    adapter = load_raven_adapter(RAVEN_FILE, transformer)
    parts = [adapter.residuals[f"transformer_blocks.0.attn.to_{part}"] for part in "qkv"]
    assert parts[0][0] is parts[1][0] is parts[2][0]
    assert torch.equal(torch.cat([up for _, up, _ in parts]), load_file(RAVEN_FILE)[QKV_B])
    parameters = sum(parameter.numel() for parameter in adapter.parameters())
    assert parameters == sum(tensor.numel() for tensor in load_file(RAVEN_FILE).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"lora_te.weight": torch.zeros(1)}), "unknown key 'lora_te.weight'"),
        (
            lambda t: t.update({f"{PREFIX}blocks.9.mlp.fc2.lora_{s}.weight": torch.zeros(4, 4) for s in "AB"}),
            "there is no module 'blocks.9.mlp.fc2'",
        ),
        (lambda t: t.update({QKV_A.replace("lora_A", "lora_A.default"): t[QKV_A].clone()}), "repeats"),
        (lambda t: t.pop(QKV_A), f"{QKV_B!r} has no other half"),
        (lambda t: (t.pop(QKV_A), t.pop(QKV_B)), "module 'blocks.0.attn.qkv_proj' is missing"),
        (lambda t: t.update({QKV_A: t[QKV_A].half()}), "is F16, expected F32"),
        (
            lambda t: t.update({QKV_B: t[QKV_B][:-1].clone()}),
            r"A \[4, 96\] and B \[767, 4\] do not fit a weight \[768, 96\]",
        ),
        (
            lambda t: t.update({QKV_A: t[QKV_A][:2].clone(), QKV_B: t[QKV_B][:, :2].clone()}),
            "ranks differ: 2 ",
        ),
    ],
    ids=["unknown key", "unknown module", "duplicate", "half pair", "missing", "dtype", "shape", "rank"],
)
def test_an_adapter_that_does_not_fit_is_refused(transformer: Any, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_raven_adapter(damaged(tmp_path, change), transformer)


def test_a_refusal_counts_what_matched_and_lists_everything(transformer: Any, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(QKV_A)
        tensors["junk"] = torch.zeros(1)

    with pytest.raises(CheckpointError, match="30 of 31 modules matched") as raised:
        load_raven_adapter(damaged(tmp_path, change), transformer)
    assert "junk" in str(raised.value)
    assert QKV_B in str(raised.value)


def test_an_optional_adapter_name_in_the_keys_is_accepted(transformer: Any, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace(".weight", ".default.weight")] = tensors.pop(key)

    assert len(load_raven_adapter(damaged(tmp_path, change), transformer).residuals) > 31


@pytest.mark.parametrize(
    ("metadata", "config", "alpha"),
    [
        ({"lora_alpha": "8", "alpha": "3"}, {"lora_alpha": 5}, 8),
        ({"raven_lora_alpha": "2"}, {"lora_alpha": 5}, 2),
        ({}, {"lora_alpha": 5, "alpha": 7}, 5),
        ({}, {"alpha": 7}, 7),
        ({}, None, 128),
    ],
)
def test_alpha_comes_from_the_metadata_then_the_config_then_the_default(
    transformer: Any, tmp_path: Path, metadata: dict[str, str], config: dict[str, int] | None, alpha: float
) -> None:
    path = damaged(tmp_path, lambda tensors: None, metadata)
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapter = load_raven_adapter(path, transformer)
    assert adapter.residuals["proj_in"][2] == alpha / 4


def test_an_alpha_that_is_no_number_is_refused(transformer: Any, tmp_path: Path) -> None:
    path = damaged(tmp_path, lambda tensors: None, {"lora_alpha": "big"})
    with pytest.raises(CheckpointError, match="alpha"):
        load_raven_adapter(path, transformer)


def test_a_file_that_is_missing_or_damaged_is_refused(transformer: Any, tmp_path: Path) -> None:
    (tmp_path / "junk.safetensors").write_bytes(b"no safetensors file")
    for name in ("nowhere.safetensors", "junk.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            load_raven_adapter(tmp_path / name, transformer)


def test_the_only_adapter_of_a_model_directory_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        find_adapter(tmp_path)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "b.safetensors").touch()
    assert find_adapter(tmp_path).name == "b.safetensors"
    (tmp_path / "adapters" / "a.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"found a\.safetensors, b\.safetensors"):
        find_adapter(tmp_path)


@pytest.fixture
def two_adapters(transformer: Any) -> tuple[AdapterBank, Any, dict[str, LowRankPair]]:
    """Two adapters on `proj_in`; the second also covers `proj_out`."""
    draw = torch.Generator().manual_seed(3)

    def pair(num_in: int, num_out: int, rank: int) -> LowRankPair:
        return LowRankPair(
            torch.randn(rank, num_in, generator=draw), torch.randn(num_out, rank, generator=draw), alpha=2.0 * rank
        )

    pairs = {"first": pair(96, 96, 2), "second": pair(96, 96, 3), "head": pair(96, 96, 1)}
    bank = AdapterBank(
        transformer,
        {
            "first": Adapter(transformer, {"video_patch_proj": pairs["first"]}),
            "second": Adapter(
                transformer, {"video_patch_proj": pairs["second"], "final_layer.video_out": pairs["head"]}
            ),
        },
    )
    return bank, transformer, pairs


def test_a_pass_uses_the_adapters_it_names_at_their_strengths(
    two_adapters: tuple[AdapterBank, Any, dict[str, LowRankPair]],
) -> None:
    bank, transformer, pairs = two_adapters
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(4))
    base = transformer.proj_in(x)
    assert torch.equal(base, linear(x, transformer.proj_in.weight, transformer.proj_in.bias))

    def update(name: str) -> torch.Tensor:
        return 2.0 * x @ pairs[name].down.T @ pairs[name].up.T

    with bank.using((("first", 0.5), ("second", -1.0))):
        both = transformer.proj_in(x)
        with bank.using((("second", 1.0),)):
            torch.testing.assert_close(transformer.proj_in(x), base + update("second"))
        assert torch.equal(transformer.proj_in(x), both)
    torch.testing.assert_close(both, base + 0.5 * update("first") - update("second"))
    assert torch.equal(transformer.proj_in(x), base)


def test_a_failing_pass_leaves_no_adapter_on(
    two_adapters: tuple[AdapterBank, Any, dict[str, LowRankPair]],
) -> None:
    bank, transformer, _ = two_adapters
    x = torch.ones(1, 96)
    base = transformer.proj_in(x)
    with pytest.raises(ZeroDivisionError), bank.using((("first", 1.0),)):
        raise ZeroDivisionError
    assert torch.equal(transformer.proj_in(x), base)


def test_attaching_to_a_module_that_is_no_plain_linear_attaches_nothing(transformer: Any) -> None:
    class FusedLinear(nn.Linear):
        pass

    transformer.proj_out = FusedLinear(96, 96)
    pair = LowRankPair(torch.zeros(1, 96), torch.zeros(96, 1), 1.0)
    adapter = Adapter(transformer, {"video_patch_proj": pair, "final_layer.video_out": pair})
    with pytest.raises(CheckpointError, match="cannot be attached to proj_out, a FusedLinear"):
        AdapterBank(transformer, {"x": adapter})
    assert not transformer.proj_in._forward_hooks


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
