from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h3stream.errors import CheckpointError
from services.checkpoints.adapters import AdapterModule, file_problems, read_modules, recognise
from services.checkpoints.header import Header, TensorInfo
from services.checkpoints.identify import identify
from services.checkpoints.key_map import Rows
from services.checkpoints.layout import Recognition
from services.checkpoints.source import Checkpoint, StoredTensor, open_checkpoint
from tests.adapter_files import (
    ALPHA,
    FORMATS,
    RANK,
    Tensors,
    named,
    official_pairs,
    published_pairs,
    with_alphas,
    write,
)
from tests.raven_vectors import FIXTURES

RAVEN = "base_model.model.dit."
A, B = torch.zeros(2, 8), torch.zeros(8, 2)


def problems_of(path: Path) -> list[str]:
    checkpoint = open_checkpoint(path)
    recognition = recognise(checkpoint)
    assert recognition is not None
    return file_problems(checkpoint, recognition)


def modules_of(path: Path) -> dict[str, AdapterModule]:
    return {module.name: module for module in read_modules(open_checkpoint(path))[1]}


@pytest.mark.parametrize("written", FORMATS)
def test_every_format_is_told_by_its_keys(written: str, tmp_path: Path) -> None:
    name, write_format = FORMATS[written]
    path = write_format(tmp_path)
    recognition = identify(open_checkpoint(path))
    assert recognition is not None
    assert (recognition.component, recognition.layout, recognition.refusal) == ("adapter", name, None)
    assert problems_of(path) == []
    _, modules, unknown = read_modules(open_checkpoint(path))
    is_fused = any(len(module.rule.targets) > 1 for module in modules)
    assert len(modules) == (31 if is_fused else 31 + 2 * 5)  # five fused projections are three modules each
    assert unknown == ()
    doubled_b = RANK if written in ("bare", "diffsynth") else ALPHA
    assert {(module.rank, module.alpha) for module in modules} == {(RANK, doubled_b)}
    targets = [target for module in modules for target in module.rule.targets]
    assert len(targets) == len(set(targets)) == 31 + 2 * 5


@pytest.mark.parametrize(
    ("written", "qkv", "fc1"),
    [
        ("raven with a name", Rows.STACKED, Rows.SWAPPED_HALVES),
        ("comfyui", Rows.STACKED, Rows.SWAPPED_HALVES),
        ("bare", Rows.STACKED, Rows.SWAPPED_HALVES),
        ("musubi-tuner", Rows.STACKED, Rows.SWAPPED_HALVES),
        ("diffsynth", Rows.PER_HEAD, Rows.SWAPPED_HALVES),
        ("diffusers", Rows.SAME, Rows.SAME),
        ("peft", Rows.SAME, Rows.SAME),
        ("lightx2v", Rows.SAME, Rows.SAME),
    ],
)
def test_the_order_of_rows_follows_from_the_format(written: str, qkv: Rows, fc1: Rows, tmp_path: Path) -> None:
    rules = [module.rule for module in modules_of(FORMATS[written][1](tmp_path)).values()]
    assert {rule.rows for rule in rules if rule.targets[0].endswith("attn.to_q")} == {qkv}
    assert {rule.rows for rule in rules if rule.targets[0].endswith("ff.net.0.proj")} == {fc1}
    others = (rule for rule in rules if not rule.targets[0].endswith(("to_q", "to_k", "to_v", "ff.net.0.proj")))
    assert {rule.rows for rule in others} == {Rows.SAME}


def test_flat_names_are_decoded_by_the_vocabulary(tmp_path: Path) -> None:
    flat = {
        "blocks_49_attn_qkv_proj": tuple(f"transformer_blocks.49.attn.to_{part}" for part in "qkv"),
        "token_refiner_blocks_1_mlp_fc2": ("token_refiner.refiner_blocks.1.ff.net.2",),
        "final_layer_adaln_proj_linear": ("norm_out.linear",),
        "time_embedder_proj_out": ("time_embedder.linear_2",),
    }
    path = write(tmp_path / "a.safetensors", named(dict.fromkeys(flat, (A, B)), "lora_unet_"))
    assert {name: module.rule.targets for name, module in modules_of(path).items()} == flat


@pytest.mark.parametrize("block", ["blocks.007", "blocks.10000", "blocks.x", "block.1", "blocks.1.1"])
def test_a_module_that_no_dit_has_is_told(block: str, tmp_path: Path) -> None:
    module = f"{block}.mlp.fc2"
    path = write(tmp_path / "a.safetensors", named({"blocks.0.mlp.fc2": (A, B), module: (A, B)}, "diffusion_model."))
    assert problems_of(path) == [f"1 modules that the DiT does not have: {module}"]
    assert read_modules(open_checkpoint(path))[2] == (module,)


