"""The published DiT checkpoint into diffusers' module tree: straight from the files, every key accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.geometry import AUDIO_LATENT_CHANNELS, PATCH, VIDEO_LATENT_CHANNELS
from h3stream.errors import CheckpointError
from services.common.checkpoint import read_config, shard_files

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel

ISLANDS = ("proj_in.", "audio_proj_in.", "time_embedder.", "proj_out.", "audio_proj_out.")
"""Modules stored and run in float32, whatever the block stack computes in."""
_PROBE = "transformer_blocks.0.attn.to_q.weight"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_GEOMETRY = {
    "in_channels": VIDEO_LATENT_CHANNELS,
    "audio_in_channels": AUDIO_LATENT_CHANNELS,
    "patch_size": [1, PATCH, PATCH],
}


def load_transformer(directory: Path, compute_dtype: str) -> MiniMaxH3Transformer3DModel:
    """The DiT of a `transformer/` directory in host memory, ready for inference.

    compute_dtype: "float32", "bfloat16" or "auto" (as stored) for everything but the float32 islands.
    Tensors whose dtype needs no change stay memory-mapped: there is no second copy.
    Raises CheckpointError that lists every unknown, missing or misshapen key.
    """
    from diffusers import MiniMaxH3Transformer3DModel  # five seconds of import, only needed by whoever loads

    config = read_config(directory)
    for name, value in _GEOMETRY.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"{directory / 'config.json'}: {name} is {config[name]}, the service needs {value}")
    try:
        with torch.device("meta"):
            model = MiniMaxH3Transformer3DModel.from_config(config)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{directory / 'config.json'} does not describe a model: {error}") from error
    tensors = _read_tensors(shard_files(directory))
    _check_keys(directory, model.state_dict(), tensors)
    _cast(directory, tensors, compute_dtype)
    model.load_state_dict(tensors, strict=True, assign=True)
    # Not stored: computed here from the configuration, in float32.
    model.rope = type(model.rope)(model.config.rope_freq_dim, model.config.rope_theta)
    return model.requires_grad_(False).eval()


def _read_tensors(files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    if key in tensors:
                        raise CheckpointError(f"{path} holds {key!r}, which another file of the checkpoint holds too")
                    tensors[key] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return tensors


def _check_keys(directory: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    problems = [f"unknown key {key!r}" for key in sorted(found.keys() - expected.keys())]
    problems += [f"missing key {key!r}" for key in sorted(expected.keys() - found.keys())]
    problems += [
        f"{key!r} is {list(found[key].shape)}, expected {list(expected[key].shape)}"
        for key in sorted(expected.keys() & found.keys())
        if found[key].shape != expected[key].shape
    ]
    if problems:
        raise CheckpointError(
            f"{directory}: {len(expected.keys() & found.keys())} of {len(expected)} keys found; {'; '.join(problems)}"
        )


def _cast(directory: Path, tensors: dict[str, Tensor], compute_dtype: str) -> None:
    """Brings every tensor to the dtype it runs in, in place. Raises CheckpointError for quantised or mixed weights."""
    quantised = sorted(key for key, tensor in tensors.items() if tensor.dtype not in _FLOATS)
    if quantised:
        raise CheckpointError(
            f"{directory}: {len(quantised)} tensors are quantised, the first is {quantised[0]!r} "
            f"({tensors[quantised[0]].dtype}); the adapter needs the modules it was trained on"
        )
    stored = tensors[_PROBE].dtype
    target = stored if compute_dtype == "auto" else _DTYPES[compute_dtype]
    stack = [key for key in tensors if not key.startswith(ISLANDS)]
    if compute_dtype == "auto":
        mixed: list[Any] = sorted({str(tensors[key].dtype) for key in stack})
        if len(mixed) > 1 or stored == torch.float16:
            raise CheckpointError(
                f"{directory}: the block stack is stored in {', '.join(mixed)}, so the compute dtype cannot be taken "
                "from it; set compute_dtype to bfloat16 or float32"
            )
    for key, tensor in tensors.items():
        tensors[key] = tensor.to(torch.float32 if key.startswith(ISLANDS) else target)
