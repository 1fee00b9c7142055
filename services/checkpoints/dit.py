"""The DiT: how its files are recognised and checked, which variants are refused, and what no tensor's name tells.

Layouts: "diffusers" (the published class's own names), "official" (attention matrices fused head by head) and "comfyui"
(the official names, attention matrices stacked). The last two differ in nothing that a header shows: which of them it
is follows from how the weights are split into files, or is said by whoever owns them.
Source: docs/reference/h3-model.md §2.2, §3, §10.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from core.geometry import AUDIO_LATENT_CHANNELS, PATCH, VIDEO_LATENT_CHANNELS
from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints.dit_modules import INV_FREQ, Architecture, DitLayout, key_map, parameter_shapes
from services.checkpoints.dit_variants import refused_variant
from services.checkpoints.key_map import Rule, Shape, problems, summary
from services.checkpoints.layout import Recognition
from services.checkpoints.source import SHARD_NAME, Checkpoint, StoredTensor

CLASS_NAME = "MiniMaxH3Transformer3DModel"
ISLANDS = ("proj_in.", "audio_proj_in.", "time_embedder.", "proj_out.", "audio_proj_out.")
"""Published modules that are stored and run in float32, whatever the block stack computes in."""
UNDECIDED = "official or comfyui"
"""Layout of files of which nothing tells which of the two orders their rows have."""
MAX_LAYERS = 1000
"""Most blocks that are looked at; a file or configuration with more is wrong."""

_MAX_SIZE = 1 << 24
"""Largest width of a model, and largest number in its configuration."""
_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What ComfyUI puts before every key when it saves a model that it has loaded; the published files have neither."""
_COMFYUI_NAME = "minimax_h3_"
"""How the names of ComfyUI's files begin."""
_STACK_DTYPES = ("BF16", "F32", "F16")
_NUM_AXES = 3

_OFFICIAL_KEY = re.compile(
    r"blocks\.[0-9]+\.adaln_proj\.linear\.weight|token_refiner\.blocks\.[0-9]+\.attn\.qkv_proj\.weight"
    r"|(video|audio)_patch_proj\.weight|final_layer\.(video|audio)_out\.weight"
)
_PUBLISHED_KEY = re.compile(
    r"transformer_blocks\.[0-9]+\.adaln_proj\.linear\.weight|token_refiner\.refiner_blocks\.[0-9]+\.attn\.to_q\.weight"
)
"""Keys that no other published model has."""
_BLOCK = re.compile(r"(?:transformer_)?blocks\.([0-9]{1,4})\.")
_REFINER_BLOCK = re.compile(r"token_refiner\.(?:refiner_)?blocks\.([0-9]{1,4})\.")
_PARTITION = re.compile(r"(?<![a-z0-9])(fl2va|ref2va)(?![a-z0-9])")


@dataclass(frozen=True)
class Contents:
    """What a DiT checkpoint holds."""

    architecture: Architecture
    """Sizes of the model."""
    key_map: dict[str, Rule]
    """What its tensors become."""
    shapes: dict[str, Shape]
    """Shapes of the parameters."""


def recognise(checkpoint: Checkpoint) -> Recognition | None:
    """What the checkpoint is, by its tensors' names and how they are split into files; None if it is no H3 DiT."""
    layout = _recognised_layout(checkpoint)
    if layout is None:
        return None
    prefix = _prefix(checkpoint.tensors)
    tensors = {key.removeprefix(prefix): tensor for key, tensor in checkpoint.tensors.items()}
    refused = refused_variant(checkpoint, tensors, partition_of(checkpoint.path))
    if refused is not None:
        variant, reason = refused
        return Recognition("dit", variant, refusal=reason)
    return Recognition("dit", layout, notes=(*_order_notes(checkpoint, layout), *notes(checkpoint, layout)))


