from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.checkpoints import audio_vae, dit, text_encoder, video_vae
from services.checkpoints.header import BITS
from services.checkpoints.key_map import stored_shape
from services.checkpoints.layout import Recognition
from services.checkpoints.source import Checkpoint, open_checkpoint
from services.checkpoints.vae_files import MAX_LENGTH, STATISTICS
from tests.vae_layouts import (
    LAYOUTS,
    class_config,
    header_only,
    lend_config,
    state,
    write_json,
    write_vae,
    write_weights,
)
from tests.weight_files import published, write_sparse

TABLES = {"diffusers": "video_vae.diffusers", "official": "video_vae.official", "comfyui": "video_vae.comfy_fp16"}


def recognised(path: Path) -> tuple[Checkpoint, Recognition]:
    checkpoint = open_checkpoint(path)
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    return checkpoint, recognition


def problems(path: Path) -> list[str]:
    return video_vae.file_problems(*recognised(path))


@pytest.fixture(scope="module")
def published_class() -> Any:
    from diffusers import AutoencoderKLMiniMaxH3

    return AutoencoderKLMiniMaxH3


def test_the_defaults_are_those_of_the_published_class(published_class: Any) -> None:
    arguments = inspect.signature(published_class).parameters
    defaults = {name: argument.default for name, argument in arguments.items() if name not in STATISTICS}
    assert dict(video_vae.PUBLISHED.defaults) == defaults
    assert published_class.__name__ == video_vae.PUBLISHED.name
    assert {*video_vae.FLOAT32_MODULES, *video_vae.UNUSED_MODULES} == set(published_class._keep_in_fp32_modules)


