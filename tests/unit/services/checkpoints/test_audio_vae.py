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
from services.checkpoints.vae_files import STATISTICS
from tests.vae_layouts import (
    LAYOUTS,
    class_config,
    header_only,
    official_config,
    state,
    write_json,
    write_vae,
    write_weights,
)
from tests.weight_files import published, write_sparse

TABLES = {
    "diffusers": "audio_vae.diffusers_and_official",
    "official": "audio_vae.diffusers_and_official",
    "comfyui": "audio_vae.comfy_fp32",
}


def recognised(path: Path) -> tuple[Checkpoint, Recognition]:
    checkpoint = open_checkpoint(path)
    recognition = audio_vae.recognise(checkpoint)
    assert recognition is not None
    return checkpoint, recognition


def problems(path: Path) -> list[str]:
    return audio_vae.file_problems(*recognised(path))


def header_problems(tensors: dict[str, tuple[Any, str]]) -> list[str]:
    checkpoint = header_only(tensors)
    recognition = audio_vae.recognise(checkpoint)
    assert recognition is not None
    return audio_vae.file_problems(checkpoint, recognition)


def small_config() -> dict[str, Any]:
    return {**audio_vae.PUBLISHED.defaults, **class_config("audio")}


@pytest.fixture(scope="module")
def published_class() -> Any:
    from diffusers import AutoencoderKLMiniMaxH3Audio

    return AutoencoderKLMiniMaxH3Audio


def test_the_defaults_are_those_of_the_published_class(published_class: Any) -> None:
    arguments = inspect.signature(published_class).parameters
    defaults = {name: argument.default for name, argument in arguments.items() if name not in STATISTICS}
    assert dict(audio_vae.PUBLISHED.defaults) == defaults
    assert published_class.__name__ == audio_vae.PUBLISHED.name


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_the_parameters_are_those_of_the_published_class(published_class: Any) -> None:
    for config in (dict(audio_vae.PUBLISHED.defaults), small_config()):
        with torch.device("meta"):
            model = published_class.from_config(config)
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert audio_vae.parameter_shapes(config, is_folded=False) == expected
        for module in model.modules():
            if hasattr(module, "weight_g"):
                torch.nn.utils.remove_weight_norm(module)
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert audio_vae.parameter_shapes(config, is_folded=True) == expected


@pytest.mark.parametrize(("layout", "num_parameters"), [("diffusers", 1087), ("official", 1087), ("comfyui", 915)])
def test_every_key_of_a_published_file_is_consumed_once_and_gives_every_parameter_once(
    layout: str, num_parameters: int
) -> None:
    table = published(TABLES[layout])
    config = dict(audio_vae.PUBLISHED.defaults)
    rules, shapes = audio_vae.key_map(layout, config), audio_vae.parameter_shapes(config, is_folded=layout == "comfyui")
    assert rules.keys() == table.keys()
    assert sorted(target for rule in rules.values() for target in rule.targets) == sorted(shapes)
    assert len(shapes) == num_parameters
    for key, rule in rules.items():
        if rule.targets:
            assert list(stored_shape(rule, shapes)) == table[key][0], key
    assert {key for key, rule in rules.items() if not rule.targets} == (set(STATISTICS) & table.keys())


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_a_published_file_is_recognised_and_in_order(layout: str, tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "file.safetensors", published(TABLES[layout]))
    checkpoint, recognition = recognised(path)
    assert recognition == Recognition("audio_vae", layout)
    assert audio_vae.file_problems(checkpoint, recognition) == []
    architecture = audio_vae.architecture(checkpoint, layout)
    assert architecture.config == dict(audio_vae.PUBLISHED.defaults)
    assert architecture.source is None


