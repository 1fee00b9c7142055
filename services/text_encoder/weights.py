"""The language model of a text encoder checkpoint, cut to the layers that H3 reads, in host memory.

What the files hold and how it is named is decided in `services/checkpoints/text_encoder.py`; the modules are
transformers' own, with linear layers and embedding replaced where the file holds them quantised. What lies above the
hidden state that H3 reads (further layers, the final norm, the head) and the vision tower never leave the disk.

Source: docs/reference/h3-model.md §6.3, §6.5, §6.6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from h3stream.errors import CheckpointError
from h3stream.job import ModelPart
from services.checkpoints.model_files import open_text_encoder
from services.checkpoints.printable import printable
from services.checkpoints.source import StoredTensor
from services.checkpoints.text_encoder import Contents, marker_problem
from services.common.parts import model_part, weight_digests
from services.common.weights import DTYPES, load_parameters, read_tensors
from services.text_encoder.nvfp4 import Int8Embedding, Nvfp4Linear, untiled_scales

_COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LanguageModel:
    """The part of the text encoder that H3 runs."""

    module: nn.Module
    """transformers' Qwen3-VL text model of as many layers as are read, its final norm the identity, in evaluation
    mode."""
    dtype: torch.dtype
    """What it computes in."""
    hidden_size: int
    """Width of a hidden state."""
    vocab_size: int
    """Rows of the embedding."""
    max_tokens: int
    """Positions that it was made for."""
    part: ModelPart
    """What was read, for whoever asks the server."""
    digests: dict[str, str]
    """Weight files that were read, folder and name to digest."""


def load_language_model(path: Path, dtype: str) -> LanguageModel:
    """Loads a text encoder: a folder of weight files or a single one, in any layout that is known.

    dtype: "auto" computes in what is stored, of an NVFP4 file in the dtype of its norms; "bfloat16" and "float32"
    convert.
    Raises CheckpointError that tells everything that is wrong with the files.
    """
    files = open_text_encoder(path)
    checkpoint, contents = files.checkpoint, files.contents
    read = {key: checkpoint.tensors[key] for key, rule in contents.key_map.items() if rule.targets}
    compute_dtype = _compute_dtype(path, contents, read, dtype)
    _check_markers(path, {key: checkpoint.tensors[key] for key in contents.markers})
    module = build_module(path, contents, compute_dtype)
    parameters = load_parameters(
        checkpoint.tensors,
        contents.key_map,
        lambda name: compute_dtype if contents.parameters[name].is_computed_with else None,
    )
    for name, linear in module.named_modules():
        if isinstance(linear, Nvfp4Linear):
            key = f"{name}.weight_scale"
            parameters[key] = untiled_scales(parameters[key], linear.num_outputs, linear.num_inputs)
    module.load_state_dict(parameters, strict=True, assign=True)
    part = model_part("text_encoder", files.layout, checkpoint, read.values())
    read_files = {stored.path for stored in read.values()}
    return LanguageModel(
        module=module.eval().requires_grad_(False),
        dtype=compute_dtype,
        hidden_size=contents.settings["hidden_size"],
        vocab_size=contents.settings["vocab_size"],
        max_tokens=module.config.max_position_embeddings,
        part=replace(part, num_parameters=contents.num_parameters),
        digests=weight_digests(
            "text_encoder", replace(checkpoint, headers=tuple(h for h in checkpoint.headers if h.path in read_files))
        ),
    )


def _compute_dtype(path: Path, contents: Contents, read: dict[str, StoredTensor], dtype: str) -> torch.dtype:
    if dtype != "auto":
        return _COMPUTE_DTYPES[dtype]
    stored = {
        tensor.info.dtype
        for key, tensor in read.items()
        if contents.parameters[contents.key_map[key].targets[0]].is_computed_with
    }
    if len(stored) > 1:
        raise CheckpointError(f"{path}: weights are {' and '.join(sorted(stored))}; set dtype to bfloat16 or float32")
    return DTYPES[stored.pop()]


def _check_markers(path: Path, markers: dict[str, StoredTensor]) -> None:
    """Raises CheckpointError unless every module is quantised in the way that is computed here."""
    texts = ((key, text.numpy().tobytes()) for key, text in read_tensors(markers))
    wrong = [problem for key, text in texts if (problem := marker_problem(key, text)) is not None]
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]} ({len(wrong)} of {len(markers)} modules are marked otherwise)")


def build_module(path: Path, contents: Contents, dtype: torch.dtype) -> Any:
    """The text model with no memory for weights. Its output is the last layer's, since the norm does nothing."""
    from transformers import Qwen3VLTextConfig, Qwen3VLTextModel  # a second to import, so only where a worker is built

    with torch.device("meta"):
        try:
            config = Qwen3VLTextConfig.from_dict(contents.settings)
            module: Any = Qwen3VLTextModel(config)
        except Exception as error:  # whatever a wrong value makes the library raise
            reason = printable(str(error))
            raise CheckpointError(f"{path}: its config.json does not describe a Qwen3-VL model: {reason}") from error
        if contents.is_nvfp4:
            _quantise(module, contents, dtype)
    module.norm = nn.Identity()
    # The rotary frequencies are no checkpoint key: made again, since they were built without memory.
    module.rotary_emb = type(module.rotary_emb)(config)
    return module


def _quantise(module: Any, contents: Contents, dtype: torch.dtype) -> None:
    """Replaces linear layers and embedding by modules that hold what an NVFP4 file stores."""
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear):
            has_pre_quant_scale = f"{name}.pre_quant_scale" in contents.parameters
            packed = Nvfp4Linear(linear.in_features, linear.out_features, has_pre_quant_scale=has_pre_quant_scale)
            module.set_submodule(name, packed)
    embedding = module.embed_tokens
    module.embed_tokens = Int8Embedding(embedding.num_embeddings, embedding.embedding_dim, dtype)
