"""What a text encoder file is, told by its header; the published files by their key tables."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from services.checkpoints.header import TensorInfo
from services.checkpoints.source import Checkpoint, StoredTensor, open_checkpoint
from services.checkpoints.text_encoder import describe, file_problems, marker_problem, recognise
from tests.text_encoder_files import GOLDEN, INT8_MARKER, NVFP4_MARKER, comfyui_state, golden_state, published

TABLES = ("transformers", "comfy_bf16", "comfy_nvfp4_awq")
LAYOUTS = {"transformers": "transformers", "comfy_bf16": "comfyui", "comfy_nvfp4_awq": "comfyui"}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def checkpoint_of(tensors: Tensors, config: dict[str, Any] | None = None) -> Checkpoint:
    path = Path("file.safetensors")
    stored = {key: StoredTensor(path, TensorInfo(dtype, shape, 0, 0)) for key, (dtype, shape) in tensors.items()}
    return Checkpoint(path, (), stored, has_index=False, config=config)


def edited(name: str, edit: Callable[[Tensors], object], config: dict[str, Any] | None = None) -> Checkpoint:
    """A published file of which the header says something else."""
    tensors = {key: (stored.info.dtype, stored.info.shape) for key, stored in published(name).tensors.items()}
    edit(tensors)
    return checkpoint_of(tensors, config)


def faults_of(checkpoint: Checkpoint) -> list[str]:
    recognition = recognise(checkpoint)
    assert recognition is not None
    assert recognition.refusal is None
    return file_problems(checkpoint, recognition)


def refusal_of(checkpoint: Checkpoint) -> str:
    recognition = recognise(checkpoint)
    assert recognition is not None
    assert recognition.component == "text_encoder"
    assert recognition.refusal is not None
    return recognition.refusal


def published_config() -> dict[str, Any]:
    """What the published folder's config.json says of the language model."""
    return {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "head_dim": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_hidden_layers": 64,
            "attention_bias": False,
            "rope_theta": 5_000_000,
        },
    }


@pytest.mark.parametrize(("name", "num_keys"), [("transformers", 1058), ("comfy_bf16", 902), ("comfy_nvfp4_awq", 2054)])
def test_every_key_of_a_published_file_is_read_or_left_exactly_once(name: str, num_keys: int) -> None:
    checkpoint = published(name)
    recognition = recognise(checkpoint)
    assert recognition is not None
    assert (recognition.component, recognition.layout, recognition.refusal) == ("text_encoder", LAYOUTS[name], None)
    assert file_problems(checkpoint, recognition) == []
    contents = describe(checkpoint, recognition)
    assert len(checkpoint.tensors) == num_keys
    for key in checkpoint.tensors:
        assert (key in contents.key_map) + contents.is_unread(key) == 1, key
    assert contents.key_map.keys() <= checkpoint.tensors.keys()
    targets = [target for rule in contents.key_map.values() for target in rule.targets]
    assert sorted(targets) == sorted(contents.parameters)
    assert contents.num_parameters == 25_157_829_120


def test_what_headers_tell_is_what_the_published_config_says() -> None:
    stated = published_config()["text_config"]
    for name in TABLES:
        checkpoint = published(name)
        recognition = recognise(checkpoint)
        assert recognition is not None
        settings = describe(checkpoint, recognition).settings
        assert {key: settings[key] for key in stated if key != "rope_theta"} == {
            key: value for key, value in stated.items() if key != "rope_theta"
        } | {"num_hidden_layers": 50}
        assert settings["rope_parameters"]["rope_theta"] == stated["rope_theta"]


def test_a_folders_config_and_its_header_lead_to_the_same_parameters() -> None:
    by_header, by_config = published("transformers"), published("transformers", published_config())
    recognition = recognise(by_config)
    assert recognition == recognise(by_header)
    assert recognition is not None
    assert file_problems(by_config, recognition) == []
    assert describe(by_config, recognition).parameters == describe(by_header, recognition).parameters


def test_only_a_quantised_file_is_noted_as_one() -> None:
    for name in TABLES:
        recognition = recognise(published(name))
        assert recognition is not None
        assert bool(recognition.notes) == (name == "comfy_nvfp4_awq")


def test_the_vision_tower_may_be_missing_where_the_config_names_the_model() -> None:
    def drop_vision(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith("model.visual.")]:
            del tensors[key]

    assert faults_of(edited("transformers", drop_vision, published_config())) == []


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: f"text_encoders.qwen3vl_32b.transformer.{key}",
        lambda key: f"model.{key}",
        lambda key: key.removeprefix("model."),
        lambda key: key.replace("q_norm", "qnorm"),
    ],
)
def test_names_of_no_known_layout_are_not_recognised(rename: Callable[[str], str]) -> None:
    tensors = {rename(key): (s.info.dtype, s.info.shape) for key, s in published("comfy_bf16").tensors.items()}
    assert recognise(checkpoint_of(tensors)) is None


