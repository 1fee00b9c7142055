from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints.dit import (
    CLASS_NAME,
    UNDECIDED,
    choose_layout,
    describe,
    file_problems,
    partition_of,
    recognise,
    stack_dtypes,
)
from services.checkpoints.dit_modules import (
    INV_FREQ,
    Architecture,
    DitLayout,
    key_map,
    module_rows,
    official_modules,
    parameter_shapes,
)
from services.checkpoints.header import BITS, Header, TensorInfo
from services.checkpoints.key_map import Rows, stored_shape
from services.checkpoints.layout import Recognition
from services.checkpoints.source import Checkpoint, StoredTensor, open_checkpoint
from tests.dit_layouts import described
from tests.weight_files import TABLES, published, write_shards, write_sparse

TABLE_OF = {"diffusers": "dit.diffusers", "official": "dit.official", "comfyui": "dit.comfy_bf16"}
LAYOUTS: tuple[DitLayout, ...] = ("diffusers", "official", "comfyui")
SMALL = Architecture(
    num_layers=3,
    num_refiner_layers=1,
    num_attention_heads=2,
    attention_head_dim=128,
    hidden_size=64,
    ffn_dim=80,
    text_dim=40,
    freq_dim=12,
    time_embed_hidden_dim=56,
    time_embed_dim=24,
)
Tensors = dict[str, tuple[tuple[int, ...], str]]


def small(layout: DitLayout, prefix: str = "") -> Tensors:
    """Shape and dtype of every tensor of a small model."""
    return described(layout, SMALL, prefix)


