"""Finished jobs on disk: how many, how old and how large they may get, what is removed first, and the record of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from h3stream.v1 import video_pb2
from orchestrator.job import Job
from services.common.files import remove

log = logging.getLogger(__name__)

LOG_NAME = "events.log"
RECORD_NAME = "removed.jsonl"


@dataclass(frozen=True)
class Limits:
    """What is kept of finished jobs."""

    num_jobs: int
    """Jobs with their events and artifacts; at least 1."""
    age_s: float = 0.0
    """Seconds that artifacts are kept; 0: for ever."""
    num_bytes: int = 0
    """Bytes of all artifacts together, without the logs, which are as large as the streams; 0: any number."""


@dataclass
class _Entry:
    """A finished job."""

    directory: Path
    ended_s: float
    """Wall-clock time."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of its artifacts that are still there."""
    job: Job | None = None
    """None for one of an earlier run: nobody asks for it any more, but it takes its turn to be removed."""


class Shelf:
    """The finished jobs, oldest first."""

    def __init__(
        self, data_directory: Path, limits: Limits, wall_clock: Callable[[], float], forget: Callable[[str], object]
    ) -> None:
        """forget: called with the name of a job whose directory is being removed."""
        self._jobs_directory = data_directory / "jobs"
        self._record_path = data_directory / RECORD_NAME
        self._limits = limits
        self._wall_clock = wall_clock
        self._forget = forget
        self._entries: deque[_Entry] = deque()

    def adopt(self) -> None:
        """Takes what an earlier run left, by its time of change, and removes what its jobs had in the making.

        Raises OSError.
        """
        found = []
        for directory in self._jobs_directory.iterdir():
            ended_s = directory.stat().st_mtime  # before anything in it changes
            for path in directory.glob(".*"):
                remove(path)
            found.append(_Entry(directory, ended_s, _artifact_sizes(directory)))
        self._entries.extend(sorted(found, key=lambda entry: entry.ended_s))

    def add(self, job: Job) -> None:
        """Takes a job that has ended, and sweeps its directory."""
        sizes = {artifact.name: artifact.size_bytes for artifact in job.artifacts}
        self.sweep(job)
        self._entries.append(_Entry(job.directory, self._wall_clock(), sizes, job))

    def sweep(self, job: Job) -> None:
        """Removes of an ended job's directory what is neither its log nor listed: inputs, scratch and what was never
        completed."""
        kept = {LOG_NAME, *(artifact.name for artifact in job.artifacts)}
        for path in job.directory.glob("*"):
            if path.name not in kept:
                remove(path)

    def tidy(self) -> None:
        """Removes what is beyond the limits, the oldest first. The newest artifacts are never too large."""
        limits = self._limits
        while len(self._entries) > limits.num_jobs:
            oldest = self._entries.popleft()
            self._record(oldest, f"more than {limits.num_jobs} jobs have finished (kept_jobs)")
            self._forget(oldest.directory.name)
            shutil.rmtree(oldest.directory, ignore_errors=True)  # readers of its log keep the open file
        now_s = self._wall_clock()
        total = sum(sum(entry.sizes.values()) for entry in self._entries)
        newest = next((entry for entry in reversed(self._entries) if entry.sizes), None)
        for entry in self._entries:
            if limits.age_s and now_s - entry.ended_s > limits.age_s:
                reason = f"its job ended more than {limits.age_s:g} s ago (kept_age_s)"
            elif limits.num_bytes and total > limits.num_bytes and entry is not newest:
                reason = f"artifacts took more than {limits.num_bytes} bytes (kept_bytes)"
            else:
                return  # those that follow are younger
            total -= sum(entry.sizes.values())
            self._remove_artifacts(entry, reason)

    def _remove_artifacts(self, entry: _Entry, reason: str) -> None:
        if not entry.sizes:
            return
        self._record(entry, reason)
        for name in entry.sizes:
            remove(entry.directory / name)  # downloads that have begun keep the open file
        if entry.job is not None:
            for name in entry.sizes:
                gone = video_pb2.RemovedArtifact(name=name, message=reason)
                gone.remove_time.FromNanoseconds(int(self._wall_clock() * 1e9))
                entry.job.removed_artifacts.append(gone)
            entry.job.artifacts.clear()
        entry.sizes.clear()

    def _record(self, entry: _Entry, reason: str) -> None:
        """Writes down what is about to be removed."""
        line = {
            "time": datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds"),
            "job_id": entry.directory.name,
            "artifacts": [{"name": name, "size_bytes": size} for name, size in entry.sizes.items()],
            "reason": reason,
        }
        try:
            with self._record_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk, which removing makes room on
            log.warning("removed %s, which cannot be recorded (%s): %s", entry.directory.name, error.strerror, reason)


def _artifact_sizes(directory: Path) -> dict[str, int]:
    """The artifacts in a job's directory, which it may also have left behind without ending."""
    if not directory.is_dir():
        return {}
    return {
        path.name: path.stat().st_size
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != LOG_NAME
    }
