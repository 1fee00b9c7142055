"""`model_index.json`: which class each folder of a model directory is for, as published."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers

COMPONENT_CLASSES = {
    "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
}
"""Library and class of each folder."""


def write_model_index(directory: Path) -> None:
    """Writes the file into a model directory."""
    index = {"_class_name": "MiniMaxH3ModularPipeline", "_diffusers_version": diffusers.__version__}
    write_json(directory / "model_index.json", {**index, **COMPONENT_CLASSES})


def write_json(path: Path, content: object) -> None:
    """Writes a file of JSON for people to read."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
