"""The hidden states of earlier prompts, in memory, so that a prompt seen before needs no weights."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Embedding:
    """A prompt as the DiT reads it; tensors on the host, never written to."""

    context: torch.Tensor
    """Hidden states `[E, text_dim]`, bfloat16 or float32."""
    token_tags: torch.Tensor
    """Row tags `[E]`, int64: 1 for text."""

    @property
    def num_bytes(self) -> int:
        """Memory that the tensors take."""
        return self.context.nbytes + self.token_tags.nbytes


def content_key(prompt: str, digests: Mapping[str, str], dtype: torch.dtype) -> str:
    """What an embedding depends on, as one hash: the prompt's text, the weights and the dtype they compute in."""
    content = hashlib.sha256()
    for part in (*(f"{name}={digest}" for name, digest in sorted(digests.items())), str(dtype), prompt):
        encoded = part.encode()
        content.update(len(encoded).to_bytes(8, "little") + encoded)  # lengths keep neighbouring parts apart
    return content.hexdigest()


class EmbeddingCache:
    """Embeddings by content key; the least recently used go first when the bytes run out."""

    def __init__(self, capacity_bytes: int) -> None:
        """capacity_bytes: 0 keeps nothing."""
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[str, Embedding] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: str) -> Embedding | None:
        """The embedding kept under `key`, which becomes the most recently used."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: str, embedding: Embedding) -> None:
        """Keeps an embedding, unless it alone is larger than the capacity."""
        if embedding.num_bytes > self._capacity_bytes:
            return
        replaced = self._entries.pop(key, None)
        self._entries[key] = embedding
        self.num_bytes += embedding.num_bytes - (replaced.num_bytes if replaced else 0)
        while self.num_bytes > self._capacity_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