def test_the_official_folder_is_told_by_its_configuration(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model.safetensors", published(TABLES["official"]))
    config = write_json(tmp_path / "config.json", official_config("audio"))
    checkpoint, recognition = recognised(tmp_path)
    assert recognition == Recognition("audio_vae", "official")
    assert audio_vae.file_problems(checkpoint, recognition) == []
    assert [file.path for file in audio_vae.architecture(checkpoint, "official").files] == [config]


@pytest.mark.parametrize(
    "tensors",
    [
        published("video_vae.comfy_fp16"),
        published("dit.diffusers"),
        published("text_encoder.transformers"),
        {f"audio_vae.{key}": entry for key, entry in published("audio_vae.comfy_fp32").items()},
        # Another BigVGAN vocoder.
        {"decoder.activation_post.act.alpha": ([8], "F32"), "decoder.conv_pre.bias": ([8], "F32")},
    ],
    ids=["video", "dit", "text encoder", "prefixed", "another vocoder"],
)
def test_something_else_is_not_recognised(tensors: dict[str, Any]) -> None:
    assert audio_vae.recognise(header_only(tensors)) is None


def test_no_other_part_takes_it_for_its_own() -> None:
    for table in set(TABLES.values()):
        for part in (video_vae, dit, text_encoder):
            assert part.recognise(header_only(published(table))) is None


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_copy_in_lower_precision_is_refused_with_the_reason(dtype: str) -> None:
    table = {key: (shape, dtype) for key, (shape, _) in published("audio_vae.comfy_fp32").items()}
    # Not even a few tensors in float32 make up for it.
    checkpoint = header_only({**table, "dec_in_proj.bias": ([2048], "F32")})
    recognition = audio_vae.recognise(checkpoint)
    assert recognition is not None
    assert recognition.refusal is not None
    assert f"copy of the audio VAE in {dtype}, which is audibly worse than float32" in recognition.refusal
    assert "minimax_h3_audio_vae_fp32.safetensors" in recognition.refusal


def test_a_quantised_copy_is_refused_with_the_reason() -> None:
    recognition = audio_vae.recognise(
        header_only({**published("audio_vae.comfy_fp32"), "dec_in_proj.weight": ([2048, 32, 1], "I8")})
    )
    assert recognition is not None
    assert recognition.refusal is not None
    assert "quantised copy of the audio VAE (I8)" in recognition.refusal


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_that_is_wrong_is_told_at_once(layout: Any, tmp_path: Path) -> None:
    path = write_vae(tmp_path, "audio", layout)
    (file,) = [path] if path.is_file() else path.glob("*.safetensors")
    tensors = dict(state("audio", layout))
    del tensors["decoder.ups.0.0.bias"]
    tensors["decoder.activation_post.act.alpha"] = torch.zeros(2)
    tensors["dec_in_proj.bias"] = tensors["dec_in_proj.bias"].half()
    tensors["decoder.nothing"] = torch.zeros(1)
    write_weights(file, tensors)
    assert problems(path) == [
        "1 unknown: decoder.nothing",
        "1 missing: decoder.ups.0.0.bias",
        "1 F16, expected F32: dec_in_proj.bias",
        "1 of shape [2], expected [1]: decoder.activation_post.act.alpha",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "dec_in_proj.weight",
        "decoder.conv_pre.weight_v",
        "decoder.ups.0.0.weight_v",
        "decoder.resblocks.0.convs1.0.weight_v",
        "decoder.resblocks.5.convs1.0.weight_v",
        "encoder.block.1.block.4.weight_v",
    ],
)
def test_a_missing_tensor_is_told_also_where_its_shape_would_have_told_sizes(key: str) -> None:
    table = published("audio_vae.diffusers_and_official")
    del table[key]
    assert header_problems(table) == [f"1 missing: {key}"]


def test_a_module_that_only_encoding_needs_may_be_absent_but_not_in_part() -> None:
    table = published("audio_vae.comfy_fp32")
    decoder = {key: entry for key, entry in table.items() if key.split(".")[0] not in audio_vae.UNUSED_MODULES}
    assert header_problems(decoder) == []
    part = {**decoder, "pre_block.proj.bias": table["pre_block.proj.bias"]}
    (message,) = header_problems(part)
    assert message.startswith("21 missing: pre_block.attn.proj.bias")


