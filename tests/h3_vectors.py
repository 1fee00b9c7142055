"""The H3 golden vectors: their DiT, the dense cases and the dense trajectories."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file

FIXTURES = Path(__file__).parent / "fixtures" / "h3"


@cache
def settings() -> dict[str, Any]:
    return json.loads((FIXTURES / "config.json").read_text())


def dit() -> MiniMaxH3Transformer3DModel:
    """The vectors' model, float32."""
    transformer = MiniMaxH3Transformer3DModel(**settings()["dit_config"])
    transformer.load_state_dict(load_file(FIXTURES / "dit_state_diffusers.safetensors"))
    return transformer.requires_grad_(False).eval()


def case(file: str, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one case of a file."""
    prefix = f"{name}."
    tensors = load_file(FIXTURES / f"{file}.safetensors")
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