def file_problems(checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
    """What headers and configuration alone show to be wrong, as clauses."""
    layout = _layout_of_names(recognition.layout)
    try:
        contents = _describe(checkpoint, layout)
    except ValueError as error:  # what does not depend on sizes can be told all the same
        rules = _header_rules(checkpoint, layout)
        return [str(error), *problems(checkpoint.tensors, rules, {}, lambda _: _STACK_DTYPES)]
    return [
        *_architecture_problems(contents.architecture),
        *problems(checkpoint.tensors, contents.key_map, contents.shapes, lambda _: _STACK_DTYPES),
        *_island_problems(checkpoint, contents.key_map),
        *_rotary_problems(checkpoint, contents.architecture),
    ]


def describe(checkpoint: Checkpoint, layout: DitLayout) -> Contents:
    """Sizes of the model and what its tensors become.

    The sizes are those of the published class's `config.json`, or without one those that the tensors' shapes show; the
    epsilons and the rotary base are then the published model's.
    Raises CheckpointError if neither gives them.
    """
    try:
        return _describe(checkpoint, layout)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def choose_layout(checkpoint: Checkpoint, recognition: Recognition, wanted: str) -> DitLayout:
    """The layout to read a recognised checkpoint in.

    wanted: a layout, or "auto" for the recognised one. The official layout and ComfyUI's may be taken for each other.
    Raises ConfigError if what is wanted contradicts the names of the tensors, or is not said and cannot be told.
    """
    if wanted not in (allowed := ("auto", *get_args(DitLayout))):
        raise ConfigError(f"dit_layout is {wanted!r}; it must be one of {', '.join(allowed)}")
    if wanted == "auto" and recognition.layout == UNDECIDED:
        raise ConfigError(
            f"{checkpoint.path} is in the official layout or in ComfyUI's, and nothing but the order of rows tells "
            "them apart: set dit_layout to official or to comfyui"
        )
    if wanted == "auto" or wanted == recognition.layout:
        return _layout_of_names(recognition.layout)
    if (wanted == "diffusers") == (recognition.layout == "diffusers"):
        return _layout_of_names(wanted)
    raise ConfigError(
        f"dit_layout is {wanted!r}, but the tensors of {checkpoint.path} have the names of the {recognition.layout} "
        "layout: set dit_layout to auto"
    )


def notes(checkpoint: Checkpoint, layout: str) -> tuple[str, ...]:
    """What the owner of a DiT should know that is read in this layout, in sentences."""
    found = []
    if partition_of(checkpoint.path) == "ref2va":
        found.append("These are the ref2va weights, made for reference media; for text there are the fl2va weights.")
    dtypes = stack_dtypes(checkpoint, _layout_of_names(layout))
    if len(dtypes) > 1 or "F16" in dtypes:
        found.append(f"Its blocks are stored in {' and '.join(dtypes)}: compute_dtype must say bfloat16 or float32.")
    known = {field.name for field in dataclasses.fields(Architecture)}
    ignored = [key for key in _published_config(checkpoint) or {} if key not in known and not key.startswith("_")]
    if ignored:
        found.append(f"Settings of its config.json that are not known here: {summary(ignored)}.")
    return tuple(found)


def stack_dtypes(checkpoint: Checkpoint, layout: DitLayout) -> tuple[str, ...]:
    """Dtypes in which everything but the float32 islands is stored."""
    found = {
        checkpoint.tensors[key].info.dtype
        for key, rule in _header_rules(checkpoint, layout).items()
        if key in checkpoint.tensors and rule.targets and not rule.targets[0].startswith(ISLANDS)
    }
    return tuple(sorted(found))


def stored_inv_freq(checkpoint: Checkpoint) -> StoredTensor | None:
    """The rotary frequencies that the official names store, and nothing else needs."""
    return checkpoint.tensors.get(_prefix(checkpoint.tensors) + INV_FREQ)


def partition_of(path: Path) -> str:
    """Which of the two sets of DiT weights a file or folder is for, by its name or the folders it is in.

    "fl2va" (text, first and last frames), "ref2va" (reference media), or "" where no name tells.
    Source: docs/reference/h3-model.md §3.
    """
    for name in (path.name, *(folder.name for folder in path.absolute().parents[:2])):
        if name == "transformer_ref":
            return "ref2va"
        found = set(_PARTITION.findall(name.lower()))
        if found:
            return found.pop() if len(found) == 1 else ""
    return ""


def _recognised_layout(checkpoint: Checkpoint) -> str | None:
    if any(map(_PUBLISHED_KEY.fullmatch, checkpoint.tensors)):
        return "diffusers"
    prefix = _prefix(checkpoint.tensors)
    if not any(_OFFICIAL_KEY.fullmatch(key.removeprefix(prefix)) for key in checkpoint.tensors):
        return None
    if checkpoint.has_index or len(checkpoint.headers) > 1:
        # ComfyUI's is one file by definition, and only ComfyUI puts something before the names.
        return UNDECIDED if prefix else "official"
    is_folder = checkpoint.headers[0].path != checkpoint.path
    is_shard = SHARD_NAME.fullmatch(checkpoint.headers[0].path.name) is not None
    return UNDECIDED if (is_folder or is_shard) and not prefix else "comfyui"


def _order_notes(checkpoint: Checkpoint, layout: str) -> tuple[str, ...]:
    """How the order of rows was told, where it might be another: a wrong one shows in nothing but the pictures."""
    if layout == UNDECIDED:
        return ("Nothing shows which order its rows have: dit_layout must say official or comfyui.",)
    is_known_name = checkpoint.path.name.startswith(_COMFYUI_NAME) or _prefix(checkpoint.tensors)
    if layout == "comfyui" and not is_known_name:
        return ("One file is taken to have ComfyUI's order of rows; if it was official, dit_layout must say official.",)
    return ()


def _layout_of_names(layout: str) -> DitLayout:
    """The layout by whose names the tensors are known, also where their order of rows is undecided."""
    return next((known for known in get_args(DitLayout) if known == layout), "comfyui")


def _prefix(keys: Iterable[str]) -> str:
    """What stands before all keys; a prefix that only some have is none."""
    return next((prefix for prefix in _PREFIXES if all(key.startswith(prefix) for key in keys)), "")


def _header_rules(checkpoint: Checkpoint, layout: DitLayout) -> dict[str, Rule]:
    """The key map of as many blocks as the tensors' names show; heads are not counted."""
    return key_map(layout, *_num_blocks(checkpoint), num_heads=1, prefix=_prefix(checkpoint.tensors))


def _num_blocks(checkpoint: Checkpoint) -> tuple[int, int]:
    """Blocks and refiner blocks by the tensors' names."""
    prefix = _prefix(checkpoint.tensors)
    names = [key.removeprefix(prefix) for key in checkpoint.tensors]
    found = [
        [int(match[1]) + 1 for match in map(pattern.match, names) if match] for pattern in (_BLOCK, _REFINER_BLOCK)
    ]
    num_layers, num_refiner_layers = (min(max(numbers, default=0), MAX_LAYERS) for numbers in found)
    return num_layers, num_refiner_layers


def _describe(checkpoint: Checkpoint, layout: DitLayout) -> Contents:
    """As `describe`. Raises ValueError with a clause."""
    config = _published_config(checkpoint)
    if config is not None:
        architecture = _architecture_of_config(config)
    elif layout == "diffusers" and checkpoint.config is not None and "_class_name" in checkpoint.config:
        raise ValueError(f"config.json is of the class {checkpoint.config['_class_name']!r:.80}, not {CLASS_NAME}")
    else:
        architecture = _architecture_of_header(checkpoint, layout)
    rules = key_map(
        layout,
        architecture.num_layers,
        architecture.num_refiner_layers,
        architecture.num_attention_heads,
        _prefix(checkpoint.tensors),
    )
    return Contents(architecture, rules, parameter_shapes(architecture))


def _published_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The folder's `config.json` if it is the published class's: official folders may have one of another form."""
    config = checkpoint.config
    return config if config is not None and config.get("_class_name") == CLASS_NAME else None


def _architecture_of_config(config: Mapping[str, Any]) -> Architecture:
    values: dict[str, Any] = {}
    wrong = []
    for field in dataclasses.fields(Architecture):
        value = config.get(field.name, field.default)
        value = tuple(value) if isinstance(value, list) else value
        is_valid, rule = _rule(field.name, field.default)
        if not is_valid(value):
            wrong.append(f"{field.name} is {value!r:.80}, it must be {rule}")
        values[field.name] = value
    if wrong:
        raise ValueError(f"config.json: {'; '.join(wrong)}")
    return Architecture(**values)


def _rule(name: str, default: object) -> tuple[Callable[[Any], bool], str]:
    """What a setting must be, as a test and in words."""
    if isinstance(default, tuple):
        return (lambda value: value == default), str(list(default))
    if isinstance(default, float):
        return (lambda v: type(v) in (int, float) and 0 < v <= _MAX_SIZE), f"a number above 0 and up to {_MAX_SIZE}"
    largest = MAX_LAYERS if name.endswith("_layers") else _MAX_SIZE
    return (lambda value: type(value) is int and 1 <= value <= largest), f"a whole number from 1 to {largest}"


def _architecture_of_header(checkpoint: Checkpoint, layout: DitLayout) -> Architecture:
    rules = _header_rules(checkpoint, layout)
    key_of = {target: key for key, rule in rules.items() for target in rule.targets}

    def size(parameter: str, axis: int) -> int:
        key = key_of.get(parameter, parameter)
        stored = checkpoint.tensors.get(key)
        if stored is None or axis >= len(stored.info.shape):
            raise ValueError(f"without the shape of {key} the sizes of the model cannot be told")
        num_parts = len(rules[key].targets) if axis == 0 else 1
        found = stored.info.shape[axis] // num_parts
        if not 1 <= found <= _MAX_SIZE:
            raise ValueError(f"{key} has the shape {list(stored.info.shape)}, which no model has")
        return found

    head_dim = size("transformer_blocks.0.attn.norm_q.weight", 0)
    num_layers, num_refiner_layers = _num_blocks(checkpoint)
    return Architecture(
        num_layers=num_layers,
        num_refiner_layers=num_refiner_layers,
        num_attention_heads=size("transformer_blocks.0.attn.to_q.weight", 0) // head_dim,
        attention_head_dim=head_dim,
        hidden_size=size("proj_in.weight", 0),
        ffn_dim=size("transformer_blocks.0.ff.net.2.weight", 1),
        in_channels=size("proj_in.weight", 1) // (PATCH * PATCH),
        audio_in_channels=size("audio_proj_in.weight", 1),
        text_dim=size("context_embedder.weight", 1),
        freq_dim=size("time_embedder.linear_1.weight", 1),
        time_embed_hidden_dim=size("time_embedder.linear_1.weight", 0),
        time_embed_dim=size("time_embedder.linear_2.weight", 0),
        rope_freq_dim=_num_frequencies(checkpoint),
    )


def _num_frequencies(checkpoint: Checkpoint) -> int:
    stored = stored_inv_freq(checkpoint)
    return stored.info.shape[0] if stored is not None and stored.info.shape else Architecture.rope_freq_dim


def _architecture_problems(architecture: Architecture) -> list[str]:
    faults = [
        f"{name} is {getattr(architecture, name)}, the service needs {needed}"
        for name, needed in (("in_channels", VIDEO_LATENT_CHANNELS), ("audio_in_channels", AUDIO_LATENT_CHANNELS))
        if getattr(architecture, name) != needed
    ]
    num_rotated = 2 * _NUM_AXES * architecture.rope_freq_dim
    if not 0 < num_rotated <= architecture.attention_head_dim:
        faults.append(
            f"{architecture.rope_freq_dim} rotary frequencies turn {num_rotated} channels of a head, which has "
            f"{architecture.attention_head_dim}"
        )
    return faults


def _island_problems(checkpoint: Checkpoint, rules: Mapping[str, Rule]) -> list[str]:
    """The modules that run in float32 must not have been through a narrower dtype: nobody can get back what it cut."""
    narrow = [
        key
        for key, rule in rules.items()
        if rule.targets and rule.targets[0].startswith(ISLANDS) and key in checkpoint.tensors
        if checkpoint.tensors[key].info.dtype in ("BF16", "F16")
    ]
    if not narrow:
        return []
    dtypes = sorted({checkpoint.tensors[key].info.dtype for key in narrow})
    return [
        f"{len(narrow)} stored in {' and '.join(dtypes)} that run in float32, so their precision is lost: "
        f"{summary(narrow)}; take files that keep them in F32"
    ]


def _rotary_problems(checkpoint: Checkpoint, architecture: Architecture) -> list[str]:
    stored = stored_inv_freq(checkpoint)
    expected = (architecture.rope_freq_dim,)
    if stored is None or (stored.info.dtype, stored.info.shape) == ("F32", expected):
        return []
    return [f"{INV_FREQ} is {stored.info.dtype} of shape {list(stored.info.shape)}, expected F32 {list(expected)}"]
