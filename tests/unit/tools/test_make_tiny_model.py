from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from h3stream.errors import ConfigError
from tools import make_tiny_model as tool
from tools.make_tiny_model import make_tiny_model

CHECKPOINTS = Path(__file__).parents[2] / "fixtures" / "checkpoints"
WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "audio_vae": "audio_vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def published(layout: str) -> dict[str, list[Any]]:
    tensors: dict[str, list[Any]] = json.loads((CHECKPOINTS / f"{layout}.json").read_text())["tensors"]
    return tensors


def stored(path: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(path, framework="pt") as file:
        return {k: (file.get_slice(k).get_shape(), file.get_slice(k).get_dtype()) for k in file.keys()}  # noqa: SIM118


def layer(key: str, prefix: str) -> int:
    """The index that follows `prefix`, or -1."""
    found = re.match(re.escape(prefix) + r"(\d+)\.", key)
    return int(found[1]) if found else -1


def pattern(keys: Any) -> set[str]:
    return {re.sub(r"\.\d+(?=\.)", ".N", key) for key in keys}


def test_the_same_seed_gives_the_same_bytes_in_another_process(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tools.make_tiny_model", str(tmp_path / "again")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(tool.__file__).parents[1])
    assert done.stderr == ""
    assert "coloured noise" in done.stdout
    assert digests(tmp_path / "again") == digests(tiny_model)


def test_another_seed_changes_every_weight_file_and_no_shape(tiny_model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "other", seed=1)
    first, second = digests(tiny_model), digests(tmp_path / "other")
    assert first.keys() == second.keys()
    for name in (*WEIGHTS.values(), "adapters/raven.safetensors"):
        assert first[name] != second[name], name
        assert stored(tiny_model / name) == stored(tmp_path / "other" / name)


def test_the_model_is_small_and_its_files_are_readable_by_all(tiny_model: Path) -> None:
    files = [path for path in tiny_model.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 40e6
    assert {oct(path.stat().st_mode & 0o444) for path in files} == {"0o444"}


def test_a_complete_model_is_left_alone_unless_forced(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model_index.json").write_text("{}")
    make_tiny_model(directory)
    assert [path.name for path in directory.iterdir()] == ["model_index.json"]
    make_tiny_model(directory, force=True)
    assert (directory / "transformer" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_says_that_it_keeps_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_index.json").touch()
    monkeypatch.setattr(sys, "argv", ["make_tiny_model", str(tmp_path), "--seed", "1"])
    with pytest.raises(SystemExit, match="holds a model already, which is kept; --force replaces it"):
        tool.main()
    assert [path.name for path in tmp_path.iterdir()] == ["model_index.json"]


def test_a_directory_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="no model directory"):
        make_tiny_model(tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_half_way(directory: Path, seed: int) -> None:
        (directory / "transformer").mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(tool, "_write_components", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        make_tiny_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_transformer_has_the_published_keys_and_dtypes_of_its_layers(tiny_model: Path) -> None:
    layers = json.loads((tiny_model / "transformer" / "config.json").read_text())["num_layers"]
    expected = {
        key: dtype
        for key, (_, dtype) in published("dit.diffusers").items()
        if layer(key, "transformer_blocks.") < layers
    }
    assert {key: dtype for key, (_, dtype) in stored(tiny_model / WEIGHTS["transformer"]).items()} == expected
    assert set(expected.values()) == {"F32", "BF16"}


def test_vaes_have_the_published_key_patterns_in_float32(tiny_model: Path) -> None:
    for component, layout in (("vae", "video_vae.diffusers"), ("audio_vae", "audio_vae.diffusers_and_official")):
        found = stored(tiny_model / WEIGHTS[component])
        assert pattern(found) == pattern(published(layout))
        assert {dtype for _, dtype in found.values()} == {"F32"}


def test_text_encoder_has_the_published_keys_of_its_layers_in_bfloat16(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "text_encoder" / "config.json").read_text())
    expected = {
        key
        for key in published("text_encoder.transformers")
        if layer(key, "model.language_model.layers.") < config["text_config"]["num_hidden_layers"]
        and layer(key, "model.visual.blocks.") < config["vision_config"]["depth"]
    }
    found = stored(tiny_model / WEIGHTS["text_encoder"])
    assert found.keys() == expected
    assert {dtype for _, dtype in found.values()} == {"BF16"}


def test_the_tapped_hidden_state_lies_above_the_deepstack_layers_and_below_the_last(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "text_encoder" / "config.json").read_text())
    deepstack = len(config["vision_config"]["deepstack_visual_indexes"])
    assert deepstack < config["h3_hidden_state_index"] < config["text_config"]["num_hidden_layers"]


def test_generation_defaults_name_a_legal_clip_and_say_that_it_is_noise(tiny_model: Path) -> None:
    defaults = json.loads((tiny_model / "generation_config.json").read_text())
    assert (defaults["num_frames"] - 5) % 17 == 0
    assert defaults["width"] % 32 == defaults["height"] % 32 == 0
    assert "random weights" in defaults["notice"]


def test_adapter_covers_every_module_of_the_inventory_with_matching_shapes(tiny_model: Path) -> None:
    layers = json.loads((tiny_model / "transformer" / "config.json").read_text())["num_layers"]
    path = tiny_model / "adapters" / "raven.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"lora_alpha": "4"}
    # The official layout of the same DiT: 2-D weights are the modules, so the published table names them all.
    modules = {
        key.removesuffix(".weight")
        for key, (shape, _) in published("dit.official").items()
        if len(shape) == 2 and layer(key, "blocks.") < layers
    }
    assert len(modules) == 4 * (layers + 2) + (layers + 1) + 2 + 5  # core, adaln, time, boundary
    prefix = "base_model.model.dit."
    assert tensors.keys() == {f"{prefix}{module}.lora_{side}.weight" for module in modules for side in "AB"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert {t.shape[0] for key, t in tensors.items() if "lora_A" in key} == {4}
    base = stored(tiny_model / WEIGHTS["transformer"])
    q_rows, hidden = base["transformer_blocks.0.attn.to_q.weight"][0]
    fused = f"{prefix}blocks.0.attn.qkv_proj"
    assert tensors[f"{fused}.lora_A.weight"].shape == (4, hidden)
    assert tensors[f"{fused}.lora_B.weight"].shape == (3 * q_rows, 4)
    head = f"{prefix}final_layer.video_out"
    assert tensors[f"{head}.lora_B.weight"].shape == (96, 4)


def load_vae(directory: Path) -> Any:
    import diffusers

    model_class = getattr(diffusers, json.loads((directory / "config.json").read_text())["_class_name"])
    model = model_class.from_config(model_class.load_config(directory))
    model.load_state_dict(load_file(directory / "diffusion_pytorch_model.safetensors"))
    return model.eval()


def noise_latents(model: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal latents, denormalised as a decoder reads them."""
    per_channel = (1, -1, *[1] * (len(shape) - 2))
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    mean, std = torch.tensor(model.config.latents_mean), torch.tensor(model.config.latents_std)
    return normal * std.view(per_channel) + mean.view(per_channel)


@torch.no_grad()
def test_normal_latents_decode_to_a_picture_that_varies_and_stays_in_range(tiny_model: Path) -> None:
    torch.set_num_threads(1)
    model = load_vae(tiny_model / "vae")
    frames = model.decode(noise_latents(model, (1, 24, 7, 4, 6))).sample  # [1, 3, 22, 64, 96]
    imagenet_mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1, 1)
    imagenet_std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1, 1)
    pixels = frames * imagenet_std + imagenet_mean
    assert pixels.shape == (1, 3, 22, 64, 96)
    assert ((pixels < 0) | (pixels > 1)).float().mean() < 0.01
    assert (pixels.mean() - 0.5).abs() < 0.1
    assert pixels.std(dim=(1, 3, 4)).min() > 0.05, "a frame is nearly one colour"
    assert pixels.diff(dim=2).abs().mean() > 0.005, "the picture stands still"


@torch.no_grad()
def test_normal_latents_decode_to_sound_that_is_neither_silent_nor_clipped(tiny_model: Path) -> None:
    torch.set_num_threads(1)
    model = load_vae(tiny_model / "audio_vae")
    waveform = model.decode(noise_latents(model, (2, 32, 60))).sample
    assert waveform.shape == (2, 1, 60 * 800)
    assert 0.02 < waveform.std() < 0.2
    assert waveform.abs().max() < 0.8
    assert waveform.mean().abs() < 1e-3
