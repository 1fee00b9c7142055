"""The linear map from latents to colours that stills are made with, fitted to the video VAE that is loaded.

Seeded random latents are decoded once, and the mean colour of the pixels of each latent is fitted on its 24 channels by
least squares. The result is kept on disk for the next start, under a name that says for which VAE it holds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.geometry import (
    FRAMES_BEFORE_LATENT,
    FRAMES_PER_CHUNK,
    LATENTS_PER_CHUNK,
    SPATIAL_COMPRESSION,
    VIDEO_LATENT_CHANNELS,
)
from h3stream.errors import GenerationError, InvalidRequestError
from services.common.preview_map import PreviewMap
from services.common.residency import DeviceWeights
from services.vae.video_stream import WINDOW_LATENTS, VideoStream
from services.vae.weights import LatentStatistics, VaeModels

log = logging.getLogger(__name__)

_SEED = 0
_NUM_WINDOWS = 4
_SIDE = 8
"""Rows and columns of latents of a decode: 128 pixels each way, one tile, cheap also on a CPU."""
_METHOD = f"{_NUM_WINDOWS} windows of {_SIDE}x{_SIDE}, seed {_SEED}"
"""Part of the name of a kept map: one that was fitted in another way does not count."""


def find_preview_map(models: VaeModels, weights: DeviceWeights, cache: Path | None) -> PreviewMap | None:
    """The map of the video VAE: the one kept in `cache`, or a new one, which is then kept there.

    A new one is fitted on the device, in a phase of its own: on a host it could take minutes in half precision. None
    where that fails, which is logged: a service without stills is better than none.
    weights: of the models, off the device.
    """
    path = None if cache is None else _kept_path(cache, models)
    if path is not None and (kept := _read_map(path)) is not None:
        return kept
    try:
        weights.enter()
        try:
            fitted = fit_preview_map(models.video, models.video_statistics, weights.device)
        finally:
            weights.leave()
    except (GenerationError, torch.OutOfMemoryError, OSError) as error:
        log.warning("there will be no stills, as their map could not be fitted: %s", error)
        return None
    if path is not None:
        try:
            _write_map(path, fitted)
        except OSError as error:
            log.warning("the map of stills will be made again at the next start: %s", error)
    return fitted


def fit_preview_map(vae: Any, statistics: LatentStatistics, device: torch.device) -> PreviewMap:
    """The map of a video VAE whose weights are on `device`; the same each time there.

    Raises PhaseError if the decoder returns anything that is not a number.
    """
    generator = torch.Generator().manual_seed(_SEED)
    shape = (1, VIDEO_LATENT_CHANNELS, WINDOW_LATENTS, _SIDE, _SIDE)
    inputs, colours = [], []
    for _ in range(_NUM_WINDOWS):
        latents = torch.randn(shape, generator=generator)
        (frames,) = VideoStream(vae, statistics, device).push(latents)
        inputs.append(latents[0, :, :LATENTS_PER_CHUNK].flatten(1).T)
        colours.append(latent_colours(frames.cpu()).flatten(1).T)
    z = torch.cat(inputs).double()
    design = torch.cat([z, torch.ones(len(z), 1, dtype=torch.float64)], dim=1)
    # The normal equations: 25 unknowns of independent inputs, far from singular.
    solution = torch.linalg.solve(design.T @ design, design.T @ torch.cat(colours).double()).float()
    return PreviewMap(tuple(solution[:-1].T.flatten().tolist()), tuple(solution[-1].tolist()))


def latent_colours(frames: Tensor) -> Tensor:
    """Mean colour of the pixels that each latent of a decode stands for: `[3, 5, H, W]`.

    frames: the 17 final frames of a decode, `[1, 3, 17, 16 H, 16 W]` in [0, 1].
    """
    pooled = torch.nn.functional.avg_pool2d(frames[0].transpose(0, 1), SPATIAL_COMPRESSION).transpose(0, 1)
    bounds = itertools.pairwise((*FRAMES_BEFORE_LATENT, FRAMES_PER_CHUNK))
    return torch.stack([pooled[:, start:stop].mean(dim=1) for start, stop in bounds], dim=1)


def _kept_path(cache: Path, models: VaeModels) -> Path:
    """Where the map of a video VAE is kept: the name depends on its weights, its statistics and the way of fitting."""
    weights = {name: digest for name, digest in models.digests.items() if name.startswith("video_vae/")}
    facts = json.dumps([_METHOD, weights, asdict(models.video_statistics)], sort_keys=True)
    return cache / f"{hashlib.sha256(facts.encode()).hexdigest()}.json"


def _read_map(path: Path) -> PreviewMap | None:
    """A kept map; None if there is none, or nothing that is one."""
    try:
        values: Mapping[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
        return PreviewMap(tuple(map(float, values["weights"])), tuple(map(float, values["bias"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, InvalidRequestError) as error:
        log.warning("%s is no preview map and will be made again: %s", path, error)
        return None


def _write_map(path: Path, preview_map: PreviewMap) -> None:
    """Keeps a map, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(preview_map), file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