def test_a_language_model_without_pictures_is_refused() -> None:
    """Qwen3-32B has the same keys and shapes as the language model of ComfyUI's file, and other weights."""

    def drop_vision(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith("visual.")]:
            del tensors[key]

    assert "without the vision tower" in refusal_of(edited("comfy_bf16", drop_vision))
    assert "config.json of type 'qwen3'" in refusal_of(edited("comfy_bf16", drop_vision, {"model_type": "qwen3"}))


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [("I8", "has INT8 weights"), ("F8_E4M3", "has FP8 weights"), ("U8", "packed in a way that is not known")],
)
def test_other_quantisations_are_refused_with_the_reason_and_what_to_take(dtype: str, reason: str) -> None:
    def quantise(tensors: Tensors) -> None:
        for key, (_, shape) in list(tensors.items()):
            if "_proj.weight" in key:
                tensors[key] = (dtype, shape)
                tensors[f"{key}_scale"] = ("F32", (shape[0], 1))

    for name in ("transformers", "comfy_bf16"):
        refusal = refusal_of(edited(name, quantise))
        assert reason in refusal
        assert "nvfp4_awq" in refusal


def test_packed_weights_under_other_names_are_refused() -> None:
    def pack(tensors: Tensors) -> None:
        for key, (_, (rows, *_)) in list(tensors.items()):
            if "_proj.weight" in key:
                del tensors[key]
                tensors[f"{key}_packed"] = ("I32", (rows, 640))

    assert "packed in a way that is not known" in refusal_of(edited("transformers", pack))


def test_nvfp4_under_transformers_names_is_refused() -> None:
    """Other tools order its codes and scales otherwise; the dtypes and shapes are the same."""
    tensors = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else f"model.{key}": (
            stored.info.dtype,
            stored.info.shape,
        )
        for key, stored in published("comfy_nvfp4_awq").tensors.items()
    }
    assert "packed in a way that is not known" in refusal_of(checkpoint_of(tensors))


def test_every_kind_of_fault_of_a_quantised_file_is_told() -> None:
    layer = "model.layers.7"

    def spoil(tensors: Tensors) -> None:
        del tensors[f"{layer}.mlp.down_proj.pre_quant_scale"]
        tensors[f"{layer}.mlp.up_proj.pre_quant_scale"] = ("BF16", (5120,))
        del tensors[f"{layer}.mlp.up_proj.comfy_quant"]
        tensors[f"{layer}.mlp.gate_proj.comfy_quant"] = ("U8", (1025,))
        tensors[f"{layer}.self_attn.q_proj.weight_scale"] = ("F8_E4M3", (8192, 319))
        tensors[f"{layer}.self_attn.q_proj.weight_scale_2"] = ("F32", (1,))
        tensors[f"{layer}.self_attn.k_proj.weight"] = ("U8", (1024, 5120))
        tensors["model.embed_tokens.weight_scale"] = ("F16", (151936, 1))
        tensors["visual.blocks.0.attn.qkv.weight_scale"] = ("F32", ())

    assert set(faults_of(edited("comfy_nvfp4_awq", spoil))) == {
        f"1 missing: {layer}.mlp.down_proj.pre_quant_scale",
        f"2 unknown: {layer}.mlp.up_proj.pre_quant_scale, visual.blocks.0.attn.qkv.weight_scale",
        f"1 of shape [8192, 319], expected [8192, 320]: {layer}.self_attn.q_proj.weight_scale",
        f"1 of shape [1], expected []: {layer}.self_attn.q_proj.weight_scale_2",
        f"1 of shape [1024, 5120], expected [1024, 2560]: {layer}.self_attn.k_proj.weight",
        "1 F16, expected F32: model.embed_tokens.weight_scale",
        f"2 missing or no text of up to 1024 bytes: {layer}.mlp.gate_proj.comfy_quant, {layer}.mlp.up_proj.comfy_quant",
    }


def test_a_file_with_too_few_layers_says_how_many_are_wanted() -> None:
    def cut(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith("model.layers.") and int(key.split(".")[2]) >= 36]:
            del tensors[key]

    (fault,) = faults_of(edited("comfy_bf16", cut))
    assert fault == (
        "hidden state 50 is wanted (h3_hidden_state_index, 50 where it is absent), but the model has 36 layers"
    )