def test_the_parameters_are_those_of_the_published_class(published_class: Any) -> None:
    for config in (dict(video_vae.PUBLISHED.defaults), class_config("video")):
        with torch.device("meta"):
            model = published_class.from_config(config)
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert video_vae.parameter_shapes({**video_vae.PUBLISHED.defaults, **config}) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_key_of_a_published_file_is_consumed_once_and_gives_every_parameter_once(layout: str) -> None:
    table = published(TABLES[layout])
    config = dict(video_vae.PUBLISHED.defaults)
    rules, shapes = video_vae.key_map(layout, config), video_vae.parameter_shapes(config)
    assert rules.keys() == table.keys()
    assert sorted(target for rule in rules.values() for target in rule.targets) == sorted(shapes)
    assert len(shapes) == 703
    for key, rule in rules.items():
        if rule.targets:
            assert list(stored_shape(rule, shapes)) == table[key][0], key
    dropped = {key for key, rule in rules.items() if not rule.targets}
    assert dropped == {"diffusers": set(), "official": {"decoder.mask_token"}}.get(
        layout, {"decoder.mask_token", *STATISTICS}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_file_is_recognised_and_in_order(layout: str, tmp_path: Path) -> None:
    """From the header alone: of the ten gigabytes behind it nothing is on the disk."""
    path = write_sparse(tmp_path / "file.safetensors", published(TABLES[layout]))
    checkpoint, recognition = recognised(path)
    assert (recognition.component, recognition.layout, recognition.refusal) == ("video_vae", layout, None)
    assert video_vae.file_problems(checkpoint, recognition) == []
    architecture = video_vae.architecture(checkpoint, layout)
    assert architecture.config == dict(video_vae.PUBLISHED.defaults)
    assert architecture.source is None


def test_what_a_user_should_know_is_noted(tmp_path: Path) -> None:
    def notes(layout: str, dtype: str | None = None) -> tuple[str, ...]:
        table = {key: (shape, dtype or was) for key, (shape, was) in published(TABLES[layout]).items()}
        recognition = video_vae.recognise(header_only(table))
        assert recognition is not None
        return recognition.notes

    assert notes("diffusers") == ()
    (lost, rounded) = notes("comfyui")
    assert "Norms and residual scales are stored as F16" in lost
    assert "config.json beside it or in --model DIR are preferred to its rounded ones" in rounded
    assert "holds no latent statistics" in notes("official")[0]
    assert "stored as BF16" in notes("diffusers", "BF16")[0]


def test_nothing_is_noted_of_a_file_that_keeps_the_float32_modules_in_float32() -> None:
    table = {
        key: (shape, "F32" if set(video_vae.FLOAT32_MODULES) & set(key.split(".")) else "F16")
        for key, (shape, _) in published("video_vae.diffusers").items()
    }
    recognition = video_vae.recognise(header_only(table))
    assert recognition is not None
    assert recognition.notes == ()


@pytest.mark.parametrize(
    "tensors",
    [
        published("audio_vae.comfy_fp32"),
        published("dit.diffusers"),
        published("dit.official"),
        published("text_encoder.transformers"),
        {f"vae.{key}": entry for key, entry in published("video_vae.official").items()},
        {f"first_stage_model.{key}": entry for key, entry in published("video_vae.diffusers").items()},
        {"decoder.conv_in.weight": ([8, 8, 3, 3, 3], "F32"), "post_quant_conv.weight": ([8, 8, 1, 1, 1], "F32")},
    ],
    ids=["audio", "dit", "official dit", "text encoder", "vae.", "first_stage_model.", "another vae"],
)
def test_something_else_is_not_recognised(tensors: dict[str, Any]) -> None:
    assert video_vae.recognise(header_only(tensors)) is None


def test_no_other_part_takes_it_for_its_own() -> None:
    for table in TABLES.values():
        for part in (audio_vae, dit, text_encoder):
            assert part.recognise(header_only(published(table))) is None


def test_a_quantised_copy_is_refused_with_the_reason() -> None:
    table = published("video_vae.official")
    for change, shown in (
        ({"decoder.transformer_blocks.0.ff.w2.weight": ([2048, 8192], "I8")}, "I8"),
        ({"decoder.transformer_blocks.0.ff.w2.weight": ([2048, 8192], "F8_E4M3")}, "F8_E4M3"),
        ({"decoder.transformer_blocks.0.ff.w2.comfy_quant": ([60], "U8")}, "U8, comfy_quant"),
    ):
        recognition = video_vae.recognise(header_only({**table, **change}))
        assert recognition is not None
        assert recognition.refusal is not None
        assert f"quantised copy of the video VAE ({shown})" in recognition.refusal
        assert "minimax_h3_video_vae_fp16.safetensors" in recognition.refusal


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_that_is_wrong_is_told_at_once(layout: Any, tmp_path: Path) -> None:
    path = write_vae(tmp_path, "video", layout)
    write_json((path if path.is_dir() else tmp_path) / "config.json", class_config("video"))
    (file,) = [path] if path.is_file() else path.glob("*.safetensors")
    tensors = dict(state("video", layout))
    del tensors["decoder.norm_out.bias"]
    tensors["decoder.norm_out.weight"] = torch.zeros(47)
    tensors["decoder.proj_out.bias"] = tensors["decoder.proj_out.bias"].double()
    tensors["encoder.nothing"] = torch.zeros(1)
    write_weights(file, tensors)
    assert problems(path) == [
        "1 unknown: encoder.nothing",
        "1 missing: decoder.norm_out.bias",
        "1 of shape [47], expected [48]: decoder.norm_out.weight",
        "1 F64, expected F32 or F16 or BF16: decoder.proj_out.bias",
    ]


@pytest.mark.parametrize(
    "key", ["decoder.register_tokens", "post_quant_conv.weight", "decoder.transformer_blocks.20.scale1"]
)
def test_a_damaged_file_is_still_recognised(key: str) -> None:
    table = published("video_vae.official")
    del table[key]
    checkpoint = header_only(table)
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    assert video_vae.file_problems(checkpoint, recognition) == [f"1 missing: {key}"]


def test_the_keys_of_two_layouts_in_one_file_are_unknown() -> None:
    checkpoint = header_only({**published("video_vae.official"), **published("video_vae.diffusers")})
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    faults = video_vae.file_problems(checkpoint, recognition)
    assert len(faults) == 1
    assert "unknown: decoder.proj_in.bias, decoder.proj_in.weight, decoder.transformer_blocks.{0-35}" in faults[0]


def test_the_encoder_may_be_absent_but_not_in_part() -> None:
    table = published("video_vae.comfy_fp16")
    without = {key: entry for key, entry in table.items() if not key.startswith(("encoder.", "quant_conv."))}
    checkpoint = header_only(without)
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    assert video_vae.file_problems(checkpoint, recognition) == []
    cut = header_only({**without, "quant_conv.bias": table["quant_conv.bias"]})
    assert video_vae.file_problems(cut, recognition) == ["1 missing: quant_conv.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents_std": None}, "1 missing: latents_std"),
        ({"latents_mean": ([25], "F16")}, "1 F16 of shape [25], expected F32, F16 or BF16 of [24]: latents_mean"),
        ({"latents_mean": ([24], "I64")}, "1 I64 of shape [24], expected F32, F16 or BF16 of [24]: latents_mean"),
    ],
)
def test_wrong_statistics_are_told(change: dict[str, Any], message: str) -> None:
    table = {**published("video_vae.comfy_fp16"), **change}
    checkpoint = header_only({key: entry for key, entry in table.items() if entry is not None})
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    assert video_vae.file_problems(checkpoint, recognition) == [message]


