"""The text encoder: how its files are recognised, what must be in them, and which of it H3 reads.

Every layout holds Qwen3-VL-32B. H3 reads one hidden state of its language model: the embedding and the layers below
that state are what is loaded. Further layers, the final norm, the head and the vision tower are known by name and left
in the files: a prompt is text alone.

A folder's `config.json` describes the model. Without one, as for a single file, its sizes follow from the shapes in the
header and everything else is Qwen3-VL-32B's own.

Source: docs/reference/h3-model.md §6.3, §6.5, §6.6.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.header import strict_json
from services.checkpoints.key_map import Rule, Shape, problems, summary
from services.checkpoints.layout import Recognition
from services.checkpoints.source import Checkpoint

DEFAULT_HIDDEN_STATE_INDEX = 50
"""Hidden state that H3 reads of the published 64-layer model: the output of layer 49, before any final norm."""
HIDDEN_STATE_INDEX_KEY = "h3_hidden_state_index"
"""Key by which a model of another depth says which hidden state is meant: in `config.json`, or in the metadata of a
file that has none."""
MAX_LAYERS = 1000
"""Most layers that are looked at; a configuration that states more is wrong."""
MARKER_SUFFIX = ".comfy_quant"
"""End of the key of a tensor that says, as JSON, how its module is quantised."""
MAX_MARKER_BYTES = 1024
FP4_BLOCK = 16
"""Columns of an NVFP4 weight that share one scale."""

_NVFP4_MARKER = {"format": "nvfp4", "full_precision_matrix_mult": True}
_INT8_MARKER = {"format": "int8_tensorwise"}
_FLOATS = ("BF16", "F32")

_PUBLISHED_SETTINGS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000,
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
    },
}
"""What no shape tells of Qwen3-VL-32B's language model: its published `config.json`, `text_config`."""

_VISION = re.compile(
    r"(blocks\.[0-9]+\.(attn\.(qkv|proj)|mlp\.linear_fc[12]|norm[12])"
    r"|(merger|deepstack_merger_list\.[0-9]+)\.(norm|linear_fc[12])"
    r"|patch_embed\.proj)\.(weight|bias)"
    r"|pos_embed\.weight"
)
"""Keys of the vision tower, behind its prefix."""


@dataclass(frozen=True)
class Names:
    """How a layout calls the parts of the model."""

    language: str
    """Prefix of the language model's keys."""
    vision: str
    """Prefix of the vision tower's keys."""


NAMES = {
    "transformers": Names("model.language_model.", "model.visual."),
    "comfyui": Names("model.", "visual."),
}
"""By layout."""


@dataclass(frozen=True)
class Parameter:
    """What one parameter of the language model must be in a file."""

    shape: Shape
    """Shape of the stored tensor."""
    dtypes: tuple[str, ...]
    """Dtypes that it may be stored in."""

    @property
    def is_computed_with(self) -> bool:
        """Whether it is used as it is stored, and so may be converted: not a code of something, nor a scale of one."""
        return self.dtypes == _FLOATS


@dataclass(frozen=True)
class Contents:
    """What a text encoder checkpoint holds of what H3 reads."""

    settings: dict[str, Any]
    """`text_config` of the class `Qwen3VLTextModel`, with as many layers as are read."""
    is_nvfp4: bool
    """Whether linear weights are NVFP4 and the embedding is INT8."""
    parameters: dict[str, Parameter]
    """By name, as the modules that compute with them call them."""
    key_map: dict[str, Rule]
    """The stored tensors that become parameters, and the markers of their quantisation."""
    is_unread: Callable[[str], bool]
    """Whether a key belongs to a part of the model that is left in the files."""

    @property
    def num_parameters(self) -> int:
        """Weights of the model that are read, whatever each of them is stored in."""
        return sum(math.prod(shape) for shape in _shapes(self.settings).values())

    @property
    def markers(self) -> tuple[str, ...]:
        """Keys of the quantisation markers."""
        return tuple(key for key, rule in self.key_map.items() if not rule.targets)


