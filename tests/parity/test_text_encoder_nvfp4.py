"""NVFP4 weights against comfy-kitchen's results, and a whole file of them against the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.text_encoder.encoder import hidden_states
from services.text_encoder.nvfp4 import Int8Embedding, Nvfp4Linear, unpacked, untiled_scales
from services.text_encoder.weights import load_language_model
from tests.text_encoder_files import (
    H3,
    TAP_LAYER,
    State,
    formula,
    golden_state,
    nvfp4_state,
    unquantised,
    write_folder,
    write_nvfp4,
)

CPU = torch.device("cpu")
CASES = ("a", "b", "c")
"""Weights of 144 x 96, 272 x 64 and 16 x 128: rows above, between and below the padding to 128, blocks padded to 4."""


@pytest.fixture(scope="module")
def vectors() -> State:
    torch.set_num_threads(1)
    return load_file(H3 / "nvfp4_cases.safetensors")


@pytest.fixture(scope="module")
def quantised() -> State:
    """The golden model in the format of the published file, cut to the layers that are read."""
    torch.set_num_threads(1)
    return nvfp4_state(golden_state(), TAP_LAYER)


@pytest.fixture(scope="module")
def file(quantised: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nvfp4(tmp_path_factory.mktemp("nvfp4") / "encoder.safetensors", quantised, TAP_LAYER)


def module_of(vectors: State, case: str) -> Nvfp4Linear:
    packed = vectors[f"{case}.weight"]
    module = Nvfp4Linear(2 * packed.shape[1], len(packed), has_pre_quant_scale=True)
    scales = untiled_scales(vectors[f"{case}.weight_scale"], module.num_outputs, module.num_inputs)
    state = {name: vectors[f"{case}.{name}"] for name in ("weight", "weight_scale_2", "pre_quant_scale")}
    module.load_state_dict(state | {"weight_scale": scales})
    return module


@pytest.mark.parametrize("case", CASES)
def test_unpacked_weights_are_the_golden_ones(vectors: State, case: str) -> None:
    """Exact: both sides multiply the same float32 numbers in the same order."""
    module = module_of(vectors, case)
    weight = unpacked(module.weight, module.weight_scale, module.weight_scale_2, torch.float32)
    assert torch.equal(weight, vectors[f"{case}.expected_weight"])


@pytest.mark.parametrize("case", CASES)
def test_a_bfloat16_weight_is_the_golden_one_rounded_once(vectors: State, case: str) -> None:
    module = module_of(vectors, case)
    weight = unpacked(module.weight, module.weight_scale, module.weight_scale_2, torch.bfloat16)
    assert torch.equal(weight, vectors[f"{case}.expected_weight"].bfloat16())


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_linear_layer_gives_the_golden_output(vectors: State, case: str) -> None:
    """Tolerance 1e-5: float32 sums of up to 128 terms of order 1."""
    difference = (module_of(vectors, case)(vectors[f"{case}.x"]) - vectors[f"{case}.expected_y"]).abs().max().item()
    print(f"NVFP4 linear layer {case}: largest difference {difference:.1e}")
    assert difference <= 1e-5


def test_a_quantised_embedding_gives_the_golden_rows(vectors: State) -> None:
    expected = vectors["embed.expected_weight"]
    module = Int8Embedding(*expected.shape, torch.float32)
    module.load_state_dict({name: vectors[f"embed.{name}"] for name in ("weight", "weight_scale")})
    assert torch.equal(module(torch.arange(len(expected))), expected)
    assert torch.equal(module(torch.tensor([[3, 3], [0, 23]])), expected[torch.tensor([[3, 3], [0, 23]])])


def test_every_weight_of_a_loaded_file_is_the_formulas(quantised: State, file: Path) -> None:
    """Exact, in float32: through header, key map, loading and rearranged scales nothing is lost or mixed up."""
    modules = {
        name: module
        for name, module in load_language_model(file, "float32").module.named_modules()
        if isinstance(module, Nvfp4Linear)
    }
    assert len(modules) == 7 * TAP_LAYER
    for name, module in modules.items():
        weight = unpacked(module.weight, module.weight_scale, module.weight_scale_2, torch.float32)
        assert torch.equal(weight, formula(quantised, f"model.{name}")), name
        assert (module.pre_quant_scale is None) != name.endswith(("o_proj", "down_proj"))


def test_hidden_states_of_a_quantised_file_are_those_of_its_unquantised_weights(
    quantised: State, file: Path, tmp_path: Path
) -> None:
    """Tolerance 2e-5 for float32 values of order 1: the scale of an input is applied to it or to the weight."""
    ids = load_file(H3 / "text_encoder_cases.safetensors")["text_input_ids"][0].tolist()
    plain = load_language_model(write_folder(tmp_path / "plain", unquantised(quantised)), "float32")
    expected = hidden_states(plain.module, ids, CPU)
    found = hidden_states(load_language_model(file, "float32").module, ids, CPU)
    difference = (found - expected).abs().max().item()
    print(f"NVFP4 hidden state: largest difference {difference:.1e} of values up to {expected.abs().max():.1f}")
    assert difference <= 2e-5


def test_a_quantised_file_is_computed_in_bfloat16_unless_more_is_asked_for(file: Path) -> None:
    """Within 5 % of the norm, which is bfloat16's share in three layers of random weights."""
    ids = load_file(H3 / "text_encoder_cases.safetensors")["text_input_ids"][0].tolist()
    exact = hidden_states(load_language_model(file, "float32").module, ids, CPU)
    model = load_language_model(file, "auto")
    found = hidden_states(model.module, ids, CPU)
    assert (exact.dtype, found.dtype, model.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    error = ((found.float() - exact).norm() / exact.norm()).item()
    print(f"NVFP4 hidden state in bfloat16 against float32: {error:.3f} of the norm")
    assert 0 < error < 0.05
