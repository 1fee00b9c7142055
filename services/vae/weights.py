"""The two published VAEs, decoder sides only, on the host.

Everything here is about files: which keys there are, which are needed, which dtype each is kept in. The modules are
diffusers' own; what they compute is left to `video_stream.py` and `audio_stream.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from core.geometry import (
    AUDIO_LATENT_CHANNELS,
    FRAMES_PER_CHUNK,
    LATENTS_PER_CHUNK,
    SAMPLE_RATE,
    SAMPLES_PER_AUDIO_LATENT,
    SPATIAL_COMPRESSION,
    TAIL_LATENTS,
    VIDEO_LATENT_CHANNELS,
)
from h3stream.errors import CheckpointError
from services.common.checkpoint import header_digest, read_config, weight_files

VIDEO_CLASS = "AutoencoderKLMiniMaxH3"
AUDIO_CLASS = "AutoencoderKLMiniMaxH3Audio"

_UNUSED_VIDEO = ("encoder", "quant_conv")
_UNUSED_AUDIO = ("encoder", "pre_block", "mean_proj", "logs_proj")
"""Top-level modules that decoding never reads; their weights stay in the file."""


@dataclass(frozen=True)
class LatentStatistics:
    """Per-channel statistics that turn normalised latents into what a decoder reads: `z * std + mean`."""

    mean: tuple[float, ...]
    """One value per latent channel."""
    std: tuple[float, ...]
    """One value per latent channel, above 0."""


@dataclass(frozen=True)
class VaeModels:
    """Both decoders in host memory, in evaluation mode."""

    video: nn.Module
    """diffusers' video VAE without its encoder; tiling as the class has it by default."""
    video_statistics: LatentStatistics
    """Of the 24 video latent channels."""
    audio: nn.Module
    """diffusers' audio VAE without its encoder, weight norm folded into plain weights."""
    audio_statistics: LatentStatistics
    """Of the 32 audio latent channels."""
    digests: dict[str, str]
    """Weight files below the model directory, name to digest of header and size."""


def load_models(model_directory: Path, video_dtype: torch.dtype) -> VaeModels:
    """Loads `vae/` and `audio_vae/` of a model directory.

    video_dtype: compute dtype of the video decoder; the modules that the published class pins to float32 stay so.
    Raises CheckpointError, naming the file and the key, for anything missing, unknown, swapped or of a wrong shape.
    """
    video_directory, audio_directory = model_directory / "vae", model_directory / "audio_vae"
    video_config, audio_config = read_config(video_directory), read_config(audio_directory)
    _check_classes(video_config, audio_config)
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio  # seconds to import, so only here

    video = _build(AutoencoderKLMiniMaxH3, video_config, video_directory)
    # The rotary frequencies are no checkpoint key: made again, since they were built without memory.
    video.decoder.rope = type(video.decoder.rope)(
        int(video.config.decoder_attention_head_dim * video.config.decoder_rope_dim_ratio),
        theta=video.config.decoder_rope_theta,
    )
    pinned = frozenset(video._keep_in_fp32_modules)
    _load(
        video,
        video_directory,
        _UNUSED_VIDEO,
        dtype_of=lambda key: torch.float32 if pinned.intersection(key.split(".")) else video_dtype,
    )
    audio = _build(AutoencoderKLMiniMaxH3Audio, audio_config, audio_directory)
    _load(audio, audio_directory, _UNUSED_AUDIO, dtype_of=lambda key: torch.float32)
    _fold_weight_norm(audio)
    _check_geometry(video, audio)
    return VaeModels(
        video=video.eval().requires_grad_(False),
        video_statistics=_statistics(video_config, video_directory, VIDEO_LATENT_CHANNELS),
        audio=audio.eval().requires_grad_(False),
        audio_statistics=_statistics(audio_config, audio_directory, AUDIO_LATENT_CHANNELS),
        digests={
            str(path.relative_to(model_directory)): header_digest(path)
            for directory in (video_directory, audio_directory)
            for path in weight_files(directory)
        },
    )


