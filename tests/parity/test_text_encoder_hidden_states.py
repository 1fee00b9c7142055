"""Our cut of the text encoder against the golden vectors and against the whole model of the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.text_encoder.encoder import hidden_states
from services.text_encoder.prompt import PromptTokenizer
from services.text_encoder.weights import load_language_model

H3 = Path(__file__).parents[1] / "fixtures" / "h3"
CPU = torch.device("cpu")


@pytest.fixture
def golden_directory(tmp_path: Path) -> Path:
    """The model of the vectors as a text encoder folder."""
    golden = json.loads((H3 / "text_encoder_config.json").read_text())
    config = golden["transformers_config"] | {"model_type": "qwen3_vl", "h3_hidden_state_index": golden["tap_layer"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(H3 / "text_encoder_state.safetensors")
    return tmp_path


def test_hidden_states_of_a_text_equal_the_golden_ones(golden_directory: Path) -> None:
    """Tolerance 1e-5: fp32 values of order 1 from another build of the same operators."""
    torch.set_num_threads(1)
    case = load_file(H3 / "text_encoder_cases.safetensors")
    model = load_language_model(golden_directory, "auto")
    found = hidden_states(model.module, case["text_input_ids"][0].tolist(), CPU)
    expected = case["text_hidden"][0]
    assert found.shape == expected.shape == (13, 48)
    difference = (found - expected).abs().max().item()
    print(f"text hidden state: largest difference {difference:.1e} of values up to {expected.abs().max():.1f}")
    assert difference <= 1e-5


def test_a_final_norm_would_be_noticed(golden_directory: Path) -> None:
    """The vectors can tell the hidden state from its normalised form, so the test above means something."""
    case = load_file(H3 / "text_encoder_cases.safetensors")
    model = load_language_model(golden_directory, "auto")
    found = hidden_states(model.module, case["text_input_ids"][0].tolist(), CPU)
    normalised = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + 1e-6)
    assert (normalised - case["text_hidden"][0]).abs().max() > 0.1


@torch.no_grad()
def test_the_cut_model_computes_what_the_whole_model_computes(tiny_model: Path) -> None:
    """Difference 0: the same operators on the same weights, and nothing above the tapped layer feeds back."""
    from transformers import Qwen3VLForConditionalGeneration

    torch.set_num_threads(1)
    directory = tiny_model / "text_encoder"
    model = load_language_model(directory, "auto")
    ids = PromptTokenizer(tiny_model / "tokenizer", model.vocab_size).ids("She says: <d>[English] It's late.</d> 日落")
    whole = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype="auto", local_files_only=True)
    output = whole.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    expected = output.hidden_states[4][0]
    found = hidden_states(model.module, ids, CPU)
    print(f"cut against whole model: largest difference {(found - expected).abs().max().item():.1e}")
    assert torch.equal(found, expected)
    assert not torch.equal(found, output.hidden_states[3][0])