# --- alpha and rank ---------------------------------------------------------------------------------------------------


def test_ranks_and_alphas_of_modules_are_their_own() -> None:
    modules = modules_of(FIXTURES / "lora_extra.safetensors")
    assert len(modules) == 20
    assert {module.rank for module in modules.values()} == {2, 3, 4}
    assert {module.alpha for module in modules.values()} >= {1.0, 4.0}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_an_alpha_is_one_number_of_any_common_dtype(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = named({"blocks.0.mlp.fc2": (A, B)}, "diffusion_model.")
    tensors["diffusion_model.blocks.0.mlp.fc2.alpha"] = torch.full(shape, 3, dtype=dtype)
    assert modules_of(write(tmp_path / "a.safetensors", tensors))["blocks.0.mlp.fc2"].alpha == 3


@pytest.mark.parametrize(
    ("metadata", "config", "alpha"),
    [
        ({"lora_alpha": "8", "alpha": "3"}, {"lora_alpha": 5}, 8),
        ({"raven_lora_alpha": "2"}, {"lora_alpha": 5}, 2),
        ({}, {"lora_alpha": 5, "alpha": 7}, 5),
        ({}, {"alpha": 7}, 7),
        ({}, {"lora_alpha": 5, "alpha_pattern": {"dit.video_patch_proj": 6}}, 6),
        ({}, None, 128),
    ],
)
def test_ravens_alpha_comes_from_the_metadata_then_the_config_then_the_published_file(
    metadata: dict[str, str], config: dict[str, object] | None, alpha: float, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.safetensors", named({"video_patch_proj": (A, B)}, RAVEN), metadata)
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert modules_of(path)["video_patch_proj"].alpha == alpha


@pytest.mark.parametrize(
    ("prefix", "infix", "metadata", "alpha"),
    [
        ("diffusion_model.", "", {}, 2),
        ("diffusion_model.", "", {"alpha": "1"}, 1),
        ("", "", {}, 2),
        ("", ".default", {}, 2),  # DiffSynth
        ("transformer.", "", {}, 2),
        ("transformer.", "", {"alpha": "16"}, 16),
        ("published", ".default", {}, 8),  # LightX2V
        ("published", ".default", {"alpha": "128", "key_format": "minimax-h3-diffusers"}, 128),
    ],
)
def test_a_module_without_an_alpha_has_the_metadatas_or_its_formats(
    prefix: str, infix: str, metadata: dict[str, str], alpha: float, tmp_path: Path
) -> None:
    is_published = prefix in ("transformer.", "published")
    pairs = {"proj_in" if is_published else "video_patch_proj": (A, B)}
    path = write(tmp_path / "a.safetensors", named(pairs, prefix.removeprefix("published"), infix=infix), metadata)
    (module,) = modules_of(path).values()
    assert module.alpha == alpha


def test_musubis_network_alpha_serves_modules_without_their_own(tmp_path: Path) -> None:
    pairs = {"blocks_0_mlp_fc1": (A, B), "blocks_0_mlp_fc2": (A, B)}
    tensors = named(pairs, "lora_unet_") | {"lora_unet_blocks_0_mlp_fc1.alpha": torch.tensor(3.0)}
    modules = modules_of(write(tmp_path / "a.safetensors", tensors, {"ss_network_alpha": "16"}))
    assert (modules["blocks_0_mlp_fc1"].alpha, modules["blocks_0_mlp_fc2"].alpha) == (3, 16)


def test_the_configuration_that_diffusers_keeps_has_alphas_by_module(tmp_path: Path) -> None:
    pairs = {"proj_in": (A, B), "proj_out": (A, B)}
    config = {
        "transformer.r": 2,
        "transformer.lora_alpha": 4,
        "transformer.alpha_pattern": {"^proj_out": 6},
        "text_encoder.lora_alpha": 99,
    }
    path = write(
        tmp_path / "a.safetensors", named(pairs, "transformer."), {"lora_adapter_metadata": json.dumps(config)}
    )
    modules = modules_of(path)
    assert (modules["proj_in"].alpha, modules["proj_out"].alpha) == (4, 6)


@pytest.mark.parametrize(
    ("pairs", "prefix", "files", "message"),
    [
        ("proj_in", "base_model.model.", {}, "1 without an alpha, in the metadata or a adapter_config"),
        ("proj_in", "", {}, "without an alpha"),
        ("proj_in", "base_model.model.", {"adapter_config.json": '{"r": 2}'}, "without an alpha"),
        ("proj_in", "base_model.model.", {"adapter_config.json": '{"r": 3, "lora_alpha": 1}'}, "says 3: proj_in"),
        ("proj_in", "base_model.model.", {"adapter_config.json": "[]"}, r"adapter_config\.json is not a JSON object"),
        (
            "proj_in",
            "base_model.model.",
            {"adapter_config.json": '{"lora_alpha": 1, "use_rslora": true}'},
            "its PEFT configuration has use_rslora True",
        ),
        ("video_patch_proj", RAVEN, {"adapter_config.json": '{"lora_alpha": "big"}'}, "an alpha of 'big'"),
    ],
)
def test_an_alpha_that_must_be_stated_and_is_not_or_wrongly_is_a_problem(
    pairs: str, prefix: str, files: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "adapter_model.safetensors", named({pairs: (A, B)}, prefix))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (problem,) = problems_of(path)
    assert re.search(message, problem)
    with pytest.raises(CheckpointError, match=message):
        read_modules(open_checkpoint(path))


def test_a_configuration_counts_beside_pefts_own_file_name_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "style.safetensors", named({"proj_in": (A, B)}, "base_model.model."))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 4}')  # of whichever file of the folder
    assert "without an alpha" in problems_of(path)[0]


