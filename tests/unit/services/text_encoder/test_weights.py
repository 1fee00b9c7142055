from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError
from services.text_encoder.encoder import hidden_states
from services.text_encoder.weights import LanguageModel, load_language_model

State = dict[str, torch.Tensor]
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
    assert list(model.digests) == ["model.safetensors"]


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
    assert list(sharded.digests) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_file_that_the_index_does_not_name_is_not_read(directory: Path) -> None:
    shard(directory, 2)
    save_file({"stranger": torch.zeros(1)}, directory / "consolidated.safetensors")
    assert len(load_language_model(directory, "auto").digests) == 2


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory, 2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors, which its index names"):
        load_language_model(directory, "auto")


def test_an_index_cannot_name_files_elsewhere(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    index = {"weight_map": {"any": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors, which its index names"):
        load_language_model(directory, "auto")


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(directory: Path, content: str) -> None:
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not a safetensors index"):
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
    assert (
        f"2 missing: {LANGUAGE}embed_tokens.weight, {LANGUAGE}layers.0.mlp.up_proj.weight; "
        f"2 unknown: embed_tokens.weight, {LANGUAGE}layers.6.input_layernorm.weight; 2 wrong: "
    ) in message
    assert f"{LANGUAGE}layers.1.input_layernorm.weight is [129], config.json asks for [128]" in message
    assert f"{LANGUAGE}layers.2.input_layernorm.weight is F16, expected F32 or BF16" in message


def test_a_key_in_two_files_is_named(directory: Path) -> None:
    key = f"{LANGUAGE}layers.0.input_layernorm.weight"
    state = load_file(directory / "model.safetensors")
    save_file({key: state[key]}, directory / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"1 wrong: .*input_layernorm\.weight is in two files"):
        load_language_model(directory, "auto")


def test_a_file_that_is_cut_off_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_language_model(directory, "auto")


def test_weights_of_two_dtypes_need_a_choice(directory: Path) -> None:
    key = f"{LANGUAGE}layers.0.input_layernorm.weight"
    edit_state(directory, lambda state: state.update({key: state[key].float()}))
    with pytest.raises(CheckpointError, match="BF16 and F32; set dtype to one of them"):
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


def test_a_config_that_describes_no_model_is_refused(directory: Path) -> None:
    edit_config(directory, text_config={"hidden_size": "wide"})
    with pytest.raises(CheckpointError, match="does not describe a Qwen3-VL model"):
        load_language_model(directory, "auto")
