from __future__ import annotations

import torch

from services.text_encoder.embedding_cache import Embedding, EmbeddingCache, content_key


def embedding(num_tokens: int) -> Embedding:
    """An embedding of 16 bytes a token: 8 of context and 8 of tag."""
    return Embedding(torch.zeros(num_tokens, 2), torch.ones(num_tokens, dtype=torch.int64))


def test_the_least_recently_used_goes_first() -> None:
    cache = EmbeddingCache(capacity_bytes=64)
    entries = {name: embedding(2) for name in "abc"}  # 32 bytes each
    cache.put("a", entries["a"])
    cache.put("b", entries["b"])
    assert cache.get("a") is entries["a"]
    cache.put("c", entries["c"])
    assert cache.get("b") is None
    assert cache.get("a") is entries["a"]
    assert cache.get("c") is entries["c"]
    assert cache.num_bytes == 64


def test_an_entry_larger_than_the_capacity_evicts_nothing() -> None:
    cache = EmbeddingCache(capacity_bytes=64)
    small = embedding(4)
    cache.put("small", small)
    cache.put("large", embedding(5))
    assert cache.get("large") is None
    assert cache.get("small") is small


def test_putting_a_key_again_counts_its_bytes_once() -> None:
    cache = EmbeddingCache(capacity_bytes=64)
    cache.put("a", embedding(1))
    cache.put("a", embedding(3))
    assert cache.num_bytes == 48


def test_a_capacity_of_nothing_keeps_nothing() -> None:
    cache = EmbeddingCache(capacity_bytes=0)
    cache.put("a", embedding(1))
    assert cache.get("a") is None
    assert cache.num_bytes == 0


def test_the_key_depends_on_text_weights_and_dtype_and_on_nothing_else() -> None:
    weights = {"one.safetensors": "aa", "two.safetensors": "bb"}
    key = content_key("a fox", weights, torch.bfloat16)
    assert key == content_key("a fox", dict(reversed(weights.items())), torch.bfloat16)
    others = {
        content_key("a fox ", weights, torch.bfloat16),
        content_key("a fox", weights | {"two.safetensors": "bc"}, torch.bfloat16),
        content_key("a fox", {"one.safetensors": "aa"}, torch.bfloat16),
        content_key("a fox", weights, torch.float32),
    }
    assert len(others | {key}) == 5