def _check_classes(video_config: dict[str, Any], audio_config: dict[str, Any]) -> None:
    found = video_config.get("_class_name"), audio_config.get("_class_name")
    if found == (AUDIO_CLASS, VIDEO_CLASS):
        raise CheckpointError("the two VAEs are swapped: vae/ holds the audio VAE and audio_vae/ holds the video VAE")
    for folder, name, expected in zip(("vae", "audio_vae"), found, (VIDEO_CLASS, AUDIO_CLASS), strict=True):
        if name != expected:
            raise CheckpointError(f"{folder}/config.json names the class {name!r}, expected {expected!r}")


def _build(model_class: Any, config: dict[str, Any], directory: Path) -> Any:
    """The class with the shapes of its configuration and no memory for weights."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # The published audio class is built on torch's older weight norm, which says so; it is folded away below.
            warnings.simplefilter("ignore", FutureWarning)
            return model_class.from_config(config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{directory}/config.json does not describe a model: {error}") from error


def _load(model: Any, directory: Path, unused: tuple[str, ...], dtype_of: Callable[[str], torch.dtype]) -> None:
    """Fills the model from its safetensors files, tensor by tensor, and drops its unused modules."""
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    for name in unused:
        delattr(model, name)
    state: dict[str, torch.Tensor] = {}
    seen: dict[str, Path] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    if key not in shapes:
                        raise CheckpointError(f"{path} holds {key!r}, which {type(model).__name__} does not have")
                    if key in seen:
                        raise CheckpointError(f"{key!r} is in {seen[key]} and again in {path}")
                    seen[key] = path
                    if key.split(".", 1)[0] in unused:
                        continue
                    if file.get_slice(key).get_shape() != list(shapes[key]):
                        raise CheckpointError(
                            f"{path}: {key!r} has shape {file.get_slice(key).get_shape()}, "
                            f"config.json asks for {list(shapes[key])}"
                        )
                    state[key] = file.get_tensor(key).to(dtype_of(key))
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    missing = sorted(key for key in model.state_dict() if key not in state)
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} weights, the first is {missing[0]!r}")
    model.load_state_dict(state, strict=True, assign=True)


def _fold_weight_norm(model: nn.Module) -> None:
    """Replaces weight norm by the weights it computes.

    The class computes them anew on every call and keeps the result as a plain attribute, which would stay on the device
    when the weights leave it.
    """
    for module in model.modules():
        if hasattr(module, "weight_g"):
            torch.nn.utils.remove_weight_norm(module)


def _check_geometry(video: Any, audio: Any) -> None:
    """Refuses VAEs whose time and space arithmetic is not the one that the whole service is built on."""
    for what, found, expected in (
        ("vae: clip_length", video.config.clip_length, FRAMES_PER_CHUNK),
        ("vae: token_drop", video.config.token_drop, LATENTS_PER_CHUNK - TAIL_LATENTS),
        ("vae: spatial compression", video.spatial_compression_ratio, SPATIAL_COMPRESSION),
        ("vae: temporal compression", video.temporal_compression_ratio, 4),
        ("vae: latent_channels", video.config.latent_channels, VIDEO_LATENT_CHANNELS),
        ("audio_vae: samples per latent", audio.hop_length, SAMPLES_PER_AUDIO_LATENT),
        ("audio_vae: sampling_rate", audio.config.sampling_rate, SAMPLE_RATE),
        ("audio_vae: latent_channels", audio.config.latent_channels, AUDIO_LATENT_CHANNELS),
    ):
        if found != expected:
            raise CheckpointError(f"{what} is {found}, expected {expected}")


def _statistics(config: dict[str, Any], directory: Path, channels: int) -> LatentStatistics:
    values = []
    for name in ("latents_mean", "latents_std"):
        value = config.get(name)
        if not isinstance(value, list) or len(value) != channels or not all(math.isfinite(x) for x in value):
            raise CheckpointError(f"{directory}/config.json: {name} must be {channels} finite numbers")
        values.append(tuple(float(x) for x in value))
    if min(values[1]) <= 0:
        raise CheckpointError(f"{directory}/config.json: latents_std must be above 0")
    return LatentStatistics(*values)