def checkpoint(
    tensors: Tensors,
    path: str = "/models/minimax_h3_bf16.safetensors",
    files: tuple[str, ...] = (),
    *,
    has_index: bool = False,
    config: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> Checkpoint:
    """A checkpoint that is in no file: all that is looked at are headers."""
    paths = [Path(path, name) for name in files] or [Path(path)]
    infos = {key: TensorInfo(dtype, tuple(shape), 0, 0) for key, (shape, dtype) in tensors.items()}
    headers = tuple(Header(file, 0, 0, metadata or {}, infos, text_sha256="") for file in paths)
    stored = {key: StoredTensor(paths[0], info) for key, info in infos.items()}
    return Checkpoint(Path(path), headers, stored, has_index, config)


def recognised(tensors: Tensors, *args: Any, **kwargs: Any) -> Recognition:
    found = recognise(checkpoint(tensors, *args, **kwargs))
    assert found is not None
    return found


def faults_of(found: Checkpoint) -> str:
    recognition = recognise(found)
    assert recognition is not None
    assert recognition.refusal is None
    return "; ".join(file_problems(found, recognition))


def class_config(architecture: Architecture = SMALL) -> dict[str, Any]:
    return {"_class_name": CLASS_NAME, **vars(architecture), "patch_size": list(architecture.patch_size)}


class TestThePublishedFiles:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_tensor_is_used_once_and_every_parameter_made_once(self, layout: DitLayout) -> None:
        table, expected = published(TABLE_OF[layout]), published("dit.diffusers")
        rules, shapes = key_map(layout, 50, 2, 56), parameter_shapes(Architecture())
        assert rules.keys() == table.keys()
        made = Counter(target for rule in rules.values() for target in rule.targets)
        assert made == Counter(expected.keys())
        assert {name: list(shape) for name, shape in shapes.items()} == {name: t[0] for name, t in expected.items()}
        for key, rule in rules.items():
            shape, dtype = table[key]
            assert {expected[target][1] for target in rule.targets} <= {dtype}, key
            assert key.endswith(INV_FREQ) if not rule.targets else stored_shape(rule, shapes) == tuple(shape), key

    def test_the_layouts_differ_in_the_rows_that_the_tables_say(self) -> None:
        for layout in ("official", "comfyui"):
            text = (TABLES / f"{TABLE_OF[layout]}.json").read_text()
            assert ("per head" in text) == (module_rows("blocks.0.attn.qkv_proj", layout) is Rows.PER_HEAD)
            assert module_rows("token_refiner.blocks.0.mlp.fc1", layout) is Rows.SWAPPED_HALVES
            assert module_rows("blocks.0.mlp.fc2", layout) is Rows.SAME
        rule = key_map("official", 1, 1, 56)["token_refiner.blocks.0.attn.qkv_proj.weight"]
        assert (rule.rows, rule.num_heads, len(rule.targets)) == (Rows.PER_HEAD, 56, 3)

    @pytest.mark.parametrize(
        ("layout", "num_shards", "name"),
        [
            ("diffusers", 14, "transformer"),
            ("official", 13, "FL2VA/transformer"),
            ("comfyui", 1, "minimax_h3_fl2va_bf16.safetensors"),
        ],
    )
    def test_whole_files_are_recognised_from_their_headers(
        self, tmp_path: Path, layout: DitLayout, num_shards: int, name: str
    ) -> None:
        """66 GB each, of which only the headers take room on the disk."""
        tensors = published(TABLE_OF[layout])
        path = tmp_path / name
        if num_shards == 1:
            write_sparse(path, tensors)
        else:
            write_shards(path, tensors, num_shards)
        found = open_checkpoint(path)
        recognition = recognise(found)
        assert recognition == Recognition("dit", layout)
        assert file_problems(found, recognition) == []
        assert describe(found, layout).architecture == Architecture()  # from shapes alone: there is no config.json
        assert found.num_bytes == 66_280_430_080 + (64 if layout != "diffusers" else 0)
        assert found.num_parameters == 33_122_992_896 + (16 if layout != "diffusers" else 0)
        assert stack_dtypes(found, layout) == ("BF16",)


class TestRecognition:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_key_alone_may_be_missing(self, layout: DitLayout) -> None:
        tensors = small(layout)
        for key in tensors:
            found = recognise(checkpoint({k: v for k, v in tensors.items() if k != key}))
            assert found is not None, key
            assert found.refusal is None, (key, found.refusal)

    @pytest.mark.parametrize(
        "table",
        [
            "video_vae.diffusers",
            "video_vae.official",
            "video_vae.comfy_fp16",
            "audio_vae.diffusers_and_official",
            "audio_vae.comfy_fp32",
            "text_encoder.transformers",
            "text_encoder.comfy_bf16",
            "text_encoder.comfy_nvfp4_awq",
        ],
    )
    def test_the_other_parts_of_the_model_are_none(self, table: str) -> None:
        assert (
            recognise(checkpoint({key: (tuple(shape), dtype) for key, (shape, dtype) in published(table).items()}))
            is None
        )

    @pytest.mark.parametrize(
        "keys",
        [
            [],
            # other transformers in diffusers' names
            [
                "proj_in.weight",
                "context_embedder.weight",
                "norm_out.linear.weight",
                "transformer_blocks.0.attn.to_q.weight",
            ],
            [
                "context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight",
                "transformer_blocks.0.norm1.linear.weight",
            ],
            ["audio_proj_in.weight", "audio_proj_out.weight", "transformer_blocks.0.attn1.to_q.weight"],
            # adapters
            [
                "diffusion_model.blocks.0.adaln_proj.linear.lora_A.weight",
                "diffusion_model.blocks.0.adaln_proj.linear.alpha",
            ],
            ["blocks.0.adaln_proj.linear.lora_A.default.weight"],
            ["transformer.transformer_blocks.0.adaln_proj.linear.lora_A.weight"],
            # whole models behind prefixes that nobody publishes
            ["net.blocks.0.adaln_proj.linear.weight", "net.video_patch_proj.weight"],
            ["model.blocks.0.adaln_proj.linear.weight"],
            ["diffusion_model.transformer_blocks.0.adaln_proj.linear.weight"],
        ],
    )
    def test_files_with_some_of_its_words_are_none(self, keys: list[str]) -> None:
        assert recognise(checkpoint(dict.fromkeys(keys, ((4, 4), "BF16")))) is None

    @pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
    def test_a_prefix_of_comfyui_before_every_key_is_taken_off(self, prefix: str) -> None:
        found = checkpoint(small("comfyui", prefix))
        assert recognise(found) == Recognition("dit", "comfyui")
        assert faults_of(found) == ""
        assert describe(found, "comfyui").architecture == SMALL
        assert describe(found, "comfyui").key_map.keys() == found.tensors.keys()

    def test_a_prefix_before_some_keys_is_none(self) -> None:
        tensors = small("comfyui")
        tensors["diffusion_model.blocks.0.norm1.weight"] = tensors.pop("blocks.0.norm1.weight")
        faults = faults_of(checkpoint(tensors))
        assert "1 unknown: diffusion_model.blocks.0.norm1.weight" in faults
        assert "1 missing: blocks.0.norm1.weight" in faults


class TestTheOrderOfRows:
    @pytest.mark.parametrize(
        ("path", "files", "has_index", "prefix", "layout"),
        [
            ("/m/FL2VA/transformer", ("model-00001-of-00002.safetensors",) * 2, True, "", "official"),
            ("/m/FL2VA/transformer", ("model.safetensors",), True, "", "official"),
            ("/m/FL2VA/transformer", ("a.safetensors", "b.safetensors"), False, "", "official"),
            ("/m/minimax_h3_fl2va_bf16.safetensors", (), False, "", "comfyui"),
            ("/m/anything.safetensors", (), False, "model.diffusion_model.", "comfyui"),
            ("/m/diffusion_models", ("saved.safetensors",), False, "diffusion_model.", "comfyui"),
            # one file in a folder could be either, and so could a shard on its own
            ("/m/diffusion_models", ("minimax_h3_fl2va_bf16.safetensors",), False, "", UNDECIDED),
            ("/m/FL2VA/transformer/model-00001-of-00001.safetensors", (), False, "", UNDECIDED),
            ("/m/FL2VA/transformer", ("model-1.safetensors",) * 2, True, "diffusion_model.", UNDECIDED),
        ],
    )
    def test_it_follows_from_how_the_weights_are_split(
        self, path: str, files: tuple[str, ...], has_index: bool, prefix: str, layout: str
    ) -> None:
        found = checkpoint(small("official", prefix), path, files, has_index=has_index)
        recognition = recognise(found)
        assert recognition is not None
        assert recognition.layout == layout
        assert file_problems(found, recognition) == []
        assert any("Nothing shows which order" in note for note in recognition.notes) == (layout == UNDECIDED)

    @pytest.mark.parametrize(
        ("name", "prefix", "is_noted"),
        [("h3", "", True), ("minimax_h3_fl2va_bf16", "", False), ("h3", "diffusion_model.", False)],
    )
    def test_a_file_of_another_name_is_taken_with_a_note(self, name: str, prefix: str, is_noted: bool) -> None:
        recognition = recognised(small("official", prefix), f"/m/{name}.safetensors")
        assert recognition.layout == "comfyui"
        assert any("taken to have ComfyUI's order" in note for note in recognition.notes) == is_noted

    @pytest.mark.parametrize("wanted", ["official", "comfyui"])
    @pytest.mark.parametrize("layout", ["official", "comfyui", UNDECIDED])
    def test_its_owner_may_say_otherwise(self, wanted: str, layout: str) -> None:
        assert choose_layout(checkpoint(small("official")), Recognition("dit", layout), wanted) == wanted

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_auto_is_what_was_recognised(self, layout: DitLayout) -> None:
        assert choose_layout(checkpoint(small(layout)), Recognition("dit", layout), "auto") == layout

    def test_nothing_is_guessed(self) -> None:
        with pytest.raises(ConfigError, match="set dit_layout to official or to comfyui"):
            choose_layout(checkpoint(small("official")), Recognition("dit", UNDECIDED), "auto")

    @pytest.mark.parametrize(
        ("layout", "wanted"),
        [("diffusers", "official"), ("diffusers", "comfyui"), ("official", "diffusers"), (UNDECIDED, "diffusers")],
    )
    def test_names_are_not_contradicted(self, layout: str, wanted: str) -> None:
        with pytest.raises(ConfigError, match=f"dit_layout is '{wanted}', but .* the names of the {layout} layout"):
            choose_layout(checkpoint(small("official")), Recognition("dit", layout), wanted)

    def test_a_layout_that_is_none_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match="dit_layout is 'gguf'; it must be one of auto, diffusers, official, comfyui"
        ):
            choose_layout(checkpoint(small("official")), Recognition("dit", "official"), "gguf")


