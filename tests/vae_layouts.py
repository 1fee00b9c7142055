"""The small VAEs of the golden vectors in every published layout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from services.checkpoints.header import BITS, TensorInfo
from services.checkpoints.source import Checkpoint, StoredTensor

H3 = Path(__file__).parent / "fixtures" / "h3"

Layout = Literal["diffusers", "official", "comfyui"]
LAYOUTS: tuple[Layout, ...] = ("diffusers", "official", "comfyui")


@cache
def vector(name: str) -> dict[str, torch.Tensor]:
    return load_file(H3 / f"{name}.safetensors")


def statistics(component: str) -> dict[str, torch.Tensor]:
    """latents_mean and latents_std of the small "video" or "audio" VAE."""
    source = vector("video_vae_decode_tiled" if component == "video" else "audio_vae_state_singlefile")
    return {key: source[key] for key in ("latents_mean", "latents_std")}


def class_config(component: str) -> dict[str, Any]:
    """A diffusers `config.json`, statistics included."""
    names = {"video": "AutoencoderKLMiniMaxH3", "audio": "AutoencoderKLMiniMaxH3Audio"}
    told = {key: tensor.tolist() for key, tensor in statistics(component).items()}
    config = json.loads((H3 / "config.json").read_text())[f"{component}_vae_config"]
    return {"_class_name": names[component], **config, **told}


def official_config(component: str) -> dict[str, Any]:
    """A `config.json` as the official repository has it: statistics, and no architecture of the diffusers class."""
    names = {"video": "MiniMaxH3VideoVAE", "audio": "MiniMaxH3AudioVAE"}
    return {"_class_name": names[component], **{k: v.tolist() for k, v in statistics(component).items()}}


def state(component: str, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a weight file, all float32."""
    if component == "audio":
        return vector("audio_vae_state_singlefile" if layout == "comfyui" else "audio_vae_state_diffusers")
    if layout == "comfyui":
        return vector("video_vae_state_official") | statistics("video")
    return vector(f"video_vae_state_{layout}")


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path)
    return path


def write_vae(directory: Path, component: Literal["video", "audio"], layout: Layout) -> Path:
    """Writes a VAE as it is published in a layout; returns the file or folder that is given to a server.

    The small video decoder has heads of 24 channels, which shapes cannot tell: `lend_config` says so where this does
    not.
    """
    tensors = state(component, layout)
    if layout == "comfyui":
        return write_weights(directory / f"minimax_h3_{component}_vae.safetensors", tensors)
    if layout == "official":
        folder = directory / ("video_vae" if component == "video" else "audio_vae")
        write_json(folder / "config.json", official_config(component))
        weights = folder / "source" if component == "video" else folder
        return write_weights(weights / "model.safetensors", tensors).parent
    folder = directory / ("vae" if component == "video" else "audio_vae")
    write_json(folder / "config.json", class_config(component))
    return write_weights(folder / "diffusion_pytorch_model.safetensors", tensors).parent


def lend_config(model_directory: Path, component: Literal["video", "audio"] = "video") -> Path:
    """Writes the architecture, without weights, into a model directory that lends it to files elsewhere."""
    folder = "vae" if component == "video" else "audio_vae"
    config = {k: v for k, v in class_config(component).items() if not k.startswith("latents_")}
    write_json(model_directory / folder / "config.json", config)
    return model_directory


def header_only(tensors: Mapping[str, tuple[Sequence[int], str]]) -> Checkpoint:
    """A checkpoint of these shapes and dtypes that is on no disk."""
    path = Path("/nowhere/model.safetensors")
    stored = {
        key: StoredTensor(path, TensorInfo(dtype, tuple(shape), 0, math.prod(shape) * BITS[dtype] // 8))
        for key, (shape, dtype) in tensors.items()
    }
    return Checkpoint(path, (), stored, has_index=False, config=None)