def recognise(checkpoint: Checkpoint) -> Recognition | None:
    """What the checkpoint is, by its keys, dtypes and configuration; None if it is no Qwen3 model."""
    for layout, names in NAMES.items():
        layer = re.compile(re.escape(names.language) + r"layers\.[0-9]+\.self_attn\.q_norm\.weight")
        if any(layer.fullmatch(key) for key in checkpoint.tensors):
            refusal = _refusal(checkpoint, layout)
            is_nvfp4 = refusal is None and _is_nvfp4(checkpoint, layout)
            notes = ("Its 4-bit weights stay packed in memory and are unpacked where they are used.",)
            return Recognition("text_encoder", layout, refusal, notes if is_nvfp4 else ())
    return None


def file_problems(checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
    """What headers and configuration alone show to be wrong, in sentences."""
    try:
        contents = _describe(checkpoint, recognition)
    except ValueError as error:
        return [str(error)]
    faults = problems(
        checkpoint.tensors,
        contents.key_map,
        {name: parameter.shape for name, parameter in contents.parameters.items()},
        lambda name: contents.parameters[name].dtypes,
        contents.is_unread,
    )
    bad_markers = [key for key in contents.markers if not _is_marker(checkpoint, key)]
    if bad_markers:
        faults.append(
            f"{len(bad_markers)} missing or no text of up to {MAX_MARKER_BYTES} bytes: {summary(bad_markers)}"
        )
    return faults


def describe(checkpoint: Checkpoint, recognition: Recognition) -> Contents:
    """What must be in a checkpoint that was recognised and not refused.

    Raises CheckpointError if its configuration or its sizes make no model that H3 reads.
    """
    try:
        return _describe(checkpoint, recognition)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def marker_problem(key: str, text: bytes) -> str | None:
    """Why a module cannot be computed as its quantisation marker asks, in a clause; None if it can."""
    expected = _INT8_MARKER if key.endswith(f"embed_tokens{MARKER_SUFFIX}") else _NVFP4_MARKER
    try:
        found = strict_json(text)
    except ValueError:
        found = text
    if found == expected:
        return None
    return f"{key} says {found!r:.120}; only {expected} is computed with"


def _describe(checkpoint: Checkpoint, recognition: Recognition) -> Contents:
    """As `describe`. Raises ValueError with a clause."""
    names = NAMES[recognition.layout]
    settings = _settings(checkpoint, names)
    is_nvfp4 = _is_nvfp4(checkpoint, recognition.layout)
    num_stored = settings["num_hidden_layers"]
    settings |= {"num_hidden_layers": _hidden_state_index(checkpoint, num_stored)}
    parameters = _nvfp4_parameters(settings) if is_nvfp4 else _plain_parameters(settings)
    key_map = {names.language + name: Rule((name,)) for name in parameters}
    if is_nvfp4:
        modules = (name.removesuffix(".weight") for name, shape in _shapes(settings).items() if len(shape) == 2)
        key_map |= {f"{names.language}{module}{MARKER_SUFFIX}": Rule(()) for module in modules}
    unread_layers = range(settings["num_hidden_layers"], num_stored)
    return Contents(settings, is_nvfp4, parameters, key_map, lambda key: _is_unread(key, names, unread_layers))


def _refusal(checkpoint: Checkpoint, layout: str) -> str | None:
    """Why a Qwen3 model cannot be used, as a clause that goes on from the file's name."""
    names = NAMES[layout]
    if checkpoint.config is not None and (kind := checkpoint.config.get("model_type")) != "qwen3_vl":
        return f"has a config.json of type {kind!r:.40}, expected 'qwen3_vl': H3 reads Qwen3-VL-32B"
    if checkpoint.config is None and not any(key.startswith(names.vision) for key in checkpoint.tensors):
        return "is a Qwen3 language model without the vision tower of Qwen3-VL; H3 reads Qwen3-VL-32B"
    stored = {
        tensor.info.dtype
        for key, tensor in checkpoint.tensors.items()
        if key.startswith(names.language) and key.endswith(".self_attn.q_proj.weight")
    }
    take = "take the BF16 folder or ComfyUI's bf16 or nvfp4_awq file"
    if stored & {"F8_E4M3", "F8_E5M2"}:
        return f"has FP8 weights, which are not computed with here; {take}"
    if "I8" in stored:
        return f"has INT8 weights (such as ComfyUI's int8_convrot file), which are not computed with here; {take}"
    if not stored or (stored & {"U8", "I32"} and not _is_nvfp4(checkpoint, layout)):
        return f"has weights that are packed in a way that is not known here; {take}"
    return None


def _is_nvfp4(checkpoint: Checkpoint, layout: str) -> bool:
    """Whether linear weights are NVFP4 as ComfyUI packs it; other tools order codes and scales otherwise."""
    return layout == "comfyui" and any(
        key.endswith(".self_attn.q_proj.weight_scale_2") and key.startswith(NAMES[layout].language)
        for key in checkpoint.tensors
    )


def _settings(checkpoint: Checkpoint, names: Names) -> dict[str, Any]:
    """The language model's configuration, with as many layers as are stored. Raises ValueError."""
    if checkpoint.config is None:
        settings = _PUBLISHED_SETTINGS | _sizes(checkpoint, names)
    else:
        stated = checkpoint.config.get("text_config")
        if not isinstance(stated, dict):
            raise ValueError("its config.json has no text_config")
        settings = dict(stated)
    for name in (*SIZES, "num_hidden_layers"):
        if type(value := settings.get(name)) is not int or value < 1:
            raise ValueError(f"its config.json states {name} {value!r:.40}; it must be an integer of 1 or more")
    if settings["num_hidden_layers"] > MAX_LAYERS:
        raise ValueError(f"{settings['num_hidden_layers']} layers are stated, at most {MAX_LAYERS} are accepted")
    if settings["num_attention_heads"] % settings["num_key_value_heads"] or settings["head_dim"] % 2:
        raise ValueError(
            f"{settings['num_attention_heads']} attention heads, {settings['num_key_value_heads']} key and value heads "
            f"and head_dim {settings['head_dim']} make no attention layer"
        )
    rope = settings.get("rope_parameters")
    if "rope_theta" not in settings and not (isinstance(rope, dict) and "rope_theta" in rope):
        raise ValueError("its config.json states no rope_theta")  # the class would take another model's
    if settings.get("attention_bias", False) is not False:
        raise ValueError("its config.json asks for attention_bias, which Qwen3-VL does not have")
    return settings


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Settings that shapes tell."""


def _sizes(checkpoint: Checkpoint, names: Names) -> dict[str, Any]:
    """The sizes of the language model as shapes tell them. Raises ValueError."""
    rows: list[int] = []
    for name in (
        "embed_tokens.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
    ):
        stored = checkpoint.tensors.get(names.language + name)
        if stored is None or not stored.info.shape or 0 in stored.info.shape:
            raise ValueError(f"{names.language}{name} is missing or empty, so the model's sizes are not known")
        rows.append(stored.info.shape[0])
    vocab_size, intermediate_size, head_dim, query_rows, key_rows = rows
    if query_rows % head_dim or key_rows % head_dim:
        raise ValueError(f"query and key projections of {query_rows} and {key_rows} rows hold no heads of {head_dim}")
    layer = re.compile(re.escape(names.language) + r"layers\.([0-9]{1,9})\.")
    return {
        "vocab_size": vocab_size,
        "hidden_size": checkpoint.tensors[f"{names.language}embed_tokens.weight"].info.shape[-1],
        "intermediate_size": intermediate_size,
        "head_dim": head_dim,
        "num_attention_heads": query_rows // head_dim,
        "num_key_value_heads": key_rows // head_dim,
        "num_hidden_layers": 1 + max(int(found[1]) for key in checkpoint.tensors if (found := layer.match(key))),
    }


def _hidden_state_index(checkpoint: Checkpoint, num_stored_layers: int) -> int:
    """The hidden state that H3 reads: the number of layers that are loaded. Raises ValueError."""
    said: Mapping[str, Any] = checkpoint.metadata if checkpoint.config is None else checkpoint.config
    index = said.get(HIDDEN_STATE_INDEX_KEY, DEFAULT_HIDDEN_STATE_INDEX)
    if checkpoint.config is None and isinstance(index, str) and re.fullmatch(r"[0-9]{1,4}", index):
        index = int(index)  # metadata holds strings
    if type(index) is not int or not 1 <= index <= num_stored_layers:
        raise ValueError(
            f"hidden state {index!r:.40} is wanted ({HIDDEN_STATE_INDEX_KEY}, {DEFAULT_HIDDEN_STATE_INDEX} where it is "
            f"absent), but the model has {num_stored_layers} layers"
        )
    return index


def _shapes(settings: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of the language model's weights by name, those of matrices `[out, in]`, whatever they are stored in."""
    hidden, intermediate, head_dim = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    query, key = settings["num_attention_heads"] * head_dim, settings["num_key_value_heads"] * head_dim
    layer: dict[str, Shape] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {"embed_tokens.weight": (settings["vocab_size"], hidden)} | {
        f"layers.{index}.{name}.weight": shape
        for index in range(settings["num_hidden_layers"])
        for name, shape in layer.items()
    }


def _plain_parameters(settings: Mapping[str, Any]) -> dict[str, Parameter]:
    return {name: Parameter(shape, _FLOATS) for name, shape in _shapes(settings).items()}


def _nvfp4_parameters(settings: Mapping[str, Any]) -> dict[str, Parameter]:
    """As ComfyUI's nvfp4_awq file stores them: packed weights with their scales, an INT8 embedding, plain norms.

    Raises ValueError if a width cannot be cut into the format's blocks.
    """
    parameters: dict[str, Parameter] = {}
    for name, shape in _shapes(settings).items():
        module = name.removesuffix(".weight")
        if len(shape) == 1:
            parameters[name] = Parameter(shape, _FLOATS)
            continue
        rows, columns = shape
        if module == "embed_tokens":
            parameters[name] = Parameter(shape, ("I8",))
            parameters[f"{module}.weight_scale"] = Parameter((rows, 1), ("F32",))
            continue
        if columns % FP4_BLOCK:
            raise ValueError(f"{module} has {columns} columns; NVFP4 weights need a multiple of {FP4_BLOCK}")
        parameters[name] = Parameter((rows, columns // 2), ("U8",))
        scale_shape = (_padded(rows, 128), _padded(columns // FP4_BLOCK, 4))
        parameters[f"{module}.weight_scale"] = Parameter(scale_shape, ("F8_E4M3",))
        parameters[f"{module}.weight_scale_2"] = Parameter((), ("F32",))
        if module.endswith(("o_proj", "down_proj")):
            parameters[f"{module}.pre_quant_scale"] = Parameter((columns,), ("BF16",))
    return parameters


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _is_unread(key: str, names: Names, unread_layers: range) -> bool:
    if key in ("lm_head.weight", f"{names.language}norm.weight"):
        return True
    if key.startswith(names.vision):
        return _VISION.fullmatch(key, len(names.vision)) is not None
    layer = re.compile(re.escape(names.language) + r"layers\.([0-9]{1,9})\.").match(key)
    return layer is not None and int(layer[1]) in unread_layers


def _is_marker(checkpoint: Checkpoint, key: str) -> bool:
    stored = checkpoint.tensors.get(key)
    if stored is None or stored.info.dtype != "U8":
        return False
    return len(stored.info.shape) == 1 and stored.info.num_elements <= MAX_MARKER_BYTES
