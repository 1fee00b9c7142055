"""`text_encoder/`: the published Qwen3-VL class with few and narrow layers, language model, vision tower and head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils import logging

from tools.tiny.fill import Normal, fan_in, fill

HIDDEN_STATE_INDEX = 4
"""Hidden state that H3 reads of this model: above the three deepstack layers and below the last layer, like index 50 of
the published 64 (docs/reference/h3-model.md §6.3)."""

_TEXT_WIDTH = 128
_RESIDUAL_GAIN = 0.5
"""Of each branch's output: the residual stream stays near the embedding's size."""


def write_text_encoder(directory: Path, added_token_ids: dict[str, int], seed: int) -> None:
    """Writes the component; its vocabulary holds every added token."""
    config = _config(added_token_ids)
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    normal = Normal(seed, "text_encoder")

    def rule(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.ndim == 1:
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            return around + normal(name, parameter.shape, 0.05)
        if "embed" in name and "patch" not in name:
            return normal(name, parameter.shape)
        branch_ends = ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "blocks.mlp.linear_fc2.weight")
        gain = _RESIDUAL_GAIN if name.endswith(branch_ends) else 1.0
        return normal(name, parameter.shape, gain * fan_in(parameter) ** -0.5)

    fill(model, rule)
    save(model, directory, HIDDEN_STATE_INDEX)


def save(model: Qwen3VLForConditionalGeneration, directory: Path, hidden_state_index: int) -> None:
    """Writes weights and configuration, which says what hidden state H3 reads."""
    logging.disable_progress_bar()  # one file of half a second
    model.save_pretrained(directory)
    path = directory / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["h3_hidden_state_index"] = hidden_state_index
    path.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _config(ids: dict[str, int]) -> Qwen3VLConfig:
    return text_encoder_config(
        ids,
        text={"hidden_size": _TEXT_WIDTH, "intermediate_size": 256, "num_hidden_layers": 6},
        vision={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    )


def text_encoder_config(
    ids: dict[str, int], text: dict[str, Any], vision: dict[str, Any], *, tie_word_embeddings: bool = False
) -> Qwen3VLConfig:
    """The class's configuration for the added tokens `ids`, with heads of 32 channels: four of queries, two of keys.

    text, vision: sizes of the language model and of the vision tower.
    """
    vocabulary = max(ids.values()) + 1
    return Qwen3VLConfig(
        text_config={
            "vocab_size": -(-vocabulary // 128) * 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
            },
            **text,
        },
        vision_config={"out_hidden_size": text["hidden_size"], **vision},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie_word_embeddings,
    )
