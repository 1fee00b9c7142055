"""Jobs and lanes: who waits, who runs, who is cancelled, and what is kept afterwards."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from h3stream.errors import (
    GenerationError,
    JobCancelledError,
    JobNotFoundError,
    ModelLoadingError,
    NotReadyError,
    OverloadedError,
    PhaseError,
)
from h3stream.request import ClipSpec
from h3stream.v1 import video_pb2, workers_pb2
from orchestrator.job import Job, RefineSource, as_told
from orchestrator.lane import Lane
from orchestrator.refine import run_refinement
from orchestrator.session import run_session
from orchestrator.shelf import Limits, Shelf

log = logging.getLogger(__name__)

INCOMING = "jobs/.incoming"
"""Folder of the data directory for what is to become a job's directory."""
HEARTBEAT_S = 1.5
"""Longest silence of a job's log; callers are promised an event every 2 seconds."""
TICK_S = 0.25
RETRY_AFTER_S = 5.0
"""What a refused caller is told to wait: about the time a short clip holds a lane."""


class Scheduler:
    """Runs jobs on lanes, first come first served."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        data_directory: Path,
        *,
        max_queued_jobs: int,
        kept_jobs: int,
        kept_age_s: float = 0.0,
        kept_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._lanes = lanes
        self._jobs_directory = data_directory / "jobs"
        self._incoming = data_directory / INCOMING
        self._max_queued_jobs = max_queued_jobs
        self._kept_jobs = kept_jobs
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        limits = Limits(kept_jobs, kept_age_s, kept_bytes)
        self._shelf = Shelf(data_directory, limits, wall_clock, lambda job_id: self._jobs.pop(job_id, None))
        self._queue: list[Job] = []
        self._has_jobs = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_idle_lanes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._refusal: NotReadyError | None = ModelLoadingError("the model is being loaded")
        self.workers: list[workers_pb2.DescribeResponse] = []
        """What the workers of the first lane are, once it has started; all lanes are alike."""

    async def start(self) -> None:
        """Starts the lanes and takes jobs once they are up. Raises StartupError."""
        self._jobs_directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._incoming, ignore_errors=True)  # what an earlier run was interrupted in
        self._shelf.adopt()
        await asyncio.gather(*(lane.start() for lane in self._lanes))
        self.workers = self._lanes[0].last_descriptions()
        self._tasks = [asyncio.create_task(self._serve(lane)) for lane in self._lanes]
        self._tasks.append(asyncio.create_task(self._tick()))
        self._refusal = None

    def check_open(self) -> None:
        """Raises OverloadedError if the queue is full, NotReadyError if jobs are not taken now."""
        if self._refusal is not None:
            raise self._refusal
        if len(self._queue) - self._num_idle_lanes >= self._max_queued_jobs:
            raise OverloadedError(
                f"{len(self._queue)} jobs are waiting, which is the most this server lets wait; try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def submit(
        self,
        prompt: str,
        clip: ClipSpec,
        plan: video_pb2.Plan,
        *,
        source: RefineSource | None = None,
        prepared: Path | None = None,
    ) -> Job:
        """Takes a checked request as a new job.

        source: the clip that is to be refined; None makes one.  prepared: a directory with the job's inputs, which
        becomes the job's own.  Raises as `check_open` does, and PhaseError if the job's files cannot be written.
        """
        self.check_open()
        job_id = uuid.uuid4().hex
        directory = self._jobs_directory / job_id
        try:
            self._jobs_directory.mkdir(parents=True, exist_ok=True)  # somebody may have removed them all
            if prepared is None:
                directory.mkdir(mode=0o700)
            else:
                prepared.rename(directory)
            job = Job(job_id, prompt, clip, plan, directory, source=source, clock=self._clock)
            job.emit(video_pb2.Accepted(plan=plan))
        except OSError as error:
            raise PhaseError(f"the job's directory cannot be made: {error.strerror}") from error
        except PhaseError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._jobs[job_id] = job
        self._queue.append(job)
        self._announce_queue()
        self._has_jobs.set()
        return job

    def jobs(self) -> list[Job]:
        """All jobs that are known, oldest first."""
        return list(self._jobs.values())

    def job(self, job_id: str) -> Job:
        """The job of that name. Raises JobNotFoundError."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise JobNotFoundError(
                f"there is no job {job_id!r}; this server keeps its last {self._kept_jobs} finished jobs"
            ) from None

    def request_cancel(self, job: Job) -> None:
        """Tells a job to end; it has once `job.ended` is set. Ended jobs and second requests change nothing."""
        if job in self._queue:
            self._queue.remove(job)
            self._end(job, JobCancelledError("the job was cancelled while it waited", job_id=job.job_id))
            self._announce_queue()
        elif (session := self._running.get(job.job_id)) is not None and not session.cancelling():
            session.cancel()

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Takes no more jobs, lets running ones go on until `drain_s` seconds have passed or `hurry` is set, cancels
        what is left and stops the lanes. Waiting jobs end as not run."""
        self._refusal = NotReadyError("the server is stopping")
        for job in list(self._queue):
            self._queue.remove(job)
            self._end(job, NotReadyError("the server stopped before the job could run", job_id=job.job_id))
        running = [self._jobs[job_id] for job_id in self._running]
        drained = asyncio.create_task(_all_ended(running))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait([drained, hurried], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for job in running:
            self.request_cancel(job)
        await drained
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lane.stop() for lane in self._lanes))

    async def _serve(self, lane: Lane) -> None:
        """One lane's life: the next job, to its end, and again."""
        while True:
            self._num_idle_lanes += 1
            while not self._queue:
                self._has_jobs.clear()
                await self._has_jobs.wait()
            self._num_idle_lanes -= 1
            if not await lane.is_alive():
                # Found before the job begins, so that no job fails for what happened while nobody looked.
                log.warning("a worker of an idle lane does not answer: the lane is restarted")
                await _restart(lane)
            if not self._queue:
                continue
            job = self._queue.pop(0)
            job.state = video_pb2.JOB_STATE_RUNNING
            run = run_session if job.source is None else run_refinement
            session = asyncio.create_task(run(job, lane, clock=self._clock))
            self._running[job.job_id] = session
            self._announce_queue()
            await asyncio.wait([session])
            # The lane is free again before the job is said to have ended, whatever happened in the session. Where it
            # cannot be freed the workers are replaced, which takes long: the job's readers are told first.
            is_clear = await _clear(lane, job)
            del self._running[job.job_id]
            self._end(job, _outcome(session, job))
            if not is_clear:
                await _restart(lane)
                self._shelf.sweep(job)  # what workers that were not cleared left while they lived

    def _end(self, job: Job, error: GenerationError | None) -> None:
        job.end(error)
        self._shelf.add(job)
        self._shelf.tidy()

    def _announce_queue(self) -> None:
        for position, job in enumerate(self._queue):
            job.wait_behind(position + (0 if self._num_idle_lanes else len(self._running)))

    async def _tick(self) -> None:
        """Keeps every live job's log from falling silent, whatever its workers are doing, and ages finished jobs."""
        while True:
            await asyncio.sleep(TICK_S)
            self._shelf.tidy()
            for job in [*self._queue, *(self._jobs[job_id] for job_id in self._running)]:
                if not job.ended.is_set() and self._clock() - job.last_event_s >= HEARTBEAT_S:
                    job.show_life()


