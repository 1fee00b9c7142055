"""Finished jobs on disk: how many, how old and how large they may get, what is removed first, and the record of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2
from orchestrator.job_files import sweep
from orchestrator.journal import JobRow, Journal
from orchestrator.stock import load_job, remove, stored_bytes, write_end_making_room

log = logging.getLogger(__name__)

REMOVED_NAME = "removed.jsonl"


@dataclass(frozen=True)
class Limits:
    """What is kept of finished jobs."""

    num_jobs: int
    """Jobs of all tenants with their events and artifacts; at least 1."""
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
        """Removes what is beyond the limits: what is too old, and of what is too much the oldest of the tenant that has
        the most. The newest artifacts of all are never too large.

        What cannot be removed is left to the next call.
        """
        try:
            while (row := self._one_too_many()) is not None:
                self._remove_job(row, f"more than {self._limits.num_jobs} jobs have finished (kept_jobs)")
            while (found := self._beyond_limits()) is not None:
                self._remove_artifacts(*found)
        except PhaseError as error:
            log.error("what is beyond the limits cannot be removed: %s", error)

    def _one_too_many(self) -> JobRow | None:
        """The job that must go next, if there are too many."""
        num_jobs = self._journal.num_ended
        if sum(num_jobs.values()) <= self._limits.num_jobs:
            return None
        return self._journal.oldest_ended(_with_the_most(num_jobs))

    def _beyond_limits(self) -> tuple[JobRow, str] | None:
        """The job whose artifacts must go next, and why."""
        limits = self._limits
        if limits.age_s and (oldest := self._journal.oldest_with_artifacts()) is not None:
            assert oldest.ended_s is not None
            if self._wall_clock() - oldest.ended_s > limits.age_s:
                return oldest, f"its job ended more than {limits.age_s:g} s ago (kept_age_s)"
        if limits.num_bytes and (row := self._too_large()) is not None:
            return row, f"artifacts took more than {limits.num_bytes} bytes (kept_bytes)"
        return None

    def _too_large(self) -> JobRow | None:
        """The job whose artifacts must go next, if there are too many bytes of them."""
        num_bytes = dict(self._journal.artifact_bytes)
        if sum(num_bytes.values()) <= self._limits.num_bytes:
            return None
        newest = self._journal.newest_with_artifacts()
        if newest is not None and num_bytes[newest.tenant] == newest.artifact_bytes:
            del num_bytes[newest.tenant]  # it has no others, and these stay
        return self._journal.oldest_with_artifacts_of(_with_the_most(num_bytes))

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
        write_end_making_room(directory, end)
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


def _with_the_most(amounts: Mapping[str, int]) -> list[str]:
    """The tenants that have most; none where nobody has anything."""
    most = max(amounts.values(), default=0)
    return [tenant for tenant, amount in amounts.items() if amount == most > 0]
