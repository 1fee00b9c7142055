"""Finished jobs on disk: how many, how old and how large they may get, what is removed first, and the record of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2
from orchestrator.job_files import sweep, write_job_end
from orchestrator.journal import JobRow, Journal
from orchestrator.stock import load_job, remove, stored_bytes

log = logging.getLogger(__name__)

REMOVED_NAME = "removed.jsonl"


@dataclass(frozen=True)
class Limits:
    """What is kept of finished jobs."""

    num_jobs: int
    """Jobs with their events and artifacts; at least 1."""
    age_s: float = 0.0
    """Seconds that artifacts are kept; 0: for ever."""
    num_bytes: int = 0
    """Bytes of all artifacts together, without the logs, which are as large as the streams; 0: any number."""


class Shelf:
    """The finished jobs, as the journal has them, in the order in which they ended."""

    def __init__(self, data_directory: Path, journal: Journal, limits: Limits, wall_clock: Callable[[], float]) -> None:
        self._jobs_directory = data_directory / "jobs"
        self._record_path = data_directory / REMOVED_NAME
        self._journal = journal
        self._limits = limits
        self._wall_clock = wall_clock

    def tidy(self) -> None:
        """Removes what is beyond the limits, the oldest first. The newest artifacts are never too large.

        What cannot be removed is left to the next call.
        """
        try:
            while self._journal.num_ended > self._limits.num_jobs and (row := self._journal.oldest_ended()) is not None:
                self._remove_job(row, f"more than {self._limits.num_jobs} jobs have finished (kept_jobs)")
            while (found := self._beyond_limits()) is not None:
                self._remove_artifacts(*found)
        except PhaseError as error:
            log.error("what is beyond the limits cannot be removed: %s", error)

    def _beyond_limits(self) -> tuple[JobRow, str] | None:
        """The job whose artifacts must go next, and why."""
        limits, journal = self._limits, self._journal
        is_too_much = limits.num_bytes and journal.artifact_bytes > limits.num_bytes
        if not (limits.age_s or is_too_much) or (oldest := journal.oldest_with_artifacts()) is None:
            return None
        if limits.age_s and oldest.ended_s is not None and self._wall_clock() - oldest.ended_s > limits.age_s:
            return oldest, f"its job ended more than {limits.age_s:g} s ago (kept_age_s)"
        if is_too_much and oldest != journal.newest_with_artifacts():
            return oldest, f"artifacts took more than {limits.num_bytes} bytes (kept_bytes)"
        return None

    def _remove_job(self, row: JobRow, reason: str) -> None:
        self._record(row, self._artifacts(row), reason)
        remove(self._journal, self._jobs_directory / row.job_id)  # readers of its log keep the open file

    def _remove_artifacts(self, row: JobRow, reason: str) -> None:
        """Removes a job's artifacts; its end tells of it first, so that it never lists what is gone."""
        directory = self._jobs_directory / row.job_id
        _, end = load_job(directory, row)
        assert end is not None
        artifacts = list(end.job.artifacts)
        if artifacts:
            self._record(row, artifacts, reason)
        for artifact in artifacts:
            gone = end.job.removed_artifacts.add(name=artifact.name, message=reason)
            gone.remove_time.FromNanoseconds(int(self._wall_clock() * 1e9))
        del end.job.artifacts[:]
        try:
            write_job_end(directory, end)
        except PhaseError:  # a full disk, which removing makes room on
            sweep(directory, end.job)
            write_job_end(directory, end)
        sweep(directory, end.job)  # downloads that have begun keep the open file
        self._journal.set_stored_bytes(row.job_id, *stored_bytes(directory, end.job))

    def _artifacts(self, row: JobRow) -> list[types_pb2.Artifact]:
        """What there is of an ended job, as far as it can be told."""
        try:
            _, end = load_job(self._jobs_directory / row.job_id, row)
        except PhaseError:
            return []
        return [] if end is None else list(end.job.artifacts)

    def _record(self, row: JobRow, artifacts: list[types_pb2.Artifact], reason: str) -> None:
        """Writes down what is about to be removed."""
        line = {
            "time": datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds"),
            "job_id": row.job_id,
            "artifacts": [{"name": artifact.name, "size_bytes": artifact.size_bytes} for artifact in artifacts],
            "reason": reason,
        }
        try:
            with self._record_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk, which removing makes room on
            log.warning("removed %s, which cannot be recorded (%s): %s", row.job_id, error.strerror, reason)
