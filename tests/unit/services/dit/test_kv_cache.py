from __future__ import annotations

import pytest
import torch

from core.retention import retained_entries
from h3stream.request import KV_STORAGES, KvStorage
from services.dit import kv_storage
from services.dit.kv_cache import KvCache
from services.dit.kv_storage import KvShape

LAYERS, HEADS, DIM = 3, 2, 4
ENTRY_ROWS = (3, 7, 6, 6, 7, 6, 6, 2)
"""Text, six chunks whose rows differ as real ones do, and the tail."""
ROW_BYTES = 2 * HEADS * DIM * 4


def make_cache(storage: KvStorage = "gpu", sink: int = 2, window: int | None = 2) -> KvCache:
    slot_rows = max(
        sum(ENTRY_ROWS[e] for e in retained_entries(n, sink, window)) + rows for n, rows in enumerate(ENTRY_ROWS)
    )
    shape = KvShape(LAYERS, HEADS, DIM, torch.float32, torch.device("cpu"), slot_rows, max(ENTRY_ROWS[1:]))
    return KvCache(shape, ENTRY_ROWS, sink=sink, window=window, storage=storage)


def rows_of(entry: int, layer: int, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of an entry, different for every layer."""
    draw = torch.Generator().manual_seed(1000 * salt + 100 * entry + layer)
    size = (ENTRY_ROWS[entry], HEADS, DIM)
    return torch.randn(size, generator=draw), torch.randn(size, generator=draw)


def forward(cache: KvCache, *, stage: bool, salt: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward over all layers; what each attended to."""
    seen = []
    for layer in range(LAYERS):
        keys, values = cache.gather(layer, *rows_of(cache.num_committed, layer, salt))
        seen.append((keys.clone(), values.clone()))
        if stage:
            cache.stage(layer)
    return seen


def commit_next(cache: KvCache) -> None:
    forward(cache, stage=True)
    cache.commit()


@pytest.mark.parametrize("storage", KV_STORAGES)
@pytest.mark.parametrize(("sink", "window"), [(2, 2), (1, 1), (2, 0), (1, 0), (3, 1), (1, None), (9, 2)])
def test_a_forward_sees_the_retained_entries_oldest_first_and_then_its_own(
    storage: KvStorage, sink: int, window: int | None
) -> None:
    cache = make_cache(storage, sink, window)
    for entry in range(len(ENTRY_ROWS)):
        assert cache.retained == retained_entries(entry, sink, window)
        forward(cache, stage=False, salt=1)  # noise forwards leave nothing behind
        for layer, (keys, values) in enumerate(forward(cache, stage=False)):
            parts = [rows_of(e, layer) for e in (*cache.retained, entry)]
            assert torch.equal(keys, torch.cat([k for k, _ in parts]))
            assert torch.equal(values, torch.cat([v for _, v in parts]))
        if entry < len(ENTRY_ROWS) - 1:
            commit_next(cache)


def test_an_evicted_chunk_stays_evicted() -> None:
    cache = make_cache(sink=1, window=1)
    gone: set[int] = set()
    for _ in range(len(ENTRY_ROWS) - 1):
        before = set(cache.retained)
        commit_next(cache)
        gone |= before - set(cache.retained)
        assert not gone & set(cache.retained)
    assert gone == {1, 2, 3, 4, 5}


def test_a_commit_with_a_missing_layer_fails() -> None:
    cache = make_cache()
    for layer in (0, 2):
        cache.gather(layer, *rows_of(0, layer))
        cache.stage(layer)
    with pytest.raises(AssertionError, match=r"layers \[1\] are not staged"):
        cache.commit()


def test_a_layer_staged_twice_fails() -> None:
    cache = make_cache()
    cache.gather(0, *rows_of(0, 0))
    cache.stage(0)
    with pytest.raises(AssertionError, match="layer 0 is staged already"):
        cache.stage(0)
    with pytest.raises(AssertionError, match="layer 0 is staged and would be overwritten"):
        cache.gather(0, *rows_of(0, 0))


def test_a_layer_that_was_not_gathered_last_cannot_be_staged() -> None:
    cache = make_cache()
    cache.gather(0, *rows_of(0, 0))
    cache.gather(1, *rows_of(0, 1))
    with pytest.raises(AssertionError, match="layer 0 was not gathered last"):
        cache.stage(0)


def test_rows_of_another_entry_fail() -> None:
    cache = make_cache()
    with pytest.raises(AssertionError, match="7 rows, entry 0 has 3"):
        cache.gather(0, *rows_of(1, 0))


def test_nothing_can_follow_the_last_entry() -> None:
    cache = make_cache()
    for _ in ENTRY_ROWS:
        commit_next(cache)
    with pytest.raises(AssertionError, match="all 8 entries are committed"):
        cache.gather(0, *rows_of(0, 0))


@pytest.mark.parametrize("storage", KV_STORAGES)
def test_a_discarded_forward_leaves_no_trace(storage: KvStorage) -> None:
    cache = make_cache(storage)
    commit_next(cache)
    commit_next(cache)
    for layer in range(2):
        cache.gather(layer, *rows_of(2, layer, salt=1))
        cache.stage(layer)
    cache.discard()
    assert cache.num_committed == 2
    commit_next(cache)
    keys, _ = forward(cache, stage=False)[0]
    assert torch.equal(keys[10:16], rows_of(2, 0)[0])


@pytest.mark.parametrize("storage", ["gpu", "cpu"])
def test_the_device_buffer_is_allocated_once(storage: KvStorage) -> None:
    cache = make_cache(storage)
    addresses = set()
    for _ in range(len(ENTRY_ROWS) - 1):
        keys, _ = cache.gather(0, *rows_of(cache.num_committed, 0))
        addresses.add(keys.data_ptr())
        commit_next(cache)
    assert len(addresses) == 1


def test_host_storage_counts_what_it_moves_and_holds() -> None:
    cache = make_cache("cpu")
    commit_next(cache)  # the text
    commit_next(cache)  # chunk 0, with the text as history
    moved = cache.stats().transfers
    assert moved.to_host_bytes == (3 + 7) * LAYERS * ROW_BYTES
    assert moved.to_host_calls == 2 * 2 * LAYERS
    assert moved.to_device_bytes == 3 * LAYERS * ROW_BYTES
    assert moved.to_device_calls == 2 * LAYERS
    assert moved.host_bytes == moved.peak_host_bytes == (3 + 7) * LAYERS * ROW_BYTES
    for _ in ENTRY_ROWS[2:]:
        commit_next(cache)
    # Text and chunk 0 are pinned, two chunks are in the window, one is staged; evicted buffers serve again.
    moved = cache.stats().transfers
    assert moved.host_bytes == moved.peak_host_bytes == (3 + 4 * 7) * LAYERS * ROW_BYTES


def test_device_storage_moves_nothing_between_host_and_device() -> None:
    cache = make_cache("gpu")
    for _ in ENTRY_ROWS[1:]:
        commit_next(cache)
    moved = cache.stats().transfers
    assert (moved.host_bytes, moved.to_device_bytes, moved.to_host_calls) == (0, 0, 0)


def test_statistics_count_retained_and_staged_rows() -> None:
    cache = make_cache()
    for _ in ENTRY_ROWS[:-1]:
        commit_next(cache)
    stats = cache.stats()
    assert stats.num_committed == 7
    assert stats.retained == (0, 1, 5, 6)
    assert stats.retained_rows == 3 + 7 + 6 + 6
    # Fullest when chunk 4 (entry 5) was staged over entries 0, 1, 3, 4.
    assert stats.peak_kv_bytes == (3 + 7 + 6 + 7 + 6) * LAYERS * ROW_BYTES
    assert stats.peak_slot_bytes == (3 + 7 + 6 + 7 + 6) * ROW_BYTES


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_pinning_that_fails_falls_back_for_good_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache("cpu_pinned")
    assert cache.stats().storage == "cpu_pinned"
    commit_next(cache)
    commit_next(cache)
    stats = cache.stats()
    assert (stats.requested_storage, stats.storage) == ("cpu_pinned", "cpu")
    assert "page-locked memory could not be allocated" in stats.fallback_reason
    assert len([record for record in caplog.records if "falls back" in record.message]) == 1


def test_memory_that_is_not_pinned_after_all_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(kv_storage.torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    cache = make_cache("cpu_pinned")
    commit_next(cache)
    assert cache.stats().storage == "cpu"
    assert "not page-locked" in cache.stats().fallback_reason