class TestSizes:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_they_follow_from_shapes(self, layout: DitLayout) -> None:
        assert describe(checkpoint(small(layout)), layout).architecture == SMALL

    def test_the_class_s_configuration_has_the_say(self) -> None:
        config = class_config() | {"rope_theta": 500.0, "norm_eps": 1e-6, "qk_norm_eps": 1}
        found = checkpoint(small("official"), "/m/transformer", ("a.safetensors",), has_index=True, config=config)
        architecture = describe(found, "official").architecture
        assert (architecture.rope_theta, architecture.norm_eps, architecture.qk_norm_eps) == (500.0, 1e-6, 1)
        assert faults_of(found) == ""
        assert architecture.inv_freq()[1] == pytest.approx(500.0 ** (-1 / 16))

    @pytest.mark.parametrize("config", [{"hidden_size": 7}, {"_class_name": "H3DiT", "hidden_size": 7, "layers": 1}])
    def test_an_official_folder_s_configuration_of_another_form_is_left_alone(self, config: dict[str, Any]) -> None:
        found = checkpoint(small("official"), "/m/transformer", ("a.safetensors",), has_index=True, config=config)
        assert describe(found, "official").architecture == SMALL

    def test_a_diffusers_folder_of_another_class_is_refused(self) -> None:
        config = class_config() | {"_class_name": "SomeOtherTransformer"}
        found = checkpoint(small("diffusers"), "/m/transformer", ("a.safetensors",), config=config)
        assert faults_of(found) == f"config.json is of the class 'SomeOtherTransformer', not {CLASS_NAME}"
        with pytest.raises(CheckpointError, match=r"/m/transformer: config\.json is of the class"):
            describe(found, "diffusers")

    @pytest.mark.parametrize(
        ("setting", "value", "message"),
        [
            ("num_layers", "x", "num_layers is 'x', it must be a whole number from 1 to 1000"),
            ("num_layers", 10**12, "num_layers is 1000000000000, it must be a whole number from 1 to 1000"),
            ("hidden_size", True, "hidden_size is True, it must be a whole number from 1 to"),
            ("ffn_dim", 0, "ffn_dim is 0, it must be"),
            ("rope_theta", "1e4", "rope_theta is '1e4', it must be a number above 0"),
            ("rope_theta", 10**400, "it must be a number above 0 and up to 16777216"),
            ("norm_eps", -1.0, "norm_eps is -1.0, it must be a number above 0"),
            ("patch_size", [1, 4, 4], "patch_size is (1, 4, 4), it must be [1, 2, 2]"),
            ("patch_size", {}, "patch_size is {}, it must be [1, 2, 2]"),
            ("text_dim", None, "text_dim is None, it must be"),
        ],
    )
    def test_a_configuration_that_describes_no_model_is_refused(self, setting: str, value: Any, message: str) -> None:
        config = class_config() | {setting: value}
        faults = faults_of(checkpoint(small("diffusers"), "/m/transformer", ("a.safetensors",), config=config))
        assert faults.startswith("config.json: ")
        assert message in faults

    def test_a_configuration_of_another_model_is_seen_in_every_shape(self) -> None:
        config = class_config() | {"num_layers": 4, "ffn_dim": 81, "in_channels": 16}
        faults = faults_of(checkpoint(small("diffusers"), "/m/transformer", ("a.safetensors",), config=config))
        assert "in_channels is 16, the service needs 24" in faults
        assert "12 missing: transformer_blocks.3.adaln_proj.linear.bias" in faults
        assert "of shape [160, 64], expected [162, 64]: token_refiner.refiner_blocks.0.ff.net.0.proj.weight" in faults
        assert "4 of shape [64, 80], expected [64, 81]" in faults

    def test_settings_that_are_not_known_are_told(self) -> None:
        config = class_config() | {"use_gate_compress": True, "_name_or_path": "x"}
        (note,) = recognised(small("diffusers"), "/m/transformer", ("a.safetensors",), config=config).notes
        assert note == "Settings of its config.json that are not known here: use_gate_compress."

    @pytest.mark.parametrize(
        ("key", "shape", "message"),
        [
            ("condition_proj.weight", None, "without the shape of condition_proj.weight the sizes of the model cannot"),
            ("condition_proj.weight", (64,), "without the shape of condition_proj.weight"),
            ("blocks.0.attn.q_norm.weight", (0,), "blocks.0.attn.q_norm.weight has the shape [0], which no model has"),
            ("blocks.0.attn.qkv_proj.weight", (2**40, 64), "has the shape [1099511627776, 64], which no model has"),
        ],
    )
    def test_sizes_that_cannot_be_told_are_said_with_the_rest(
        self, key: str, shape: tuple[int, ...] | None, message: str
    ) -> None:
        tensors = small("official") | {"extra": ((1,), "F32")}
        if shape is None:
            del tensors[key]
        else:
            tensors[key] = (shape, "BF16")
        faults = faults_of(checkpoint(tensors))
        assert message in faults
        assert "1 unknown: extra" in faults
        assert (f"1 missing: {key}" in faults) == (shape is None)


