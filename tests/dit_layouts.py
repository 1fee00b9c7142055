"""The small DiT of the golden vectors in every published layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.checkpoints.dit import CLASS_NAME, ISLANDS
from services.checkpoints.dit_modules import INV_FREQ, Architecture, DitLayout, key_map, parameter_shapes
from services.checkpoints.key_map import stored_shape

H3 = Path(__file__).parent / "fixtures" / "h3"
LAYOUTS: tuple[DitLayout, ...] = ("diffusers", "official", "comfyui")
_VECTORS = {"diffusers": "diffusers", "official": "official", "comfyui": "singlefile"}


@cache
def class_config() -> dict[str, Any]:
    """`config.json` of the published class."""
    return {"_class_name": CLASS_NAME, **json.loads((H3 / "config.json").read_text())["dit_config"]}


@cache
def state(layout: DitLayout, stack_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of a layout; all but the float32 modules in `stack_dtype`."""
    config = class_config()
    rules = key_map(layout, config["num_layers"], config["num_refiner_layers"], config["num_attention_heads"])
    return {
        key: tensor if key == INV_FREQ or rules[key].targets[0].startswith(ISLANDS) else tensor.to(stack_dtype)
        for key, tensor in load_file(H3 / f"dit_state_{_VECTORS[layout]}.safetensors").items()
    }


def described(layout: DitLayout, sizes: Architecture, prefix: str = "") -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of a DiT of these sizes, its blocks in bfloat16."""
    shapes = parameter_shapes(sizes)
    rules = key_map(layout, sizes.num_layers, sizes.num_refiner_layers, sizes.num_attention_heads, prefix)
    return {
        key: (stored_shape(rule, shapes), "F32" if rule.targets[0].startswith(ISLANDS) else "BF16")
        if rule.targets
        else ((sizes.rope_freq_dim,), "F32")
        for key, rule in rules.items()
    }


def write_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, num_shards: int = 1
) -> Path:
    """Writes a folder as the hub's: shards with an index, or one file without one."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        keys = sorted(tensors)[number::num_shards]
        save_file({key: tensors[key] for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_layout(root: Path, layout: DitLayout, stack_dtype: torch.dtype = torch.float32) -> Path:
    """Writes the model as it is published in a layout; returns its file or folder."""
    tensors = state(layout, stack_dtype)
    match layout:
        case "diffusers":
            return write_folder(root / "transformer", tensors, class_config(), num_shards=2)
        case "official":
            return write_folder(root / "FL2VA" / "transformer", tensors, num_shards=3)
        case "comfyui":
            root.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path := root / "minimax_h3_fl2va_bf16.safetensors")
            return path
