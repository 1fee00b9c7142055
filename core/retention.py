"""Which KV cache entries attention still sees. Entry 0 is the text, entry c + 1 is chunk c.

Source: docs/reference/raven-streaming.md §6.2.
"""

from __future__ import annotations


def retained_entries(num_committed: int, sink: int, window: int | None) -> tuple[int, ...]:
    """Entries kept after `num_committed` commits, in time order.

    sink: first entries pinned for the whole clip, at least 1.  window: most recent entries kept beside them; None keeps
    everything.
    """
    if window is None:
        return tuple(range(num_committed))
    pinned = range(min(sink, num_committed))
    recent = range(max(sink, num_committed - window), num_committed)
    return (*pinned, *recent)
