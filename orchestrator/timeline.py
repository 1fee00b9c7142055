"""What happened when in a job: its phases and fragments with their times, without what they carried."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.clock import TICKS_PER_SECOND
from h3stream.v1 import types_pb2, video_pb2


class Timeline:
    """The times of one job, in seconds after it was accepted."""

    def __init__(self) -> None:
        self._accepted_s = 0.0
        self._phases: list[dict[str, Any]] = []
        self._fragments: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()

    def note(self, event: video_pb2.Event, now_s: float) -> None:
        """Takes the next event of the job, by any clock that does not jump."""
        if event.seq == 0:
            self._accepted_s = now_s
        kind = event.WhichOneof("payload") or ""
        self._counts[kind] += 1
        times = {"seq": event.seq, "time_s": round(now_s - self._accepted_s, 6)}
        if kind == "phase":
            name = types_pb2.Phase.Name(event.phase.phase).removeprefix("PHASE_").lower()
            self._phases.append({**times, "phase": name, "chunk_index": event.phase.chunk_index})
        elif kind == "fragment":
            made = event.fragment
            facts = {f.name: getattr(made, f.name) for f in made.DESCRIPTOR.fields if f.name != "data"}
            self._fragments.append({**times, **facts, "num_bytes": len(made.data)})

    def summary(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "ticks_per_second": TICKS_PER_SECOND,
            "phases": self._phases,
            "fragments": self._fragments,
            "num_events": dict(self._counts),
        }
