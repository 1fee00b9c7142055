"""What happened when in a job: phases, steps and fragments with their times, without what they carried."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.clock import TICKS_PER_SECOND
from h3stream.v1 import types_pb2, video_pb2


class Timeline:
    """The times of one job, in seconds after it was accepted."""

    def __init__(self) -> None:
        self._phases: list[dict[str, Any]] = []
        self._fragments: list[dict[str, Any]] = []
        self._refine_steps: list[dict[str, Any]] = []
        self._refined_fragments: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()

    def num_events(self, kind: str) -> int:
        """Events with that payload."""
        return self._counts[kind]

    def note(self, event: video_pb2.Event) -> None:
        """Takes the next event of the job."""
        kind = event.WhichOneof("payload") or ""
        self._counts[kind] += 1
        times = {"seq": event.seq, "time_s": round(event.elapsed_s, 6)}
        if kind == "phase":
            name = types_pb2.Phase.Name(event.phase.phase).removeprefix("PHASE_").lower()
            self._phases.append({**times, "phase": name, "chunk_index": event.phase.chunk_index})
        elif kind == "fragment":
            self._fragments.append({**times, **_facts(event.fragment)})
        elif kind == "refine_progress":
            step = event.refine_progress
            self._refine_steps.append({**times, "step": step.step, "mode": step.mode})
        elif kind == "refined_fragment":
            self._refined_fragments.append({**times, **_facts(event.refined_fragment)})

    def summary(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "ticks_per_second": TICKS_PER_SECOND,
            "phases": self._phases,
            "fragments": self._fragments,
            "refine_steps": self._refine_steps,
            "refined_fragments": self._refined_fragments,
            "num_events": dict(self._counts),
        }


def _facts(made: types_pb2.Fragment) -> dict[str, Any]:
    facts = {field.name: getattr(made, field.name) for field in made.DESCRIPTOR.fields if field.name != "data"}
    return {**facts, "num_bytes": len(made.data)}
