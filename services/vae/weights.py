"""The two published VAEs, decoder sides only, on the host.

Which files they are in and what their keys mean is known in `services/checkpoints`; here the modules, which are
diffusers' own, are made and filled. What they compute is left to `video_stream.py` and `audio_stream.py`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from h3stream.job import ModelPart
from services.checkpoints.components import FOLDERS, part_path
from services.checkpoints.model_files import VaeFiles, open_vae, refuse_swapped_vaes
from services.checkpoints.vae_files import STATISTICS
from services.common.parts import model_part, weight_digests
from services.common.weights import load_parameters, read_tensors

log = logging.getLogger(__name__)

_MAX_ROUNDING = 2.0**-7
"""Largest relative difference between a statistic and a rounded copy of it in a weight file; bfloat16 has 2^-8."""


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
    parts: tuple[ModelPart, ...]
    """What the two were loaded from."""
    digests: dict[str, str]
    """Weight files, by folder and name, to the digest of a sample of them."""


def load_models(
    model_directory: Path | None,
    video_dtype: torch.dtype,
    *,
    video_path: Path | None = None,
    audio_path: Path | None = None,
) -> VaeModels:
    """Loads both VAEs from a model directory, or from files and folders that replace its own.

    video_dtype: compute dtype of the video decoder; the modules that the published class pins to float32 stay so.
    Raises ConfigError if a path is missing, CheckpointError, naming file and keys, for anything that is not the VAE it
    should be, and for whatever is missing, unknown, of a wrong shape or a wrong dtype.
    """
    video_path = part_path(model_directory, "video_vae", video_path)
    audio_path = part_path(model_directory, "audio_vae", audio_path)
    refuse_swapped_vaes(video_path, audio_path)
    video_files = open_vae("video_vae", video_path, model_directory)
    audio_files = open_vae("audio_vae", audio_path, model_directory)
    for files in (video_files, audio_files):
        for note in files.notes:
            log.info("%s: %s", files.checkpoint.path, note)
    video_statistics = latent_statistics(video_files, VIDEO_LATENT_CHANNELS)
    audio_statistics = latent_statistics(audio_files, AUDIO_LATENT_CHANNELS)
    video, audio = _load_video(video_files, video_dtype), _load_audio(audio_files)
    _check_geometry(video, audio)
    return VaeModels(
        video=video.eval().requires_grad_(False),
        video_statistics=video_statistics,
        audio=audio.eval().requires_grad_(False),
        audio_statistics=audio_statistics,
        parts=tuple(_part(files) for files in (video_files, audio_files)),
        digests=weight_digests("video_vae", video_files.checkpoint)
        | weight_digests("audio_vae", audio_files.checkpoint),
    )


def _part(files: VaeFiles) -> ModelPart:
    """What is told about the files of a VAE."""
    return model_part(
        files.component, files.layout, files.checkpoint, (files.checkpoint.tensors[key] for key in files.rules)
    )


def _load_video(files: VaeFiles, dtype: torch.dtype) -> Any:
    from diffusers import AutoencoderKLMiniMaxH3  # seconds to import, so only here

    video = _build(AutoencoderKLMiniMaxH3, files)
    # The rotary frequencies are no checkpoint key: made again, since they were built without memory.
    video.decoder.rope = type(video.decoder.rope)(
        int(video.config.decoder_attention_head_dim * video.config.decoder_rope_dim_ratio),
        theta=video.config.decoder_rope_theta,
    )
    pinned = frozenset(video._keep_in_fp32_modules)
    video.load_state_dict(
        load_parameters(
            files.checkpoint.tensors,
            files.rules,
            dtype_of=lambda key: torch.float32 if pinned.intersection(key.split(".")) else dtype,
        ),
        assign=True,
    )
    return video


def _load_audio(files: VaeFiles) -> Any:
    from diffusers import AutoencoderKLMiniMaxH3Audio

    audio = _build(AutoencoderKLMiniMaxH3Audio, files)
    is_folded = files.layout == "comfyui"
    if is_folded:
        _fold_weight_norm(audio)
    audio.load_state_dict(
        load_parameters(files.checkpoint.tensors, files.rules, dtype_of=lambda key: torch.float32), assign=True
    )
    if not is_folded:
        _fold_weight_norm(audio)
    return audio


def _build(model_class: Any, files: VaeFiles) -> Any:
    """The decoding side of the class, with the shapes of the architecture and no memory for weights."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # The published audio class is built on torch's older weight norm, which says so; it is folded away.
            warnings.simplefilter("ignore", FutureWarning)
            model = model_class.from_config(files.architecture.config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        origin = files.architecture.source or f"{files.checkpoint.path}: its shapes"
        raise CheckpointError(f"{origin} does not describe a model: {error}") from error
    for name in files.unused_modules:
        delattr(model, name)
    return model


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


def latent_statistics(files: VaeFiles, channels: int) -> LatentStatistics:
    """The latent statistics of a configuration, else the copies in the weight file, which may be rounded.

    Raises CheckpointError if there are none, they are impossible, or the weights' own configuration has others.
    """
    path, tensors = files.checkpoint.path, files.checkpoint.tensors
    stored = None
    if tensors.keys() >= set(STATISTICS):
        read = read_tensors({key: tensors[key] for key in STATISTICS})
        stored = _checked_statistics({key: tensor.tolist() for key, tensor in read}, path, channels)
    for file in files.architecture.files:
        if all(file.values.get(key) is None for key in STATISTICS):
            continue
        told = _checked_statistics(file.values, file.path, channels)
        if stored is None or _are_alike(told, stored):
            return told
        if file.is_own:
            raise CheckpointError(
                f"{file.path} has other latent statistics than {path}: one of the two belongs to another model"
            )
    if stored is None:
        folder = FOLDERS[files.component][0]
        raise CheckpointError(
            f"{path} holds no latent statistics, and no config.json with {' and '.join(STATISTICS)} was found; put the "
            f"{folder}/config.json of the published diffusers repository beside the weights, or give --model DIR that "
            "has it"
        )
    return stored


def _checked_statistics(values: Mapping[str, Any], source: Path, channels: int) -> LatentStatistics:
    found = []
    for name in STATISTICS:
        value = values.get(name)
        if not isinstance(value, list) or len(value) != channels or not all(map(_is_finite, value)):
            raise CheckpointError(f"{source}: {name} must be {channels} finite numbers")
        found.append(tuple(float(x) for x in value))
    if min(found[1]) <= 0:
        raise CheckpointError(f"{source}: {STATISTICS[1]} must be above 0")
    return LatentStatistics(*found)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= torch.finfo(torch.float32).max  # NaN compares false


def _are_alike(told: LatentStatistics, stored: LatentStatistics) -> bool:
    pairs = zip(told.mean + told.std, stored.mean + stored.std, strict=True)
    return all(math.isclose(a, b, rel_tol=_MAX_ROUNDING, abs_tol=1e-6) for a, b in pairs)
