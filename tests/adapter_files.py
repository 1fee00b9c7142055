"""One adapter written in every format that is read, by plain tensor code that shares nothing with the reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.raven_vectors import FIXTURES

RANK = 4
ALPHA = 8.0
"""Twice the rank: doubling B is exact, so formats that state no alpha can hold the same update."""
NUM_HEADS = 2
PEFT_FOLDER = "folder"

Tensors = dict[str, torch.Tensor]
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By module: A `[rank, in]` and B `[out, rank]`."""

_BLOCK = {
    "attn.out_proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaln_proj.linear": "adaln_proj.linear",
}
_OUTER = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}


def official_pairs() -> Pairs:
    """The RAVEN vector's 31 modules by official name, qkv stacked and gate first."""
    tensors = load_file(FIXTURES / "lora_raven.safetensors")
    prefix = "base_model.model.dit."
    modules = {key.removeprefix(prefix).rpartition(".lora_")[0] for key in tensors}
    return {
        module: (tensors[f"{prefix}{module}.lora_A.weight"], tensors[f"{prefix}{module}.lora_B.weight"])
        for module in sorted(modules)
    }


def published_pairs(official: Pairs) -> Pairs:
    """The same by published names: q, k and v apart, gate last."""
    published: Pairs = {}
    for module, (a, b) in official.items():
        name = module.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.")
        if name.startswith("blocks."):
            name = f"transformer_{name}"
        block, _, rest = name.partition(".attn.") if ".attn." in name else name.partition(".mlp.")
        if module in _OUTER:
            published[_OUTER[module]] = (a, b)
        elif rest == "qkv_proj":
            for part, rows in zip("qkv", b.chunk(3), strict=True):
                published[f"{block}.attn.to_{part}"] = (a, rows)
        elif rest == "fc1":
            published[f"{block}.ff.net.0.proj"] = (a, torch.cat(b.chunk(2)[::-1]))
        else:
            for ending, theirs in _BLOCK.items():
                if name.endswith(ending):
                    published[f"{name.removesuffix(ending)}{theirs}"] = (a, b)
    return published


def named(pairs: Pairs, prefix: str = "", suffixes: tuple[str, str] = ("lora_A", "lora_B"), infix: str = "") -> Tensors:
    """Tensors of pairs, each half under its key."""
    return {
        f"{prefix}{module}.{suffix}{infix}.weight": half
        for module, halves in pairs.items()
        for suffix, half in zip(suffixes, halves, strict=True)
    }


def write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """Writes tensors as they are, views made contiguous; returns the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path, metadata=metadata)
    return path


def with_alphas(tensors: Tensors, alpha: float = ALPHA) -> Tensors:
    """Tensors with an alpha for every module."""
    modules = {key.rpartition(".lora_")[0] for key in tensors}
    return tensors | {f"{module}.alpha": torch.tensor(alpha) for module in modules}


def doubled(pairs: Pairs) -> Pairs:
    """The same update for a format whose alpha is the rank."""
    return {module: (a, b * (ALPHA / RANK)) for module, (a, b) in pairs.items()}


def per_head(pairs: Pairs) -> Pairs:
    """qkv rows in the order of the heads: q, k and v of the first, then of the second."""

    def reordered(b: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.chunk(NUM_HEADS) for part in b.chunk(3))
        return torch.cat([rows for head in zip(q, k, v, strict=True) for rows in head])

    return {m: (a, reordered(b) if m.endswith("qkv_proj") else b) for m, (a, b) in pairs.items()}


def _raven(path: Path) -> Path:
    tensors = named(official_pairs(), "base_model.model.dit.")
    return write(path / "a.safetensors", tensors, {"lora_alpha": "8"})


def _raven_named(path: Path) -> Path:
    tensors = named(official_pairs(), "base_model.model.dit.", infix=".default")
    return write(path / "a.safetensors", tensors, {"raven_lora_alpha": "8.0"})


def _comfyui(path: Path) -> Path:
    return write(path / "a.safetensors", with_alphas(named(official_pairs(), "diffusion_model.")))


def _comfyui_down_up(path: Path) -> Path:
    tensors = named(official_pairs(), "diffusion_model.", ("lora_down", "lora_up"))
    return write(path / "a.safetensors", with_alphas(tensors))


def _bare(path: Path) -> Path:
    return write(path / "a.safetensors", named(doubled(official_pairs())))


def _musubi(path: Path) -> Path:
    flat = {module.replace(".", "_"): pair for module, pair in official_pairs().items()}
    return write(path / "a.safetensors", with_alphas(named(flat, "lora_unet_", ("lora_down", "lora_up"))))


def _diffusers(path: Path) -> Path:
    tensors = named(published_pairs(official_pairs()), "transformer.")
    config = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": 8, "transformer.use_dora": False})
    return write(path / "a.safetensors", tensors, {"format": "pt", "lora_adapter_metadata": config})


def _diffusers_model(path: Path) -> Path:
    tensors = named(published_pairs(official_pairs()))
    return write(path / "a.safetensors", tensors, {"lora_adapter_metadata": json.dumps({"r": RANK, "lora_alpha": 8})})


def _peft(path: Path) -> Path:
    file = path / PEFT_FOLDER / "adapter_model.safetensors"
    write(file, named(published_pairs(official_pairs()), "base_model.model."))
    (file.parent / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8}))
    return file.parent


def _lightx2v(path: Path) -> Path:
    return write(path / "a.safetensors", named(published_pairs(official_pairs()), infix=".default"))


def _diffsynth(path: Path) -> Path:
    return write(path / "a.safetensors", named(per_head(doubled(official_pairs())), infix=".default"))


FORMATS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "raven": ("raven", _raven),
    "raven with a name": ("raven", _raven_named),
    "comfyui": ("comfyui", _comfyui),
    "comfyui down and up": ("comfyui", _comfyui_down_up),
    "bare": ("bare", _bare),
    "musubi-tuner": ("musubi-tuner", _musubi),
    "diffusers": ("diffusers", _diffusers),
    "diffusers of a model": ("diffusers", _diffusers_model),
    "peft": ("peft", _peft),
    "lightx2v": ("lightx2v", _lightx2v),
    "diffsynth": ("diffsynth", _diffsynth),
}
"""By what is written: the format's name, and what writes the same update into a folder and returns its path."""
