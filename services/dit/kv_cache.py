"""The KV cache of one clip: stage per layer, commit per entry, evict, gather.

Entry 0 is the text, entry c + 1 is chunk c. K is cached after norm and rotation at absolute positions, V as projected.
Which entries are retained is `core/retention.py`; where their rows live is `kv_storage.py`.
Source: docs/reference/raven-streaming.md §6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from core.retention import retained_entries
from h3stream.request import KvStorage
from services.dit.kv_storage import KvShape, TransferStats, make_storage


@dataclass(frozen=True)
class KvStats:
    """What a cache holds and what it cost."""

    requested_storage: KvStorage
    storage: KvStorage
    """Where the rows really live."""
    fallback_reason: str
    """Why that is not what was requested; empty if it is."""
    num_committed: int
    """Entries committed so far."""
    retained: tuple[int, ...]
    """Entries that attention sees, in time order."""
    retained_rows: int
    """Rows of those entries."""
    peak_kv_bytes: int
    """Most bytes of retained and staged rows at once, over all layers."""
    peak_slot_bytes: int
    """Most bytes of K and V that one layer attended to."""
    transfers: TransferStats
    """What was moved between host and device so far."""


class KvCache:
    """K and V of the retained entries, for every layer."""

    def __init__(
        self, shape: KvShape, entry_rows: Sequence[int], *, sink: int, window: int | None, storage: KvStorage
    ) -> None:
        """Takes all its memory on the device at once. Raises torch.OutOfMemoryError.

        entry_rows: rows of the text and of every chunk of the clip.
        """
        self._shape = shape
        self._entry_rows = tuple(entry_rows)
        self._sink, self._window = sink, window
        self._requested_storage = storage
        self._storage = make_storage(storage, shape)
        self._staged: set[int] = set()
        self._gathered = -1
        self._peak_rows = 0
        self._peak_slot_rows = 0
        self.num_committed = 0
        self.retained: tuple[int, ...] = ()

    @property
    def retained_rows(self) -> int:
        """Rows that attention sees before a forward's own."""
        return sum(self._rows_of(self.retained))

    def gather(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that a forward's rows attend to: retained entries, oldest first, then its own.

        key, value: the rows' own, `[N, h, d]`.  Returns two `[P + N, h, d]`, views of a reused buffer that are valid
        until the next call.
        """
        assert self.num_committed < len(self._entry_rows), f"all {self.num_committed} entries are committed"
        expected = self._entry_rows[self.num_committed]
        assert len(key) == expected, f"layer {layer}: {len(key)} rows, entry {self.num_committed} has {expected}"
        assert layer not in self._staged, f"layer {layer} is staged and would be overwritten"
        start = self.retained_rows
        stop = start + len(key)
        slot = self._storage.slot(layer, self._rows_of(self.retained))
        slot[0, start:stop] = key
        slot[1, start:stop] = value
        self._gathered = layer
        self._peak_slot_rows = max(self._peak_slot_rows, stop)
        return slot[0, :stop], slot[1, :stop]

    def stage(self, layer: int) -> None:
        """Sets aside the rows that `gather` was just given for this layer."""
        assert layer not in self._staged, f"layer {layer} is staged already"
        assert layer == self._gathered, f"layer {layer} was not gathered last, layer {self._gathered} was"
        start = self.retained_rows
        self._storage.stage(layer, start, start + self._entry_rows[self.num_committed])
        self._staged.add(layer)

    def commit(self) -> None:
        """Appends the staged rows of all layers as one entry, then evicts, so no two layers see different histories."""
        missing = sorted(set(range(self._shape.num_layers)) - self._staged)
        assert not missing, f"entry {self.num_committed} cannot be committed: layers {missing} are not staged"
        entries = (*self.retained, self.num_committed)
        self._peak_rows = max(self._peak_rows, sum(self._rows_of(entries)))
        kept = retained_entries(self.num_committed + 1, self._sink, self._window)
        self._storage.commit(self._rows_of(entries), [entry in kept for entry in entries])
        self.retained = kept
        self.num_committed += 1
        self._staged.clear()
        self._gathered = -1

    def discard(self) -> None:
        """Forgets what a failed forward has staged."""
        self._storage.discard()
        self._staged.clear()
        self._gathered = -1

    def stats(self) -> KvStats:
        """What the cache holds now and has cost so far."""
        return KvStats(
            requested_storage=self._requested_storage,
            storage=self._storage.kind,
            fallback_reason=self._storage.fallback_reason,
            num_committed=self.num_committed,
            retained=self.retained,
            retained_rows=self.retained_rows,
            peak_kv_bytes=self._peak_rows * self._shape.row_bytes * self._shape.num_layers,
            peak_slot_bytes=self._peak_slot_rows * self._shape.row_bytes,
            transfers=replace(self._storage.stats),
        )

    def _rows_of(self, entries: Sequence[int]) -> list[int]:
        return [self._entry_rows[entry] for entry in entries]