# --- configuration -----------------------------------------------------------------------------------------------


def test_dimensions_are_read_from_shapes_where_they_can_be() -> None:
    config = {
        **video_vae.PUBLISHED.defaults,
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1,
        "spatial_downsample_factors": (2, 2, 2, 2),
        "temporal_downsample_factors": (1, 2, 2, 1),
        "norm_num_groups": 8,  # the most that the published number and the shapes allow
        "decoder_num_layers": 3,
        "decoder_num_attention_heads": 2,
        "decoder_num_register_tokens": 1,
        "decoder_ffn_mult": 2,
    }
    shapes = video_vae.parameter_shapes(config)
    for layout in LAYOUTS:
        tensors = {
            key: (stored_shape(rule, shapes) if rule.targets else (24,), "F32")
            for key, rule in video_vae.key_map(layout, config).items()
        }
        assert video_vae.architecture(header_only(tensors), layout).config == config


def test_a_head_size_that_shapes_do_not_show_is_asked_for(tmp_path: Path) -> None:
    path = write_vae(tmp_path, "video", "comfyui")
    (message,) = problems(path)
    assert message == (
        f"{path}: the decoder is 48 wide, no multiple of the published head size 64; put the config.json of this model "
        "beside it, or give --model DIR with vae/config.json"
    )


def test_a_configuration_beside_a_file_is_its_own(tmp_path: Path) -> None:
    path = write_vae(tmp_path, "video", "comfyui")
    config = write_json(tmp_path / "config.json", class_config("video"))
    assert problems(path) == []
    architecture = video_vae.architecture(open_checkpoint(path), "comfyui")
    assert architecture.source == config
    assert architecture.config["decoder_attention_head_dim"] == 24


def test_a_configuration_of_something_else_beside_a_file_is_passed_over(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "file.safetensors", published("video_vae.official"))
    write_json(tmp_path / "config.json", {"_class_name": "AutoencoderKLWan", "decoder_num_layers": "all"})
    assert problems(path) == []


def test_a_model_directory_lends_the_configuration_that_fits(tmp_path: Path) -> None:
    path = write_vae(tmp_path / "files", "video", "comfyui")
    lenders = [lend_config(tmp_path / "model") / "vae"]
    architecture = video_vae.architecture(open_checkpoint(path), "comfyui", lenders)
    assert architecture.source == lenders[0] / "config.json"
    assert architecture.config["decoder_num_attention_heads"] == 2
    assert video_vae.faults(open_checkpoint(path), "comfyui", architecture) == []


def test_a_model_directory_of_another_size_lends_nothing(tmp_path: Path) -> None:
    """`--model` of the tiny model with the published file in place of its video VAE."""
    path = write_sparse(tmp_path / "file.safetensors", published("video_vae.comfy_fp16"))
    write_json(tmp_path / "model/vae/config.json", class_config("video"))
    architecture = video_vae.architecture(open_checkpoint(path), "comfyui", [tmp_path / "model/vae"])
    assert architecture.source is None
    assert architecture.files == ()
    assert architecture.config == dict(video_vae.PUBLISHED.defaults)


def test_what_does_not_fit_the_only_configuration_is_told(tmp_path: Path) -> None:
    path = write_vae(tmp_path / "files", "video", "comfyui")
    write_weights(path, {**state("video", "comfyui"), "decoder.nothing": torch.zeros(1)})
    checkpoint = open_checkpoint(path)
    architecture = video_vae.architecture(checkpoint, "comfyui", [lend_config(tmp_path / "model") / "vae"])
    assert video_vae.faults(checkpoint, "comfyui", architecture) == ["1 unknown: decoder.nothing"]


def test_the_official_repository_tells_what_it_tells(tmp_path: Path) -> None:
    """Its statistics lie one folder above its weights; another cadence there is not missed."""
    folder = tmp_path / "video_vae"
    path = write_sparse(folder / "source/model.safetensors", published("video_vae.official")).parent
    write_json(path / "config.json", {"_class_name": "AutoencoderKLLegacy", "ch": 128})
    outer = write_json(folder / "config.json", {"_class_name": "MiniMaxH3VideoVAE", "clip_length": 13})
    assert problems(path) == []
    architecture = video_vae.architecture(open_checkpoint(path), "official")
    assert [file.path for file in architecture.files] == [path / "config.json", outer]
    assert architecture.config == {**video_vae.PUBLISHED.defaults, "clip_length": 13}


