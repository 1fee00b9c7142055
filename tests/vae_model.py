"""A small model directory with the two VAEs, made from the golden vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RAVEN = Path(__file__).parent / "fixtures" / "raven"


def video_case() -> dict[str, torch.Tensor]:
    """latents [1, 24, 17, 2, 3], latents_mean, latents_std, frames [1, 3, 56, 32, 48] in [0, 1]."""
    return load_file(RAVEN / "video_vae.v1.io.safetensors")


def audio_case() -> dict[str, torch.Tensor]:
    """latents [1, 32, 2, 94], latents_mean, latents_std, waveform [1, 2, 75200], divisor."""
    return load_file(RAVEN / "audio_vae.s1.r1.io.safetensors")


def media() -> dict[str, Any]:
    """The configurations and call logs of the vectors."""
    return json.loads((RAVEN / "media.json").read_text())


def write_model_directory(directory: Path) -> Path:
    """Writes `vae/` and `audio_vae/` in the published layout; returns the directory."""
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

    for folder, model_class, config, case, weights in (
        ("vae", AutoencoderKLMiniMaxH3, media()["video"]["v1"]["config"], video_case(), "video_vae.v1.weights"),
        (
            "audio_vae",
            AutoencoderKLMiniMaxH3Audio,
            media()["audio"]["s1"]["config"],
            audio_case(),
            "audio_vae.s1.weights",
        ),
    ):
        target = directory / folder
        target.mkdir(parents=True)
        statistics = {name: case[name].tolist() for name in ("latents_mean", "latents_std")}
        with torch.device("meta"):
            model = model_class(**config, **statistics)
        model.save_config(target)
        save_file(load_file(RAVEN / f"{weights}.safetensors"), target / "diffusion_pytorch_model.safetensors")
    return directory
