"""The jobs of a data directory: those that have not ended as objects, the others as rows of the journal and files.

What is told of a job is on the disk first: its directory and its row before its caller learns of it, its end before
anybody learns how it ended. A start finds one of these states, whatever instruction the last server ended at.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from h3stream.errors import GenerationError, PhaseError, StartupError
from h3stream.v1 import records_pb2, video_pb2
from orchestrator.job import Job
from orchestrator.job_files import (
    INCOMING_NAME,
    LOG_NAME,
    move_into_place,
    sweep,
    write_job_record,
)
from orchestrator.job_log import JobLog
from orchestrator.journal import JOURNAL_NAME, JobRow, Journal, State
from orchestrator.shelf import Limits, Shelf
from orchestrator.stock import enter_end, load_job, remove, row_of, take_stock

log = logging.getLogger(__name__)

INCOMING = f"jobs/{INCOMING_NAME}"
"""Folder of the data directory for what is to become a job's directory."""


class JobStore:
    """Finds, takes, ends and removes jobs. Raises PhaseError where the disk does not take what must be on it."""

    def __init__(
        self,
        data_directory: Path,
        limits: Limits,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """limits: what is kept of jobs that have ended."""
        self._data_directory = data_directory
        self._directory = data_directory / "jobs"
        self._limits = limits
        self._clock = clock
        self._wall_clock = wall_clock
        self._jobs: dict[str, Job] = {}
        self._ends: dict[str, records_pb2.JobEnd] = {}  # of those of them whose end is yet to be written down
        self._journal: Journal
        self._shelf: Shelf

    def open(self) -> list[Job]:
        """Takes what the last server left; returns the jobs that go on: those that were on a lane first, each kind
        oldest first.

        Raises StartupError.
        """
        try:
            self._journal = Journal(self._data_directory / JOURNAL_NAME)
            take_stock(self._journal, self._directory)
            self._shelf = Shelf(self._data_directory, self._journal, self._limits, self._wall_clock)
            for row in self._journal.live():
                self._restore(row)
            self._journal.remember_boot()
        except PhaseError as error:
            raise StartupError(f"the jobs in {self._directory} cannot be taken up: {error.message}") from error
        return self.live()

    def live(self) -> list[Job]:
        """The jobs that are this server's to bring to their end."""
        return [job for job in self._jobs.values() if not job.left.is_set()]

    def close(self) -> None:
        """Closes the journal."""
        self._journal.close()

    def job(self, job_id: str) -> Job | None:
        """The job of that name, if it is kept. Raises PhaseError if its files cannot be read."""
        if (job := self._jobs.get(job_id)) is not None:
            return job
        row = self._journal.row(job_id)
        return None if row is None else self._ended(row)

    def find_key(self, tenant: str, key: str) -> JobRow | None:
        """The tenant's job whose request was named so."""
        return self._journal.find_key(tenant, key)

    def page(self, tenant: str | None, states: Sequence[State], token: str, limit: int) -> tuple[list[Job], str]:
        """Jobs as `Journal.page` lists them; those whose files cannot be read are left out, and told in the log."""
        rows, next_token = self._journal.page(tenant, states, token, limit)
        jobs = []
        for row in rows:
            try:
                jobs.append(self._jobs.get(row.job_id) or self._ended(row))
            except PhaseError as error:
                log.error("job %s cannot be listed: %s", row.job_id, error)
        return jobs, next_token

    def stored_bytes(self, tenant: str) -> int:
        """Bytes of the events and artifacts of the tenant's jobs that have ended."""
        return self._journal.stored_bytes(tenant)

    def add(self, record: records_pb2.JobRecord, prepared: Path | None) -> Job:
        """Takes a new job. record: without name and time.  prepared: a directory that becomes the job's."""
        record.job_id = uuid.uuid4().hex
        record.create_time.FromNanoseconds(int(self._wall_clock() * 1e9))
        directory = self._directory / record.job_id
        staging = self._data_directory / INCOMING / record.job_id if prepared is None else prepared
        try:
            staging.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_job_record(staging, record)
            accepted = video_pb2.Accepted(plan=record.plan)
            JobLog(staging / LOG_NAME).append(video_pb2.Event(job_id=record.job_id, accepted=accepted))
            self._directory.mkdir(parents=True, exist_ok=True)  # somebody may have removed them all
            move_into_place(staging, directory)
            job = self._read(record)
            self._journal.add(row_of(record))
        except BaseException as error:
            shutil.rmtree(staging, ignore_errors=True)
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise PhaseError(f"the job's directory cannot be made: {error.strerror}") from error
            raise
        self._jobs[job.job_id] = job
        return job

    def set_running(self, job: Job) -> None:
        """Notes that a job is on a lane."""
        self._journal.set_running(job.job_id, job.num_resumes)

    def end(self, job: Job, error: GenerationError | None) -> None:
        """Ends a job, whose files are on the disk, and tells so.

        An end that cannot be written is told all the same, and written by `tidy` once it can be. Raises nothing.
        """
        self._ends[job.job_id] = job.end(error)
        try:
            self._write_end(job.job_id)
        except PhaseError as failure:
            log.error("the end of job %s cannot be written down yet: %s", job.job_id, failure)
        job.tell_end()

    def remove(self, job: Job) -> None:
        """Removes a job that has ended, with its files."""
        remove(self._journal, job.directory)
        self._jobs.pop(job.job_id, None)
        self._ends.pop(job.job_id, None)

    def sweep(self, job: Job) -> None:
        """Removes of an ended job's directory what is not kept."""
        sweep(job.directory, job.to_proto())

    def tidy(self) -> None:
        """Writes down the ends that could not be written, and removes what is beyond the limits. Raises nothing."""
        for job_id in list(self._ends):
            with suppress(PhaseError):
                self._write_end(job_id)
        self._shelf.tidy()

    def _write_end(self, job_id: str) -> None:
        """Writes down how a job ended, which is made of its files from then on."""
        enter_end(self._journal, self._directory / job_id, self._ends[job_id])
        del self._ends[job_id], self._jobs[job_id]

    def _restore(self, row: JobRow) -> None:
        """Takes up a job that has not ended; ends it where its log cannot be continued."""
        directory = self._directory / row.job_id
        record, _ = load_job(directory, row)
        try:
            job = self._read(record, has_run=row.state == "running", has_lost_power=self._journal.has_lost_power)
        except PhaseError as error:
            job = Job(record, directory, JobLog.of_ended(directory / LOG_NAME, 0, error))
            self._jobs[row.job_id] = job
            self.end(job, error)
            return
        if row.state == "running":
            job.state = video_pb2.JOB_STATE_RUNNING
        self._jobs[row.job_id] = job

    def _read(self, record: records_pb2.JobRecord, *, has_run: bool = False, has_lost_power: bool = False) -> Job:
        return Job.restore(
            record,
            self._directory / record.job_id,
            has_run=has_run,
            has_lost_power=has_lost_power,
            clock=self._clock,
            wall_clock=self._wall_clock,
        )

    def _ended(self, row: JobRow) -> Job:
        """A job that has ended. Raises PhaseError if its files cannot be read."""
        directory = self._directory / row.job_id
        record, end = load_job(directory, row)
        assert end is not None, f"job {row.job_id} has not ended"
        return Job.of_end(record, directory, end)