def test_a_metadata_alpha_that_is_no_number_is_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", named({"video_patch_proj": (A, B)}, RAVEN), {"lora_alpha": "big"})
    assert problems_of(path) == ["its metadata says lora_alpha 'big', which is no number above 0 and up to 1e+06"]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_tensor_must_be_above_0(alpha: float, tmp_path: Path) -> None:
    tensors = with_alphas(named({"blocks.0.mlp.fc2": (A, B)}, "diffusion_model."), alpha)
    told = r"1 alphas that are no number above 0 and up to 1e\+06: blocks\.0\.mlp\.fc2"
    with pytest.raises(CheckpointError, match=told):
        read_modules(open_checkpoint(write(tmp_path / "a.safetensors", tensors)))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "layout", "reason"),
    [
        ({"blocks.0.mlp.fc2.dora_scale": A}, "DoRA", "normalises the weights"),
        ({"blocks.0.mlp.fc2.lora_magnitude_vector": A}, "DoRA", "normalises the weights"),
        ({"lycoris_blocks_0_mlp_fc2.hada_w1_a": A}, "LoHa", "product of two low-rank ones"),
        ({"lycoris_blocks_0_mlp_fc2.lokr_w1": A}, "LoKr", "Kronecker product"),
        ({"blocks.0.mlp.fc2.oft_blocks": A}, "OFT", "rotates"),
        ({"blocks.0.mlp.fc2.lora_mid.weight": A}, "LoCon", "for convolutions"),
        ({"diffusion_model.blocks.0.mlp.fc2.diff": A}, "full weights", "full differences or replacements"),
        ({"diffusion_model.blocks.0.mlp.fc2.diff_b": A}, "full weights", "full differences"),
        ({"final_layer.video_out.set_weight": A}, "full weights", "full differences"),
        ({"transformer.proj_in.lora_B.bias": A}, "LoRA with biases", "changes biases"),
    ],
)
def test_other_kinds_of_adapters_are_refused_with_the_reason(
    tensors: Tensors, layout: str, reason: str, tmp_path: Path
) -> None:
    plain = named({"blocks.0.mlp.fc1": (A, B)})
    for number, content in enumerate((plain | tensors, tensors)):
        recognition = recognise(open_checkpoint(write(tmp_path / f"{number}.safetensors", content)))
        assert recognition is not None
        assert (recognition.component, recognition.layout) == ("adapter", layout)
        assert reason in str(recognition.refusal)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (named({"lora_te1_text_model_encoder_layers_0": (A, B)}), "changes the text encoder"),
        (named({"text_encoder.layers.0.q_proj": (A, B), "transformer.proj_in": (A, B)}), "changes the text encoder"),
        (named({"proj_in": (A, B)}, "transformer.") | named({"proj_out": (A, B)}, "transformer_ref."), "both DiT part"),
        (
            named({"double_blocks.0.img_attn.qkv": (A, B), "single_blocks.3.linear1": (A, B)}, "diffusion_model."),
            "is an adapter of another model: 0 of its 2 modules match the DiT's",
        ),
        (named({"model.layers.0.self_attn.q_proj": (A, B)}, "base_model.model."), "0 of its 1 modules match"),
        (
            named({"blocks.0.attn.qkv_proj": (A, B)}, "base_model.model."),
            r"names modules of the DiT as no known format does, such as base_model\.model\.blocks\.0\.attn\.qkv_proj",
        ),
        (named({"blocks.0.attn.qkv_proj": (A, B)}, "model.diffusion_model."), "as no known format does"),
        (named({"blocks.0.attn.qkv_proj": (A, B)}, infix=".style"), "as no known format does"),
        (named({"blocks.0.adaln_proj.linear": (A, B)}, "diffusion_model."), "pruned DiT, .* 8 inputs"),
        (named({"norm_out.linear": (torch.zeros(2, 64), B)}, "transformer."), "pruned DiT, .* 64 inputs"),
    ],
)
def test_adapters_of_other_models_parts_and_shapes_are_refused(tensors: Tensors, reason: str, tmp_path: Path) -> None:
    recognition = recognise(open_checkpoint(write(tmp_path / "a.safetensors", tensors)))
    assert recognition is not None
    assert re.search(reason, str(recognition.refusal))