class TestProblems:
    def test_all_of_them_are_said_at_once(self) -> None:
        tensors = small("official")
        tensors["blocks.0.attn.surprise"] = ((1,), "BF16")
        del tensors["final_layer.video_out.bias"], tensors["blocks.1.norm1.weight"], tensors["blocks.2.norm1.weight"]
        tensors["blocks.1.mlp.fc2.weight"] = ((64, 79), "BF16")
        tensors["blocks.2.norm2.weight"] = ((64,), "F64")
        faults = file_problems(found := checkpoint(tensors), recognised(tensors))
        assert faults == [
            "1 unknown: blocks.0.attn.surprise",
            "3 missing: blocks.{1-2}.norm1.weight, final_layer.video_out.bias",
            "1 of shape [64, 79], expected [64, 80]: blocks.1.mlp.fc2.weight",
            "1 F64, expected BF16 or F32 or F16: blocks.2.norm2.weight",
        ]
        assert describe(found, "official").architecture == SMALL

    @pytest.mark.parametrize("dtype", ["BF16", "F16"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_float32_modules_in_a_narrow_dtype_are_lost(self, layout: DitLayout, dtype: str) -> None:
        tensors = {key: (shape, dtype if key != INV_FREQ else "F32") for key, (shape, _) in small(layout).items()}
        faults = faults_of(checkpoint(tensors))
        assert faults.startswith(f"12 stored in {dtype} that run in float32, so their precision is lost: ")
        assert ("time_embedder.linear_{1-2}.bias" if layout == "diffusers" else "time_embedder.proj_in.bias") in faults
        assert "proj_in.weight" in faults or "video_patch_proj.weight" in faults
        assert faults.endswith("take files that keep them in F32")

    @pytest.mark.parametrize(("shape", "dtype"), [((16,), "BF16"), ((16, 1), "F32"), ((), "F32")])
    def test_rotary_frequencies_have_one_form(self, shape: tuple[int, ...], dtype: str) -> None:
        faults = faults_of(checkpoint(small("comfyui") | {INV_FREQ: (shape, dtype)}))
        assert f"rope.inv_freq is {dtype} of shape {list(shape)}, expected F32 [16]" in faults

    def test_rotary_frequencies_must_fit_into_a_head(self) -> None:
        faults = faults_of(checkpoint(small("comfyui") | {INV_FREQ: ((22,), "F32")}))
        assert "22 rotary frequencies turn 132 channels of a head, which has 128" in faults

    def test_files_without_rotary_frequencies_are_whole(self) -> None:
        tensors = small("comfyui")
        del tensors[INV_FREQ]
        assert faults_of(checkpoint(tensors)) == ""

    @pytest.mark.parametrize(("in_channels", "audio"), [(16, 32), (24, 64)])
    def test_latents_of_another_width_are_refused(self, in_channels: int, audio: int) -> None:
        tensors = small("official")
        for key, width, axis in (
            ("video_patch_proj.weight", 4 * in_channels, 1),
            ("final_layer.video_out.weight", 4 * in_channels, 0),
            ("audio_patch_proj.weight", audio, 1),
        ):
            shape = list(tensors[key][0])
            shape[axis] = width
            tensors[key] = (tuple(shape), "F32")
        name, value, needed = ("in_channels", 16, 24) if in_channels == 16 else ("audio_in_channels", 64, 32)
        assert f"{name} is {value}, the service needs {needed}" in faults_of(checkpoint(tensors))

    @pytest.mark.parametrize(
        ("key", "dtype", "expected"),
        [
            ("blocks.1.norm1.weight", "F32", "stored in BF16 and F32: compute_dtype must say bfloat16 or float32"),
            (None, "F16", "stored in F16: compute_dtype must say"),
            (None, "F32", None),
        ],
    )
    def test_a_stack_whose_dtype_does_not_tell_the_precision_is_noted(
        self, key: str | None, dtype: str, expected: str | None
    ) -> None:
        tensors = {
            name: (shape, dtype if stored == "BF16" and key in (None, name) else stored)
            for name, (shape, stored) in small("official").items()
        }
        assert faults_of(checkpoint(tensors)) == ""
        notes = recognised(tensors).notes
        assert [expected in note for note in notes] == [True] if expected else notes == ()

    def test_a_block_number_out_of_all_bounds_costs_nothing(self) -> None:
        tensors = small("official") | {"blocks.9999.norm1.weight": ((64,), "BF16"), f"blocks.{10**50}.x": ((), "F32")}
        faults = faults_of(checkpoint(tensors))
        assert f"2 unknown: blocks.9999.norm1.weight, blocks.{10**50}.x" in faults
        assert "blocks.{3-999}.attn.qkv_proj.weight" in faults


REFUSED: list[tuple[str, str, Tensors, list[str], str]] = [
    (
        "pruned",
        "minimax_h3_ref2va_pruned_bf16",
        {"adaln_t_table": ((1025, 8), "F32"), "blocks.0.adaln_proj.linear.weight": ((1152, 8), "BF16")},
        ["time_embedder."],
        "rank-8 fit .*use minimax_h3_ref2va_bf16.safetensors",
    ),
    ("pruned", "x", {"model_x.adaln_t_table": ((1001, 64), "F32")}, ["time_embedder."], "rank-64 fit"),
    (
        "pruned",
        "x",
        {f"blocks.{i}.adaln_proj.linear.weight": ((1152, 4), "BF16") for i in range(3)},
        ["time_"],
        "rank-4",
    ),
    (
        "nvfp4",
        "x",
        {"blocks.0.mlp.fc2.weight": ((64, 40), "U8"), "blocks.0.mlp.fc2.weight_scale_2": ((), "F32")},
        [],
        "NVFP4",
    ),
    ("fp8", "x", {"blocks.0.mlp.fc2.weight": ((64, 80), "F8_E4M3")}, [], "in FP8: 1 tensors hold codes and 0 scales"),
    ("fp8", "x", {"scaled_fp8": ((0,), "F8_E4M3"), "blocks.0.mlp.fc2.scale_weight": ((), "F32")}, [], "FP8"),
    (
        "int8",
        "x",
        {"blocks.0.mlp.fc2.weight": ((64, 80), "I8"), "blocks.0.mlp.fc2.weight_scale": ((64, 1), "F32")},
        [],
        "INT8",
    ),
    (
        "convrot",
        "minimax_h3_fl2va_int8_convrot",
        {"blocks.0.mlp.fc2.weight": ((64, 80), "I8")},
        [],
        "rotated activations",
    ),
    ("w4a8", "x", {"blocks.0.mlp.fc2.weight_codebook": ((16,), "F32")}, [], "w4a8"),
    (
        "quantised",
        "x",
        {"blocks.0.mlp.fc2.comfy_quant": ((27,), "U8")},
        [],
        "0 tensors hold codes and 1 scales or formats",
    ),
    ("quantised", "x", {"blocks.0.mlp.fc2.weight": ((64, 80), "I32")}, [], "quantised form: 1 tensors"),
    (
        "sparse",
        "x",
        {"blocks.0.attn.to_gate_compress.weight": ((2, 64), "BF16")},
        [],
        "sparse attention .*another model",
    ),
    (
        "stacked heads",
        "x",
        {"final_layer.video_out.weight": ((288, 64), "F32")},
        [],
        "3 stacked output heads .288 rows .* 96",
    ),
]


class TestRefusedVariants:
    @pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
    @pytest.mark.parametrize(("variant", "name", "changed", "left_out", "reason"), REFUSED)
    def test_they_are_called_by_their_name_with_the_reason(
        self, variant: str, name: str, changed: Tensors, left_out: list[str], reason: str, prefix: str
    ) -> None:
        tensors = {k: v for k, v in small("comfyui").items() if not k.startswith(tuple(left_out))} | changed
        found = checkpoint({f"{prefix}{k}": v for k, v in tensors.items()}, f"/m/{name}.safetensors")
        recognition = recognise(found)
        assert recognition is not None
        assert (recognition.component, recognition.layout) == ("dit", variant)
        assert recognition.refusal is not None
        assert recognition.refusal.startswith(("is a ", "has "))
        assert re.search(reason, recognition.refusal), recognition.refusal
        assert re.search(r"use minimax_h3_(fl2va|ref2va)_bf16\.safetensors or a folder", recognition.refusal)

    def test_the_diffusers_names_of_stacked_heads(self) -> None:
        tensors = small("diffusers") | {"proj_out.weight": ((192, 64), "F32")}
        assert recognised(tensors).layout == "stacked heads"

    def test_a_format_in_the_metadata_is_read(self) -> None:
        tensors = small("comfyui") | {"blocks.0.mlp.fc2.weight": ((64, 80), "I8")}
        assert recognised(tensors, metadata={"_quantization_metadata": '{"convrot": true}'}).layout == "convrot"

    def test_a_file_that_lacks_its_time_embedder_is_not_taken_for_a_pruned_one(self) -> None:
        tensors = {key: value for key, value in small("comfyui").items() if not key.startswith("time_embedder.")}
        assert recognised(tensors).refusal is None
        assert "4 missing: time_embedder." in faults_of(checkpoint(tensors))

    def test_a_gguf_file_is_none_by_its_first_bytes(self, tmp_path: Path) -> None:
        (path := tmp_path / "minimax_h3_fl2va_Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(CheckpointError, match="not a safetensors file but a GGUF file"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("path", "partition"),
    [
        ("/models/MiniMax-H3/FL2VA/transformer", "fl2va"),
        ("/models/MiniMax-H3/Ref2VA/transformer/model-00001-of-00013.safetensors", "ref2va"),
        ("/models/h3/transformer_ref", "ref2va"),
        ("/models/h3/transformer_ref/x.safetensors", "ref2va"),
        ("/models/h3/transformer", ""),
        ("/c/minimax_h3_fl2va_bf16.safetensors", "fl2va"),
        ("/c/minimax_h3_ref2va_pruned-bf16.safetensors", "ref2va"),
        ("/ref2va/minimax_h3_fl2va_bf16.safetensors", "fl2va"),  # the nearest name has the say
        ("/c/fl2va_to_ref2va.safetensors", ""),
        ("/c/notfl2vax.safetensors", ""),
        ("/ref2va/a/b/c/x.safetensors", ""),  # folders far above are about something else
    ],
)
def test_the_partition_is_told_by_names(path: str, partition: str) -> None:
    assert partition_of(Path(path)) == partition


def test_weights_for_reference_media_are_noted() -> None:
    (note,) = recognised(small("comfyui"), "/m/minimax_h3_ref2va_bf16.safetensors").notes
    assert "ref2va" in note


def test_the_real_model_has_266_official_modules() -> None:
    modules = official_modules(50, 2)
    assert len(modules) == 266
    names = [name for published_names in modules.values() for name in published_names]
    assert len(names) == len(set(names)) == 266 + 2 * 52  # fused attention projections are three here


def test_names_are_translated_block_by_block() -> None:
    modules = official_modules(3, 2)
    assert modules["blocks.2.attn.qkv_proj"] == tuple(f"transformer_blocks.2.attn.to_{part}" for part in "qkv")
    assert modules["token_refiner.blocks.1.mlp.fc1"] == ("token_refiner.refiner_blocks.1.ff.net.0.proj",)
    assert modules["final_layer.adaln_proj.linear"] == ("norm_out.linear",)
    assert "token_refiner.blocks.0.adaln_proj.linear" not in modules


@given(
    st.sampled_from(LAYOUTS),
    st.lists(
        st.tuples(
            st.integers(0, 10_000),
            st.sampled_from(("drop", "shape", "dtype", "rename", "suffix")),
            st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 100), max_size=4),
            st.sampled_from(sorted(BITS)),
            st.text(max_size=20),
        ),
        max_size=6,
    ),
    st.none()
    | st.dictionaries(st.sampled_from(list(class_config())), st.none() | st.booleans() | st.integers() | st.text()),
)
def test_whatever_a_header_says_the_answer_is_an_answer(
    layout: DitLayout, changes: list[tuple[int, str, list[int], str, str]], settings: dict[str, Any] | None
) -> None:
    tensors = small(layout)
    for index, change, shape, dtype, text in changes:
        key = sorted(tensors)[index % len(tensors)]
        if change == "drop":
            del tensors[key]
        elif change == "shape":
            tensors[key] = (tuple(shape), tensors[key][1])
        elif change == "dtype":
            tensors[key] = (tensors[key][0], dtype)
        else:
            tensors[text if change == "rename" else key + text] = tensors.pop(key)
    config = None if settings is None else class_config() | settings
    found = checkpoint(tensors, "/m/transformer", ("a.safetensors",), config=config)
    recognition = recognise(found)
    if recognition is not None and recognition.refusal is None:
        faults = file_problems(found, recognition)
        assert faults or recognition.layout == UNDECIDED or describe(found, layout).key_map.keys() >= tensors.keys()