def test_a_layer_that_is_missing_between_others_is_named() -> None:
    def cut(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith("model.layers.20.")]:
            del tensors[key]

    (fault,) = faults_of(edited("comfy_bf16", cut))
    assert fault.startswith("11 missing: model.layers.20.input_layernorm.weight, model.layers.20.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("key", "stored", "fault"),
    [
        ("model.embed_tokens.weight", None, "model.embed_tokens.weight is missing or empty"),
        ("model.embed_tokens.weight", ("BF16", ()), "model.embed_tokens.weight is missing or empty"),
        ("model.layers.0.self_attn.q_norm.weight", ("BF16", (0,)), "q_norm.weight is missing or empty"),
        ("model.layers.0.self_attn.q_norm.weight", ("BF16", (96,)), "hold no heads of 96"),
        ("model.layers.0.self_attn.q_norm.weight", ("BF16", (1,)), "make no attention layer"),
        ("model.layers.0.self_attn.k_proj.weight", ("BF16", (640, 5120)), "make no attention layer"),
        ("model.layers.999999999.input_layernorm.weight", ("BF16", (5120,)), "at most 1000 are accepted"),
    ],
)
def test_shapes_that_make_no_model_are_told(key: str, stored: tuple[str, tuple[int, ...]] | None, fault: str) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors.pop(key, None)
        if stored is not None:
            tensors[key] = stored

    (found,) = faults_of(edited("comfy_bf16", spoil))
    assert fault in found


def test_widths_that_do_not_fit_the_blocks_of_nvfp4_are_told() -> None:
    def narrow(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] = ("I8", (151936, 5121))

    (fault,) = faults_of(edited("comfy_nvfp4_awq", narrow))
    assert fault == "layers.0.self_attn.q_proj has 5121 columns; NVFP4 weights need a multiple of 16"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"hidden_size": "wide"}, "states hidden_size 'wide'; it must be an integer of 1 or more"),
        ({"head_dim": True}, "states head_dim True"),
        ({"vocab_size": 0}, "states vocab_size 0"),
        ({"num_key_value_heads": None}, "states num_key_value_heads None"),
        ({"num_key_value_heads": 7}, "make no attention layer"),
        ({"num_hidden_layers": 10**9}, "at most 1000 are accepted"),
        ({"attention_bias": True}, "asks for attention_bias"),
        ({"rope_theta": ...}, "states no rope_theta"),
        ({"intermediate_size": 25601}, "expected [25601, 5120]"),
    ],
)
def test_a_config_that_makes_no_model_or_another_one_is_told(change: dict[str, Any], fault: str) -> None:
    config = copy.deepcopy(published_config())
    text_config = config["text_config"] | change
    config["text_config"] = {key: value for key, value in text_config.items() if value is not ...}
    faults = faults_of(published("transformers", config))
    assert any(fault in found for found in faults)


def test_a_config_without_the_language_model_is_told() -> None:
    assert faults_of(published("transformers", {"model_type": "qwen3_vl"})) == ["its config.json has no text_config"]


@pytest.mark.parametrize(("stated", "num_layers"), [("3", 3), ("4", 4), (None, 50), ("0", 0), ("5", 5), ("x", 0)])
def test_a_file_without_config_says_in_its_metadata_which_hidden_state_is_meant(
    tmp_path: Path, stated: str | None, num_layers: int
) -> None:
    file = tmp_path / "encoder.safetensors"
    save_file(comfyui_state(golden_state(), 4), file, stated and {"h3_hidden_state_index": stated})
    checkpoint = open_checkpoint(file)
    recognition = recognise(checkpoint)
    assert recognition is not None
    faults = file_problems(checkpoint, recognition)
    if num_layers in (3, 4):
        assert faults == []
        assert describe(checkpoint, recognition).settings["num_hidden_layers"] == num_layers
    else:
        assert len(faults) == 1
        assert "is wanted" in faults[0]
        assert faults[0].endswith("but the model has 4 layers")


def test_the_markers_of_the_published_file_are_the_ones_that_are_computed_with() -> None:
    """Their lengths are those of the published file's table."""
    tensors = published("comfy_nvfp4_awq").tensors
    for key, text in (
        ("model.embed_tokens.comfy_quant", INT8_MARKER),
        ("model.layers.0.mlp.up_proj.comfy_quant", NVFP4_MARKER),
    ):
        assert tensors[key].info.shape == (len(text),)
        assert marker_problem(key, text) is None
        assert marker_problem(key, json.dumps(json.loads(text), indent=2).encode()) is None


@pytest.mark.parametrize("text", [INT8_MARKER, b"", b"nvfp4", b"[]", b'{"format": "nvfp4"}', b"\x00" * 55, b"[" * 1000])
def test_other_markers_are_told_in_a_few_printable_characters(text: bytes) -> None:
    problem = marker_problem("model.layers.0.mlp.up_proj.comfy_quant", text)
    assert problem is not None
    assert problem.startswith("model.layers.0.mlp.up_proj.comfy_quant says ")
    assert problem.isprintable()
    assert len(problem) < 350


def test_the_golden_model_is_described_by_its_config() -> None:
    config = GOLDEN["transformers_config"] | {"model_type": "qwen3_vl", "h3_hidden_state_index": 3}
    checkpoint = replace(published("transformers"), config=config)
    recognition = recognise(checkpoint)
    assert recognition is not None
    assert describe(checkpoint, recognition).settings["num_hidden_layers"] == 3
    assert "1 of shape [151936, 5120], expected [320, 48]: model.language_model.embed_tokens.weight" in file_problems(
        checkpoint, recognition
    )