@pytest.mark.parametrize("name", ["model", "video_vae.v1.weights", "audio_vae.s1.weights"])
def test_other_weights_are_no_adapters(name: str) -> None:
    assert recognise(open_checkpoint(FIXTURES / f"{name}.safetensors")) is None


KEY = f"{RAVEN}blocks.0.mlp.fc2.lora"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.update({f"{RAVEN}junk": A}), f"1 unknown: {RAVEN}junk"),
        (lambda t: t.update({f"{RAVEN}blocks.0.mlp.fc2.alpha": A[0, 0]}), f"1 unknown: {RAVEN}blocks.0.mlp.fc2.alpha"),
        (lambda t: t.update(named({"blocks.0.mlp.fc1": (A, B)}, "diffusion_model.")), "2 unknown: diffusion_model.blo"),
        (lambda t: t.update({f"{KEY}_A.x.weight": A}), f"1 repeated: {KEY}_A.x.weight"),
        (lambda t: t.update({f"{KEY}_down.weight": A}), f"1 repeated: {KEY}_"),
        (lambda t: t.pop(f"{KEY}_A.weight"), f"1 without their other half: {KEY}_B.weight"),
        (
            lambda t: t.update(
                {f"{RAVEN}video_patch_proj.lora_A.x.weight": A, f"{RAVEN}video_patch_proj.lora_B.y.weight": B}
            ),
            "adapters of 2 names in one file: x, y",
        ),
        (lambda t: t.update({f"{KEY}_A.weight": A.half()}), "1 F16, expected F32: blocks.0.mlp.fc2"),
        (lambda t: t.update({f"{KEY}_B.weight": A}), "1 of A [2, 8] and B [2, 8], which are no pair: blocks.0.mlp.fc2"),
        (lambda t: t.update({f"{KEY}_A.weight": torch.zeros(0, 8)}), "1 of A [0, 8] and B [8, 2], which are no pair"),
        (lambda t: t.update({f"{KEY}_A.weight": torch.zeros(2, 8, 1, 1)}), "1 of A [2, 8, 1, 1] and B [8, 2], which"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(change: Callable[[Tensors], object], problem: str, tmp_path: Path) -> None:
    tensors = named({"blocks.0.mlp.fc2": (A, B), "blocks.1.mlp.fc2": (A, B)}, RAVEN)
    change(tensors)
    path = write(tmp_path / "a.safetensors", tensors)
    (found,) = problems_of(path)
    assert found.startswith(problem)
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        read_modules(open_checkpoint(path))


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    pairs = {f"blocks.{i}.mlp.fc2": (A, B) for i in range(50)}
    tensors = named(pairs, "diffusion_model.") | {
        "junk": A,
        "diffusion_model.blocks.3.mlp.fc2.alpha": A,
        "diffusion_model.blocks.50.mlp.fc2.lora_A.weight": A,
        "diffusion_model.blocks.4.mlp.fc2.lora_A.weight": A.double(),
    }
    assert set(problems_of(write(tmp_path / "a.safetensors", tensors))) == {
        "1 unknown: junk",
        "1 without their other half: diffusion_model.blocks.50.mlp.fc2.lora_A.weight",
        "1 whose alpha is F32 [2, 8], which is no number: blocks.3.mlp.fc2",
        "1 F64, expected F32 or BF16 or F16: blocks.4.mlp.fc2",
    }


def test_keys_of_another_format_are_unknown_even_where_the_format_has_no_prefix(tmp_path: Path) -> None:
    bare = {"blocks.0.mlp.fc2": (A, B), "blocks.1.mlp.fc2": (A, B)}
    for others in (named({"blocks.2.mlp.fc2": (A, B)}, "diffusion_model."), named({"proj_in": (A, B)})):
        (problem,) = problems_of(write(tmp_path / "a.safetensors", named(bare) | others))
        assert problem.startswith("2 unknown: ")


@pytest.mark.parametrize(
    ("name", "tensors", "note"),
    [
        (
            "a",
            named({"proj_in": (A, B)}, "transformer."),
            "Whether it was trained on the fl2va or the ",
        ),
        ("minimax_h3_fl2v_turbo_4step", named({"proj_in": (A, B)}, "transformer."), ""),
        ("MiniMax-H3-Ref2VA-style", named({"proj_in": (A, B)}, "transformer."), "It was trained on the ref2va DiT"),
        ("a", named({"proj_in": (A, B)}, "transformer_ref."), "It was trained on the ref2va DiT"),
        ("a", named({"video_patch_proj": (A, B)}, RAVEN), ""),
        ("ref2va_to_fl2va", named({"proj_in": (A, B)}, "transformer."), "Whether it was trained"),
        ("preset2va", named({"proj_in": (A, B)}, "transformer."), "Whether it was trained"),
    ],
)
def test_the_weights_that_an_adapter_is_for_are_told_by_prefix_or_name(
    name: str, tensors: Tensors, note: str, tmp_path: Path
) -> None:
    recognition = recognise(open_checkpoint(write(tmp_path / f"{name}.safetensors", tensors)))
    assert isinstance(recognition, Recognition)
    assert [text.startswith(note) for text in recognition.notes] == ([True] if note else [])


# --- any file ---------------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        *(
            "base_model.model.",
            "dit.",
            "diffusion_model.",
            "transformer.",
            "transformer_ref.",
            "lora_unet_",
            "lora_te_",
        ),
        *("blocks.", "blocks_", "0", "7", ".", "_", "attn.qkv_proj", "attn_qkv_proj", "transformer_blocks.", "proj_in"),
        *(".lora_A", ".lora_B", ".lora_down", ".lora_up", ".default", ".weight", ".alpha", ".bias", ".dora_scale"),
        *("mlp.fc1", "ff.net.0.proj", ".adaln_proj.linear", "\n", "\x1b[2J", "é", ""),
    ]
)
MODULES = sorted(official_pairs()) + sorted(published_pairs(official_pairs()))
KEYS = st.lists(FRAGMENTS, min_size=1, max_size=9).map("".join) | st.builds(
    lambda prefix, module, suffix: f"{prefix}{module}{suffix}",
    st.sampled_from(["", RAVEN, "base_model.model.", "diffusion_model.", "transformer.", "lora_unet_"]),
    st.sampled_from(MODULES) | st.sampled_from([module.replace(".", "_") for module in MODULES]),
    st.sampled_from([".lora_A.weight", ".lora_B.weight", ".lora_up.weight", ".lora_A.default.weight", ".alpha"]),
)
INFOS = st.builds(
    lambda dtype, shape: TensorInfo(dtype, tuple(shape), 0, 8),
    st.sampled_from(["F32", "BF16", "F16", "F8_E4M3", "I64", "BOOL"]),
    st.lists(st.sampled_from([0, 1, 2, 8, 64]), max_size=3),
)
METADATA = st.dictionaries(
    st.sampled_from(["lora_alpha", "alpha", "ss_network_alpha", "lora_adapter_metadata"]),
    st.sampled_from(["8", "nan", "", "{}", "[1]", '{"lora_alpha": 4}', '{"transformer.use_dora": true}', "\ud800"]),
)


@given(st.dictionaries(KEYS, INFOS, min_size=1, max_size=12), METADATA)
def test_whatever_the_header_it_is_told_what_it_is_or_refused(
    tensors: dict[str, TensorInfo], metadata: dict[str, str]
) -> None:
    path = Path("/nowhere/adapter_model.safetensors")
    stored = {key: StoredTensor(path, info) for key, info in tensors.items()}
    header = Header(path, 8, 8, metadata, tensors, "")
    checkpoint = Checkpoint(path, (header,), stored, has_index=False, config=None)
    recognition = recognise(checkpoint)
    if recognition is None or recognition.refusal is not None:
        return
    problems = file_problems(checkpoint, recognition)
    assert all(text.isprintable() for text in problems)
    try:
        _, modules, unknown = read_modules(checkpoint)
    except CheckpointError:  # for its problems, or because there is no file to read alphas from
        return
    assert len(problems) == (1 if unknown else 0)
    assert len({target for module in modules for target in module.rule.targets}) >= len(modules) > 0