async def _clear(lane: Lane, job: Job) -> bool:
    """Frees what the job held on its lane; False if a worker does not answer."""
    try:
        await lane.clear(job.job_id)
    except GenerationError as failure:
        log.warning("lane cannot be cleared after job %s: %s", job.job_id, failure)
        return False
    return True


async def _restart(lane: Lane) -> None:
    """Replaces the workers of a lane, trying until it works."""
    while True:
        try:
            await lane.restart()
        except Exception:  # whatever Ray says: a lane that gave up would leave its jobs waiting for ever
            # A lane that cannot start now may be able to once its GPU is free again.
            log.exception("lane could not be restarted; trying again in %.0f s", RETRY_AFTER_S)
            await asyncio.sleep(RETRY_AFTER_S)
        else:
            return


async def _all_ended(jobs: Sequence[Job]) -> None:
    for job in jobs:
        await job.ended.wait()


def _outcome(session: asyncio.Task[None], job: Job) -> GenerationError | None:
    """What a finished session ended with, told as an error of its job."""
    error: GenerationError
    if session.cancelled():
        error = JobCancelledError("the job was cancelled")
    elif (failure := session.exception()) is None:
        return None
    else:
        error = as_told(failure, job.job_id)
    error.job_id, error.phase, error.chunk_index = job.job_id, job.phase.value, job.chunk_index
    log.warning("job %s ended in phase %s: %s: %s", job.job_id, job.phase.value, error.reason, error)
    return error
