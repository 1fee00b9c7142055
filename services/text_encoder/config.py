"""The settings of the text encoder worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import ConfigError
from services.common.config import WorkerConfig

DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class TextEncoderConfig(WorkerConfig):
    """How the text encoder computes, and how much of its work it remembers."""

    dtype: str = "auto"
    """Compute dtype: "bfloat16", "float32", or "auto": as the weights are stored."""
    embedding_cache_bytes: int = 256 * 1024 * 1024
    """Host memory for the hidden states of earlier prompts; 0 remembers nothing. A token of the published model takes
    10 KiB, so this default holds about 26 thousand tokens."""
    text_encoder: Path | None = None
    """File or folder of the text encoder in any published layout, ComfyUI's NVFP4 file included, in place of the model
    directory's."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, in place of the model directory's. ComfyUI's folders have none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.embedding_cache_bytes < 0:
            raise ConfigError(f"embedding_cache_bytes is {self.embedding_cache_bytes}; it must be 0 or more")
        self._require("text_encoder")
        self._require("tokenizer")
