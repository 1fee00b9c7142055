"""The prompt as the encoder sees it: its tokens verbatim, with no template, no special tokens around it and no padding.

Source: docs/reference/h3-model.md §6.1-§6.2. Which prompts are accepted is decided in `core/request.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from core.prompt import ALLOWED_SPECIAL_TOKENS
from h3stream.errors import CheckpointError

TEXT_TAG = 1
"""Tag of a text row; it selects the row's modulation in the DiT."""


def token_tags(num_tokens: int) -> torch.Tensor:
    """Tags of a text-only prompt: `[E]`, int64."""
    return torch.full((num_tokens,), TEXT_TAG, dtype=torch.int64)


class PromptTokenizer:
    """The tokenizer of a model directory."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """vocab_size: rows of the encoder's embedding.

        Raises CheckpointError if the tokenizer cannot be read, splits one of H3's special tokens, or makes ids that the
        encoder has no embedding for.
        """
        self._tokenizer = _load(directory)
        for token in ALLOWED_SPECIAL_TOKENS:
            ids = self.ids(token)
            if len(ids) != 1:
                raise CheckpointError(f"{directory} splits {token!r} into {len(ids)} tokens; it must be one")
        highest = max(self._tokenizer.get_vocab().values())
        if highest >= vocab_size:
            raise CheckpointError(
                f"{directory} has token id {highest}, but text_encoder/ has embeddings for {vocab_size} ids only"
            )

    def ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt, in order."""
        encoded = self._tokenizer(prompt, add_special_tokens=False, truncation=False, padding=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def text(self, ids: list[int]) -> str:
        """The text that ids stand for."""
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _load(directory: Path) -> Any:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is missing")
    from transformers import AutoTokenizer  # a second to import, so only where a worker is built

    try:
        # Nothing is fetched and nothing of the directory is executed.
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the library raise
        raise CheckpointError(f"{directory} holds no tokenizer that can be read: {error}") from error
