"""The language model of `text_encoder/`, cut to the layers that H3 reads, in host memory.

Files, keys, shapes and dtypes are decided here; the modules are transformers' own. What lies above the hidden state
that H3 reads (further layers, the final norm, the head) and the vision tower never leave the disk.

Source: docs/reference/h3-model.md §6.3, §6.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from h3stream.errors import CheckpointError
from services.common.checkpoint import header_digest, read_config, shard_files

DEFAULT_HIDDEN_STATE_INDEX = 50
"""Hidden state that H3 reads of the published 64-layer model: the output of layer 49, before any final norm."""
HIDDEN_STATE_INDEX_KEY = "h3_hidden_state_index"
"""Key of `config.json` by which a model of another depth says which hidden state was meant."""

_PREFIX = "model.language_model."
_UNREAD_PREFIXES = ("model.visual.", "lm_head.", f"{_PREFIX}norm.")
_LAYER = re.compile(re.escape(_PREFIX) + r"layers\.(\d+)\.")
_STORED_DTYPES = ("F32", "BF16")
_COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_LISTED = 20
"""Keys named per kind of fault; a checkpoint of another model would name a thousand."""


@dataclass(frozen=True)
class LanguageModel:
    """The part of the text encoder that H3 runs."""

    module: nn.Module
    """transformers' Qwen3-VL text model of as many layers as are read, its final norm the identity, in evaluation
    mode."""
    hidden_size: int
    """Width of a hidden state."""
    vocab_size: int
    """Rows of the embedding."""
    digests: dict[str, str]
    """Weight files, name to digest of header and size."""


def load_language_model(directory: Path, dtype: str) -> LanguageModel:
    """Loads a `text_encoder/` directory, one file or shards with an index.

    dtype: "auto" keeps what is stored; "bfloat16" and "float32" convert.
    Raises CheckpointError naming every key that is missing, unknown or of a wrong shape.
    """
    config, num_stored_layers = _text_config(directory)
    module = _build(config)
    files = shard_files(directory)
    shapes = {_PREFIX + name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    faults = _faults(files, shapes, range(config.num_hidden_layers, num_stored_layers), dtype)
    if faults:
        raise CheckpointError(f"{directory} does not fit its config.json. {'; '.join(faults)}")
    state = {
        # Converted one by one as they are read: there is never a second copy of the model.
        key.removeprefix(_PREFIX): tensor[:] if dtype == "auto" else tensor[:].to(_COMPUTE_DTYPES[dtype])
        for key, tensor in _tensors(files)
        if key in shapes
    }
    module.load_state_dict(state, strict=True, assign=True)
    return LanguageModel(
        module=module.eval().requires_grad_(False),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        digests={path.name: header_digest(path) for path in files},
    )


def _text_config(directory: Path) -> tuple[Any, int]:
    """The language model's configuration with as many layers as H3 reads, and the number of layers stored."""
    stored = read_config(directory)
    if stored.get("model_type") != "qwen3_vl":
        raise CheckpointError(f"{directory}/config.json is of type {stored.get('model_type')!r}, expected 'qwen3_vl'")
    from transformers import Qwen3VLConfig  # a second to import, so only where a worker is built

    try:
        config = Qwen3VLConfig.from_dict(stored).text_config
    except Exception as error:  # whatever a wrong value makes the library raise
        raise CheckpointError(f"{directory}/config.json does not describe a Qwen3-VL model: {error}") from error
    num_stored_layers: int = config.num_hidden_layers
    index = stored.get(HIDDEN_STATE_INDEX_KEY, DEFAULT_HIDDEN_STATE_INDEX)
    if type(index) is not int or not 1 <= index <= num_stored_layers:
        raise CheckpointError(
            f"{directory}: hidden state {index} is wanted ({HIDDEN_STATE_INDEX_KEY}, {DEFAULT_HIDDEN_STATE_INDEX} "
            f"where it is absent), but the model has {num_stored_layers} layers"
        )
    config.num_hidden_layers = index
    return config, num_stored_layers


def _build(config: Any) -> nn.Module:
    """The text model with no memory for weights. Its output is the last layer's, since the norm does nothing."""
    from transformers import Qwen3VLTextModel

    with torch.device("meta"):
        module: Any = Qwen3VLTextModel(config)
    module.norm = nn.Identity()
    # The rotary frequencies are no checkpoint key: made again, since they were built without memory.
    module.rotary_emb = type(module.rotary_emb)(config)
    return module  # type: ignore[no-any-return]


def _faults(files: list[Path], shapes: dict[str, list[int]], unread_layers: range, dtype: str) -> list[str]:
    """Everything that is wrong with the files' keys, shapes and dtypes, from their headers alone.

    shapes: of the keys that must be there.  unread_layers: layers that are stored and not wanted.
    """
    found: dict[str, str] = {}
    unknown: list[str] = []
    wrong: list[str] = []
    for key, tensor in _tensors(files):
        if key not in shapes:
            if not _is_unread(key, unread_layers):
                unknown.append(key)
            continue
        if key in found:
            wrong.append(f"{key} is in two files")
        elif tensor.get_shape() != shapes[key]:
            wrong.append(f"{key} is {tensor.get_shape()}, config.json asks for {shapes[key]}")
        elif tensor.get_dtype() not in _STORED_DTYPES:
            wrong.append(f"{key} is {tensor.get_dtype()}, expected {' or '.join(_STORED_DTYPES)}")
        found[key] = tensor.get_dtype()
    missing = [key for key in shapes if key not in found]
    faults = [
        f"{len(keys)} {kind}: {', '.join(sorted(keys)[:_MAX_LISTED])}{', …' if len(keys) > _MAX_LISTED else ''}"
        for kind, keys in (("missing", missing), ("unknown", unknown), ("wrong", wrong))
        if keys
    ]
    dtypes = sorted(set(found.values()))
    if not faults and dtype == "auto" and len(dtypes) > 1:
        faults.append(f"weights are {' and '.join(dtypes)}; set dtype to one of them")
    return faults


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Every key of the files with a handle that knows shape and dtype and reads the tensor when sliced."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    yield key, file.get_slice(key)
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _is_unread(key: str, unread_layers: range) -> bool:
    """Whether a key belongs to a part of the model that H3 does not read."""
    layer = _LAYER.match(key)
    return int(layer[1]) in unread_layers if layer else key.startswith(_UNREAD_PREFIXES)