def test_folded_and_unfolded_weight_norm_do_not_mix() -> None:
    table = published("audio_vae.diffusers_and_official")
    folded = dict(table)
    del folded["decoder.conv_pre.weight_g"], folded["decoder.conv_pre.weight_v"]
    folded["decoder.conv_pre.weight"] = ([1024, 2048, 7], "F32")
    assert header_problems(folded) == [
        "1 unknown: decoder.conv_pre.weight",
        "2 missing: decoder.conv_pre.weight_g, decoder.conv_pre.weight_v",
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dimensions_are_read_from_shapes(layout: Any, tmp_path: Path) -> None:
    """The small model has other widths, two kinds of residual blocks and other numbers of dilations."""
    path = write_vae(tmp_path, "audio", layout)
    if path.is_dir():
        (path / "config.json").unlink()
    architecture = audio_vae.architecture(open_checkpoint(path), layout)
    assert architecture.source is None
    expected = class_config("audio")
    if layout == "comfyui":
        del expected["encoder_dim"], expected["encoder_rates"]  # the vector has no encoder
    for name in audio_vae.PUBLISHED.defaults.keys() & expected.keys():
        found = architecture.config[name]
        assert found == (
            tuple(tuple(x) if isinstance(x, list) else x for x in expected[name])
            if isinstance(expected[name], list)
            else expected[name]
        ), name
    assert problems(path) == []


@pytest.mark.parametrize(
    "config",
    [{"decoder_kernel_sizes": (9, 9, 4, 4, 4, 4, 7)}, {"resblock_dilation_sizes": ((1, 3, 5, 7), (1, 3), (1,))}],
)
def test_what_shapes_do_not_show_is_asked_for(config: dict[str, Any]) -> None:
    shapes = audio_vae.parameter_shapes({**audio_vae.PUBLISHED.defaults, **config}, is_folded=False)
    (message,) = header_problems({key: (shape, "F32") for key, shape in shapes.items()})
    assert "are not those of the published audio VAE, so rates and dilations are unknown" in message
    assert "give --model DIR with audio_vae/config.json" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_rates": [5, 5, 2, 2, 2, 2]}, "decoder_rates and decoder_kernel_sizes must be of one length"),
        (
            {"resblock_kernel_sizes": [3]},
            "resblock_kernel_sizes and resblock_dilation_sizes must be of one length",
        ),
        (
            {"resblock_dilation_sizes": [1, 3]},
            "resblock_dilation_sizes is [1, 3]; it must be a list of 1 to 16 entries",
        ),
        ({"encoder_dim": 1e3}, "encoder_dim is 1000.0; it must be an integer from 0 to 65536"),
    ],
)
def test_impossible_configurations_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_vae(tmp_path, "audio", "diffusers")
    config = write_json(path / "config.json", {**class_config("audio"), **change})
    (found,) = problems(path)
    assert found.startswith(f"{config}: {message}")


SHAPES = st.lists(st.one_of(st.integers(0, 65), st.just(2**62)), max_size=5)


@settings(max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS),
    changes=st.dictionaries(
        st.sampled_from(
            [
                "dec_in_proj.weight",
                "encoder.block.0.weight_v",
                "encoder.block.1.block.4.weight_v",
                "decoder.conv_pre.weight",
                "decoder.ups.0.0.weight",
                "decoder.ups.7.0.weight_v",
                "decoder.resblocks.0.convs1.0.weight_v",
                "decoder.resblocks.1.convs1.3.weight",
                "latents_std",
            ]
        ),
        st.one_of(st.none(), st.tuples(SHAPES, st.sampled_from(sorted(BITS)))),
        min_size=1,
    ),
)
def test_no_header_is_more_than_wrong(layout: Any, changes: dict[str, Any]) -> None:
    tensors = {key: (list(tensor.shape), "F32") for key, tensor in state("audio", layout).items()}
    tensors |= changes
    header_problems({key: entry for key, entry in tensors.items() if entry is not None})
