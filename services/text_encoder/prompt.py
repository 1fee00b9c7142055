"""The prompt as the encoder sees it: its tokens verbatim, with no template, no special tokens around it and no padding.

Source: docs/reference/h3-model.md §6.1-§6.2. Which prompts are accepted is decided in `core/request.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from core.prompt import ALLOWED_SPECIAL_TOKENS
from h3stream.errors import CheckpointError

PUBLISHED_IDS = {token: 151_669 + offset for offset, token in enumerate(ALLOWED_SPECIAL_TOKENS)}
"""Ids of H3's own tokens, which follow Qwen's vocabulary of 151669 without a gap."""
_QWEN_MARK = ("<|endoftext|>", 151_643)
"""Token and id by which Qwen's vocabulary is known; a small model's tokenizer has other ids and is right with them."""
TEXT_TAG = 1
"""Tag of a text row; it selects the row's modulation in the DiT."""


def token_tags(num_tokens: int) -> torch.Tensor:
    """Tags of a text-only prompt: `[E]`, int64."""
    return torch.full((num_tokens,), TEXT_TAG, dtype=torch.int64)


class PromptTokenizer:
    """The tokenizer of a model, with H3's seven tokens; Qwen3-VL's own tokenizer is given them where it ends."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """vocab_size: rows of the encoder's embedding.

        Raises CheckpointError if the tokenizer cannot be read, splits one of H3's special tokens or has it elsewhere
        than published, or makes ids that the encoder has no embedding for.
        """
        self._tokenizer = _load(directory)
        vocabulary = self._tokenizer.get_vocab()
        mark, mark_id = _QWEN_MARK
        is_qwen = vocabulary.get(mark) == mark_id
        if is_qwen and max(vocabulary.values()) == min(PUBLISHED_IDS.values()) - 1:
            self._add_extra_tokens()
            vocabulary = self._tokenizer.get_vocab()
        for token, published in PUBLISHED_IDS.items():
            ids = self.ids(token)
            if len(ids) != 1:
                raise CheckpointError(f"{directory} splits {token!r} into {len(ids)} tokens; it must be one")
            if is_qwen and ids != [published]:
                raise CheckpointError(f"{directory} has {token!r} as token {ids[0]}; H3 learned it as {published}")
        highest = max(vocabulary.values())
        if highest >= vocab_size:
            raise CheckpointError(
                f"{directory} has token id {highest}, but the text encoder has embeddings for {vocab_size} ids only"
            )

    def _add_extra_tokens(self) -> None:
        """They get the next ids, in order, which the caller checks."""
        from tokenizers import AddedToken

        self._tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in PUBLISHED_IDS])

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
