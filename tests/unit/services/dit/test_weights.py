from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError
from services.common.checkpoint import shard_files
from services.dit.weights import ISLANDS, load_transformer

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def directory(model_directory: Path, tmp_path: Path) -> Path:
    """A `transformer/` that a test may damage."""
    shutil.copytree(model_directory / "transformer", tmp_path / "transformer")
    return tmp_path / "transformer"


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    (directory / WEIGHTS).unlink()
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("compute_dtype", "expected"),
    [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)],
)
def test_the_stack_takes_the_compute_dtype_and_the_islands_stay_float32(
    directory: Path, compute_dtype: str, expected: torch.dtype
) -> None:
    stored = load_file(directory / WEIGHTS)
    model = load_transformer(directory, compute_dtype)
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if key.startswith(ISLANDS) else expected), key
        assert torch.equal(tensor, stored[key].to(tensor.dtype)), key
    assert model.rope.inv_freq.dtype == torch.float32
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in (*model.parameters(), *model.buffers()))


def test_everything_that_is_wrong_with_the_keys_is_said_at_once(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["blocks.0.attn.to_gate_compress.weight"] = torch.zeros(1)
    del tensors["proj_out.bias"], tensors["transformer_blocks.1.norm1.weight"]
    tensors["proj_in.weight"] = torch.zeros(96, 95)
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError) as raised:
        load_transformer(directory, "auto")
    message = str(raised.value)
    assert "unknown key 'blocks.0.attn.to_gate_compress.weight'" in message
    assert "missing key 'proj_out.bias'" in message
    assert "missing key 'transformer_blocks.1.norm1.weight'" in message
    assert "'proj_in.weight' is [96, 95], expected [96, 96]" in message
    assert f"{len(tensors) - 1} of {len(tensors) + 1} keys found" in message


def test_quantised_weights_are_refused(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    key = "transformer_blocks.0.ff.net.2.weight"
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError, match=r"1 tensors are quantised, the first is 'transformer_blocks.0.ff"):
        load_transformer(directory, "bfloat16")


def test_a_mixed_stack_needs_an_explicit_dtype(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["transformer_blocks.0.norm1.weight"] = tensors["transformer_blocks.0.norm1.weight"].float()
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError, match=r"stored in torch.bfloat16, torch.float32.*set compute_dtype"):
        load_transformer(directory, "auto")
    assert load_transformer(directory, "bfloat16").transformer_blocks[0].norm1.weight.dtype == torch.bfloat16


def test_a_checkpoint_of_another_geometry_is_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"in_channels": 16}))
    with pytest.raises(CheckpointError, match="in_channels is 16, the service needs 24"):
        load_transformer(directory, "auto")


def test_a_config_that_describes_no_model_is_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_layers": "x"}))
    with pytest.raises(CheckpointError, match=r"config\.json does not describe a model"):
        load_transformer(directory, "auto")


def test_a_folder_in_the_place_of_a_file_is_refused(directory: Path) -> None:
    (directory / "more.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"more\.safetensors cannot be read"):
        load_transformer(directory, "auto")


def test_shards_load_like_one_file(directory: Path) -> None:
    whole = load_transformer(directory, "auto").state_dict()
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sharded = load_transformer(directory, "auto").state_dict()
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[key], whole[key]) for key in whole)

    (directory / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks diffusion_pytorch_model-00002-of-00002\.safetensors"):
        shard_files(directory)


def test_a_key_in_two_files_is_refused(directory: Path) -> None:
    save_file({"proj_in.bias": torch.zeros(96)}, directory / "extra.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 'proj_in.bias', which another file"):
        load_transformer(directory, "auto")


def test_an_index_that_is_none_is_refused(directory: Path) -> None:
    (directory / f"{WEIGHTS}.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        shard_files(directory)


def test_a_file_that_is_cut_off_is_refused(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_transformer(directory, "auto")