def test_a_folder_with_the_configuration_of_another_class_is_told(tmp_path: Path) -> None:
    path = write_vae(tmp_path, "video", "diffusers")
    write_json(path / "config.json", {**class_config("video"), "_class_name": "AutoencoderKLWan"})
    assert problems(path)[0].startswith(f"{path}: the decoder is 48 wide")
    write_sparse(path / "diffusion_pytorch_model.safetensors", published("video_vae.diffusers"))
    assert problems(path) == [
        "config.json names the class 'AutoencoderKLWan', expected 'AutoencoderKLMiniMaxH3'",
    ]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("decoder_num_layers", 10**9, "an integer from 0 to 1024"),
        ("decoder_num_layers", -1, "an integer from 0 to 1024"),
        ("decoder_num_layers", True, "an integer from 0 to 1024"),
        ("decoder_num_layers", "36", "an integer from 0 to 1024"),
        ("decoder_attention_head_dim", 2**62, "an integer from 0 to 65536"),
        ("norm_eps", [1], "a number from -65536 to 65536"),
        ("norm_eps", 1e300, "a number from -65536 to 65536"),
        ("spatial_padding_mode", None, "a string"),
        ("block_out_channels", [], f"a list of 1 to {MAX_LENGTH} entries, each an integer from 0 to 65536"),
        ("block_out_channels", [8] * 17, f"a list of 1 to {MAX_LENGTH} entries, each an integer from 0 to 65536"),
        ("block_out_channels", [[8]], f"a list of 1 to {MAX_LENGTH} entries, each an integer from 0 to 65536"),
    ],
)
def test_impossible_values_of_a_configuration_are_named(tmp_path: Path, name: str, value: Any, rule: str) -> None:
    path = write_vae(tmp_path, "video", "diffusers")
    config = write_json(path / "config.json", {**class_config("video"), name: value})
    (message,) = problems(path)
    assert message.startswith(f"{config}: {name} is ")
    assert message.endswith(f"; it must be {rule}")
    assert len(message) < len(str(config)) + 250


def test_levels_and_factors_must_agree_in_number(tmp_path: Path) -> None:
    path = write_vae(tmp_path, "video", "diffusers")
    write_json(path / "config.json", {**class_config("video"), "spatial_downsample_factors": [2, 2, 2]})
    assert problems(path) == [
        f"{path / 'config.json'}: block_out_channels and spatial_downsample_factors and temporal_downsample_factors "
        "must be of one length"
    ]


def test_a_header_with_more_levels_than_any_model_is_refused() -> None:
    level = "encoder.down_blocks.{}.resnets.0.norm2.weight"
    table = {**published("video_vae.diffusers"), **{level.format(index): ([8], "F32") for index in range(5000)}}
    checkpoint = header_only(table)
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    (message,) = video_vae.file_problems(checkpoint, recognition)
    assert len(message) < 300
    assert f"must be a list of 1 to {MAX_LENGTH} entries" in message


SHAPES = st.lists(st.one_of(st.integers(0, 65), st.just(2**62)), max_size=6)


@settings(max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS),
    changes=st.dictionaries(
        st.sampled_from(
            [
                "decoder.proj_in.weight",
                "decoder.x_embedder.weight",
                "decoder.register_tokens",
                "decoder.transformer_blocks.0.ff.net.2.weight",
                "decoder.transformer_blocks.0.ff.w2.weight",
                "decoder.transformer_blocks.1.scale1",
                "encoder.down.0.block.0.norm2.weight",
                "encoder.down_blocks.1.resnets.0.norm2.weight",
                "latents_mean",
            ]
        ),
        st.one_of(st.none(), st.tuples(SHAPES, st.sampled_from(sorted(BITS)))),
        min_size=1,
    ),
)
def test_no_header_is_more_than_wrong(layout: str, changes: dict[str, Any]) -> None:
    tensors = {key: (list(tensor.shape), "F32") for key, tensor in state("video", layout).items()}
    tensors |= changes
    checkpoint = header_only({key: entry for key, entry in tensors.items() if entry is not None})
    recognition = video_vae.recognise(checkpoint)
    assert recognition is not None
    assert video_vae.file_problems(checkpoint, recognition)
