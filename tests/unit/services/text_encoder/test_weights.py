from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError
from h3stream.job import ModelPart
from services.checkpoints.source import open_checkpoint
from services.checkpoints.text_encoder import describe, recognise
from services.common.residency import DeviceWeights
from services.common.weights import DTYPES
from services.text_encoder.encoder import hidden_states
from services.text_encoder.weights import LanguageModel, build_module, load_language_model
from tests.text_encoder_files import (
    TAP_LAYER,
    State,
    golden_state,
    marker,
    nvfp4_state,
    published,
    unquantised,
    write_comfyui,
    write_nvfp4,
)

LANGUAGE = "model.language_model."


@pytest.fixture
def directory(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny text encoder to spoil."""
    shutil.copytree(tiny_model / "text_encoder", tmp_path / "text_encoder")
    return tmp_path / "text_encoder"


def edit_state(directory: Path, edit: Callable[[State], None]) -> None:
    state = load_file(directory / "model.safetensors")
    edit(state)
    save_file(state, directory / "model.safetensors")


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(directory: Path, num_shards: int) -> None:
    """Splits the single file as the published folder is split."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {key: names[i % num_shards] for i, key in enumerate(state)}
    for name in names:
        save_file({key: state[key] for key in state if weight_map[key] == name}, directory / name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def encode(model: LanguageModel) -> torch.Tensor:
    torch.set_num_threads(1)
    return hidden_states(model.module, [5, 17, 300, 42], torch.device("cpu"))


def test_only_the_layers_up_to_the_tapped_one_are_loaded(directory: Path) -> None:
    model = load_language_model(directory, "auto")
    names = model.module.state_dict().keys()
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1", "2", "3"}
    assert not [name for name in names if name.startswith(("norm.", "visual.", "lm_head."))]
    assert {tensor.dtype for tensor in model.module.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in (*model.module.parameters(), *model.module.buffers())} == {"cpu"}
    assert (model.hidden_size, model.vocab_size) == (128, 768)
    assert model.dtype == torch.bfloat16
    assert list(model.digests) == ["text_encoder/model.safetensors"]


def test_what_is_not_read_may_be_absent(directory: Path) -> None:
    whole = encode(load_language_model(directory, "auto"))

    def cut(state: State) -> None:
        unread = ("model.visual.", "lm_head.", f"{LANGUAGE}norm.", f"{LANGUAGE}layers.4.", f"{LANGUAGE}layers.5.")
        for key in [key for key in state if key.startswith(unread)]:
            del state[key]

    edit_state(directory, cut)
    assert torch.equal(encode(load_language_model(directory, "auto")), whole)


def test_shards_with_an_index_give_the_same_bits_as_one_file(directory: Path) -> None:
    whole = encode(load_language_model(directory, "auto"))
    shard(directory, 3)
    sharded = load_language_model(directory, "auto")
    assert torch.equal(encode(sharded), whole)
    assert list(sharded.digests) == [f"text_encoder/model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_file_that_the_index_does_not_name_is_not_read(directory: Path) -> None:
    shard(directory, 2)
    save_file({"stranger": torch.zeros(1)}, directory / "consolidated.safetensors")
    assert len(load_language_model(directory, "auto").digests) == 2


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory, 2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors, which its index names"):
        load_language_model(directory, "auto")


def test_every_fault_of_the_keys_is_listed_in_one_error(directory: Path) -> None:
    def spoil(state: State) -> None:
        del state[f"{LANGUAGE}layers.0.mlp.up_proj.weight"]
        del state[f"{LANGUAGE}embed_tokens.weight"]
        state["embed_tokens.weight"] = torch.zeros(768, 128, dtype=torch.bfloat16)
        state[f"{LANGUAGE}layers.6.input_layernorm.weight"] = torch.zeros(128, dtype=torch.bfloat16)
        state[f"{LANGUAGE}layers.1.input_layernorm.weight"] = torch.zeros(129, dtype=torch.bfloat16)
        state[f"{LANGUAGE}layers.2.input_layernorm.weight"] = torch.zeros(128, dtype=torch.float16)

    edit_state(directory, spoil)
    with pytest.raises(CheckpointError) as raised:
        load_language_model(directory, "auto")
    message = str(raised.value)
    for fault in (
        f"2 unknown: embed_tokens.weight, {LANGUAGE}layers.6.input_layernorm.weight",
        f"2 missing: {LANGUAGE}embed_tokens.weight, {LANGUAGE}layers.0.mlp.up_proj.weight",
        f"1 of shape [129], expected [128]: {LANGUAGE}layers.1.input_layernorm.weight",
        f"1 F16, expected BF16 or F32: {LANGUAGE}layers.2.input_layernorm.weight",
    ):
        assert fault in message


def test_weights_of_two_dtypes_need_a_choice(directory: Path) -> None:
    key = f"{LANGUAGE}layers.0.input_layernorm.weight"
    edit_state(directory, lambda state: state.update({key: state[key].float()}))
    with pytest.raises(CheckpointError, match="BF16 and F32; set dtype to bfloat16 or float32"):
        load_language_model(directory, "auto")
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert encode(load_language_model(directory, name)).dtype == dtype


def test_the_published_hidden_state_is_meant_where_the_config_says_nothing(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["h3_hidden_state_index"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"hidden state 50 is wanted .* but the model has 6 layers"):
        load_language_model(directory, "auto")


@pytest.mark.parametrize("index", [0, 7, "4", None, True])
def test_a_hidden_state_that_the_model_does_not_have_is_refused(directory: Path, index: object) -> None:
    edit_config(directory, h3_hidden_state_index=index)
    with pytest.raises(CheckpointError, match="the model has 6 layers"):
        load_language_model(directory, "auto")


def test_rotary_settings_in_the_older_spelling_mean_the_same(directory: Path) -> None:
    expected = encode(load_language_model(directory, "auto"))
    config = json.loads((directory / "config.json").read_text())["text_config"]
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    edit_config(directory, text_config=config | {"rope_theta": theta, "rope_scaling": rope})
    assert torch.equal(encode(load_language_model(directory, "auto")), expected)


def test_a_config_of_another_model_is_refused(directory: Path) -> None:
    edit_config(directory, model_type="qwen2")
    with pytest.raises(CheckpointError, match="'qwen2', expected 'qwen3_vl'"):
        load_language_model(directory, "auto")


@pytest.mark.parametrize("change", [{"rms_norm_eps": "small"}, {"hidden_act": "none"}, {"rope_parameters": [5]}])
def test_a_config_that_describes_no_model_is_refused(directory: Path, change: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())["text_config"] | {"rope_theta": 1.0} | change
    edit_config(directory, text_config=config)
    with pytest.raises(CheckpointError, match="does not describe a Qwen3-VL model"):
        load_language_model(directory, "auto")


class Reads:
    """What is read of files, by file name, as half-open ranges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        pread, preadv = os.pread, os.preadv

        def spy_pread(fd: int, length: int, offset: int) -> bytes:
            self._note(fd, offset, length)
            return pread(fd, length, offset)

        def spy_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
            self._note(fd, offset, sum(map(len, buffers)))
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "pread", spy_pread)
        monkeypatch.setattr(os, "preadv", spy_preadv)

    def _note(self, fd: int, offset: int, length: int) -> None:
        self.ranges[Path(f"/proc/self/fd/{fd}").readlink().name].append((offset, offset + length))

    def within(self, name: str, start: int, stop: int) -> int:
        """The most bytes between two positions of a file that one read took."""
        return max((min(stop, end) - max(start, begin) for begin, end in self.ranges[name]), default=0)


def test_what_h3_does_not_read_never_leaves_the_disk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that holds nothing else only the header is read, of others the samples that its digest is made of."""
    state = load_file(directory / "model.safetensors")
    unread = {key for key in state if not re.match(r"model\.language_model\.(embed_tokens|layers\.[0-3])\.", key)}
    apart = {key for key in unread if key.startswith((f"{LANGUAGE}layers.5.", "model.visual."))}
    (directory / "model.safetensors").unlink()
    save_file({key: state[key] for key in state if key not in apart}, directory / "a.safetensors")
    save_file({key: state[key] for key in apart}, directory / "b.safetensors")
    headers = {header.path.name: header for header in open_checkpoint(directory).headers}

    reads = Reads(monkeypatch)
    model = load_language_model(directory, "auto")

    num_seen = 0
    for name, header in headers.items():
        for key, info in header.tensors.items():
            num_read = reads.within(name, info.start, info.stop)
            if key in apart:
                assert num_read <= 0
            elif key in unread:
                assert num_read <= 4096
            else:
                assert num_read == info.num_bytes
            num_seen += 1
    assert num_seen == len(state)
    assert reads.ranges["b.safetensors"]  # it was looked at
    assert list(model.digests) == ["text_encoder/a.safetensors"]


def test_the_part_counts_what_is_read(directory: Path) -> None:
    model = load_language_model(directory, "auto")
    num_parameters = sum(tensor.numel() for tensor in model.module.parameters())
    assert model.part == ModelPart(
        "text_encoder", "transformers", "text_encoder", "BF16", num_parameters, 2 * num_parameters
    )


def test_comfyuis_single_file_gives_the_same_bits_as_the_folder(directory: Path, tmp_path: Path) -> None:
    """Also without its config.json: what shapes do not tell is the published model's, and the tiny one has it too."""
    expected = load_language_model(directory, "auto")
    file = write_comfyui(tmp_path / "comfyui.safetensors", load_file(directory / "model.safetensors"), num_layers=4)
    found = load_language_model(file, "auto")
    assert torch.equal(encode(found), encode(expected))
    assert (found.hidden_size, found.vocab_size, found.max_tokens) == (128, 768, expected.max_tokens)
    assert found.part == replace(expected.part, layout="comfyui", source="comfyui.safetensors")


def test_a_file_of_transformers_names_needs_no_folder(directory: Path, tmp_path: Path) -> None:
    expected = encode(load_language_model(directory, "auto"))
    file = tmp_path / "alone.safetensors"
    save_file(load_file(directory / "model.safetensors"), file, {"h3_hidden_state_index": "4"})
    assert torch.equal(encode(load_language_model(file, "auto")), expected)


@pytest.fixture(scope="module")
def quantised() -> State:
    return nvfp4_state(golden_state(), TAP_LAYER)


def test_a_quantised_file_stays_packed_on_host_and_device(quantised: State, tmp_path: Path) -> None:
    model = load_language_model(write_nvfp4(tmp_path / "nvfp4.safetensors", quantised, TAP_LAYER), "auto")
    weights = DeviceWeights([model.module], torch.device("cpu"))
    padding = sum(
        tensor.numel() - tensor[: len(quantised[key.removesuffix("_scale")]), : num_blocks(quantised, key)].numel()
        for key, tensor in quantised.items()
        if tensor.dtype == torch.float8_e4m3fn
    )
    stored = sum(
        tensor.nbytes
        for key, tensor in quantised.items()
        if not key.startswith("visual.") and not key.endswith(".comfy_quant")
    )
    rotary = sum(tensor.nbytes for name, tensor in model.module.named_buffers() if "inv_freq" in name)
    assert padding > 0
    assert weights.host_bytes == stored - padding + rotary
    weights.enter()
    assert weights.device_bytes == weights.host_bytes
    assert encode(model).isfinite().all()
    num_parameters = sum(tensor.numel() for tensor in unquantised(quantised).values())
    assert (model.part.layout, model.part.num_parameters) == ("comfyui", num_parameters)
    assert (model.part.num_bytes, set(model.part.data_types.split(", "))) == (
        stored,
        {"U8", "F8_E4M3", "I8", "BF16", "F32"},
    )


def num_blocks(state: State, key: str) -> int:
    """Blocks of a row of the weight that a scale belongs to."""
    return 2 * state[key.removesuffix("_scale")].shape[1] // 16


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("model.layers.1.mlp.up_proj", b'{"format": "nvfp4"}'),
        ("model.layers.1.mlp.up_proj", b'{"format": "nvfp4", "full_precision_matrix_mult": false}'),
        ("model.layers.1.mlp.up_proj", b'{"format": "int8_tensorwise"}'),
        ("model.layers.1.mlp.up_proj", b"\xff\x1b[2J"),
        ("model.embed_tokens", b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'),
    ],
)
def test_another_quantisation_of_the_same_shapes_is_refused(
    quantised: State, tmp_path: Path, module: str, text: bytes
) -> None:
    spoilt = quantised | {f"{module}.comfy_quant": marker(text)}
    file = write_nvfp4(tmp_path / "nvfp4.safetensors", spoilt, TAP_LAYER)
    with pytest.raises(
        CheckpointError, match=r"only .* is computed with \(1 of 22 modules are marked otherwise\)"
    ) as raised:
        load_language_model(file, "auto")
    assert f"{module}.comfy_quant says" in str(raised.value)
    assert str(raised.value).isprintable()


def test_another_part_of_the_model_is_named(tiny_model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is the audio VAE \(.* layout\), not the text encoder"):
        load_language_model(tiny_model / "audio_vae", "auto")


@pytest.mark.parametrize(
    ("table", "num_parameters"),
    [("transformers", 551), ("comfy_bf16", 551), ("comfy_nvfp4_awq", 1352)],
)
def test_the_modules_of_the_published_size_take_exactly_what_is_read(table: str, num_parameters: int) -> None:
    """The published class without memory for weights: names, shapes and dtypes are those that the file's table has."""
    checkpoint = published(table)
    recognition = recognise(checkpoint)
    assert recognition is not None
    contents = describe(checkpoint, recognition)
    module = build_module(Path(table), contents, torch.bfloat16)
    taken = module.state_dict()
    assert taken.keys() == contents.parameters.keys()
    assert len(taken) == num_parameters
    for name, tensor in taken.items():
        parameter = contents.parameters[name]
        assert tuple(tensor.shape) == parameter.shape  # scales too: no published weight needs padding
        if not parameter.is_computed_with:
            assert tensor.dtype in {DTYPES[dtype] for dtype in parameter.dtypes}
