"""Jobs and lanes: who waits, who runs, who is cancelled, and what the next server is left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from h3stream.errors import (
    DeadlineError,
    GenerationError,
    IdempotencyKeyError,
    JobCancelledError,
    JobNotFoundError,
    ModelLoadingError,
    NotReadyError,
    OverloadedError,
    PermissionDeniedError,
    PhaseError,
    ResumeError,
    ServerStoppingError,
    UnsupportedError,
    WorkerLostError,
)
from h3stream.job import TenantUsage
from h3stream.v1 import records_pb2, types_pb2, video_pb2, workers_pb2
from orchestrator.caller import Caller
from orchestrator.job import STOPPING, Job, as_told
from orchestrator.job_store import INCOMING, JobStore
from orchestrator.journal import State
from orchestrator.lane import Lane, until_it_works
from orchestrator.recovery import run_job
from orchestrator.shelf import Limits
from orchestrator.tenants import NoLimits, TenantPolicy, check_limits, check_queue_share, may_run_another
from orchestrator.waiting_jobs import WaitingJobs
from services.common.logs import job_context

__all__ = ["INCOMING", "RETRY_AFTER_S", "Scheduler"]

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.5
"""Longest silence of a job's log while somebody follows it; callers are promised an event every 2 seconds."""
TICK_S = 0.25
RETRY_AFTER_S = 5.0
"""What a refused caller is told to wait: about the time a short clip holds a lane."""
MAX_VAIN_RESUMES = 5
"""How often in a row a job is taken up again without a chunk or a step that is new: it may be what ends the server."""


class Scheduler:
    """Runs jobs on lanes: tenants take turns, and a tenant's own jobs come by priority, then arrival."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        data_directory: Path,
        *,
        max_queued_jobs: int,
        kept_jobs: int,
        kept_age_s: float = 0.0,
        kept_bytes: int = 0,
        tenants: TenantPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """tenants: what each may have at a time; None: all alike, without limits."""
        self._lanes = lanes
        self._max_queued_jobs = max_queued_jobs
        self._kept_jobs = kept_jobs
        self.tenants = tenants or NoLimits()
        """What each tenant may have at a time."""
        self._clock = clock
        limits = Limits(kept_jobs, kept_age_s, kept_bytes)
        self._store = JobStore(data_directory, limits, clock=clock, wall_clock=wall_clock)
        self._waiting = WaitingJobs(self.tenants.weight)
        self._has_jobs = asyncio.Event()
        self._running: dict[Job, asyncio.Task[None]] = {}
        self._ends_with: dict[Job, GenerationError] = {}  # running jobs that are to end, and why
        self._pending_frames: Counter[str] = Counter()  # of each tenant's jobs that have not ended
        self._num_idle_lanes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._refusal: NotReadyError | None = ModelLoadingError("the model is being loaded")
        self._has_stopped = False
        self.workers: list[workers_pb2.DescribeResponse] = []
        """What the workers of the first lane are, once it has started; all lanes are alike."""

    def open(self) -> None:
        """Takes up the jobs of the data directory, so that they can be asked for. Raises StartupError."""
        for job in self._store.open():
            self._take_in(job)
        if self._waiting:
            log.info("%d jobs of the server before go on", len(self._waiting))

    async def start(self) -> None:
        """Starts the lanes and takes jobs once they are up. To be called after `open`. Raises StartupError."""
        self._end_late_jobs()  # those whose time has passed while there was no server never run
        self._tasks = [asyncio.create_task(self._tick())]
        await asyncio.gather(*(lane.start() for lane in self._lanes))
        self.workers = self._lanes[0].last_descriptions()
        self._tasks += [asyncio.create_task(self._serve(lane)) for lane in self._lanes]
        self._refusal = None

    def check_open(self) -> None:
        """Raises OverloadedError if the queue is full, NotReadyError if jobs are not taken now."""
        if self._refusal is not None:
            raise self._refusal
        if len(self._waiting) - self._num_idle_lanes >= self._max_queued_jobs:
            raise OverloadedError(
                f"{len(self._waiting)} jobs are waiting, which is the most this server lets wait; try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def check_limits(self, tenant: str, num_frames: int) -> None:
        """Raises QuotaExceededError if one more job, of so many frames, is more than its tenant may have."""
        usage = self.usage(tenant)
        check_limits(self.tenants, usage, tenant, num_frames)
        num_queued = usage.num_queued_jobs - self._num_idle_lanes
        check_queue_share(self.tenants, tenant, num_queued, self._max_queued_jobs)

    def known_job(self, caller: Caller, key: str, request_digest: str) -> Job | None:
        """The job that an earlier request of the caller's tenant with this idempotency key made; None for a new or an
        empty key.

        Raises IdempotencyKeyError if that was another request.
        """
        self._check_running()
        row = self._store.find_key(caller.tenant, key) if key else None
        if row is None:
            return None
        if row.request_digest != request_digest:
            raise IdempotencyKeyError(
                f"the idempotency key {key!r} has named another request, that of job {row.job_id}; give each request a "
                "key of its own",
                job_id=row.job_id,
            )
        return self._store.job(row.job_id)

    def submit(
        self,
        record: records_pb2.JobRecord,
        *,
        prepared: Path | None = None,
        request_digest: str = "",
        caller: Caller,
    ) -> tuple[Job, bool]:
        """The new job of a checked request, or the one that an earlier request with the same key made, and whether it
        is that.

        record: all but name, tenant and time of the job.  prepared: a directory with the job's inputs, which becomes
        the job's own.  request_digest: of the request, as `job_files.request_digest` makes it.
        Raises as `known_job` and `check_open` do, QuotaExceededError, and PhaseError if the job cannot be written down.
        """
        key = "" if (kind := record.WhichOneof("request")) is None else getattr(record, kind).idempotency_key
        if (known := self.known_job(caller, key, request_digest)) is not None:
            return known, True
        self.check_open()
        self.check_limits(caller.tenant, record.plan.clip.num_frames)
        record.tenant = caller.tenant
        job = self._store.add(record, prepared)
        self._take_in(job)
        return job, False

    def job(self, job_id: str, caller: Caller) -> Job:
        """The job of that name. Raises JobNotFoundError, also for one that the caller may not know of."""
        self._check_running()
        job = self._store.job(job_id)
        if job is None or not caller.may_see(job.tenant):
            raise JobNotFoundError(
                f"there is no job {job_id!r}; this server keeps its last {self._kept_jobs} finished jobs"
            )
        self._count_positions()
        return job

    def page(self, tenant: str | None, states: Sequence[State], token: str, limit: int) -> tuple[list[Job], str]:
        """Up to `limit` jobs, newest first, and the token of the next page, empty behind the last.

        tenant: None: of all.  states: to be listed; empty: all.  token: empty, or what the page before came with.
        Raises InvalidRequestError for a token that is none.
        """
        self._check_running()
        self._count_positions()
        return self._store.page(tenant, states, token, limit)

    def delete(self, job: Job, caller: Caller) -> None:
        """Removes a job that has ended. Raises PermissionDeniedError, UnsupportedError for one that has not."""
        self._check_running()
        if not caller.may_change(job.tenant):
            raise PermissionDeniedError(f"this key does not allow to delete job {job.job_id}", job_id=job.job_id)
        if not job.ended.is_set():
            raise UnsupportedError(f"job {job.job_id} has not ended; cancel it first", job_id=job.job_id)
        self._store.remove(job)

    def usage(self, tenant: str) -> TenantUsage:
        """What a tenant has now."""
        return TenantUsage(
            num_running_jobs=self._num_running(tenant),
            num_queued_jobs=self._waiting.num_of(tenant),
            num_pending_frames=self._pending_frames[tenant],
            num_stored_bytes=self._store.stored_bytes(tenant),
        )

    def request_cancel(self, job: Job) -> None:
        """Tells a job to end; `Job.wait_ended` returns once it has.

        Nothing changes for jobs that have ended or are left to the next server, and by second requests.
        """
        if self._waiting.remove(job):
            self._end(job, JobCancelledError("the job was cancelled while it waited", job_id=job.job_id))
        else:
            self._end_running(job, JobCancelledError("the job was cancelled"))

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Takes no more jobs, lets running ones go on until `drain_s` seconds have passed or `hurry` is set, leaves the
        others to the next server, and stops the lanes."""
        self._refusal = ServerStoppingError(STOPPING)
        for job in self._waiting.clear():
            job.suspend()
        running = list(self._running)
        drained = asyncio.create_task(_all_left(running))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait([drained, hurried], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for session in self._running.values():
            session.cancel()
        await drained
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lane.stop() for lane in self._lanes))
        self._has_stopped = True
        self._store.close()

    def _check_running(self) -> None:
        if self._has_stopped:
            raise ServerStoppingError(STOPPING)

    def _take_in(self, job: Job) -> None:
        """Lets a job wait for a lane."""
        self._waiting.add(job)
        self._pending_frames[job.tenant] += job.clip.num_frames
        self._has_jobs.set()

    def _num_running(self, tenant: str) -> int:
        return sum(job.tenant == tenant for job in self._running)

    async def _serve(self, lane: Lane) -> None:
        """One lane's life: the next job, to its end, and again, whatever fails that nobody has thought of."""
        while True:
            job = None
            try:
                job = await self._next(lane)
                with job_context(job.job_id):
                    if self._begin(job):
                        await self._run(job, lane)
            except Exception as error:
                log.exception("a lane's task has failed; it goes on in %g s", RETRY_AFTER_S)
                if job is not None and not job.left.is_set():
                    self._give_up(job, error)
                await asyncio.sleep(RETRY_AFTER_S)

    def _give_up(self, job: Job, failure: Exception) -> None:
        """Ends a job that is with a lane whose task has failed."""
        self._running.pop(job, None)
        self._ends_with.pop(job, None)
        try:
            self._end(job, as_told(failure, job.job_id))
        except Exception:
            log.exception("job %s cannot be ended as it should", job.job_id)

    async def _run(self, job: Job, lane: Lane) -> None:
        """A job on a lane, which is free for the next one afterwards."""
        self._running[job] = session = asyncio.create_task(run_job(job, lane))
        await asyncio.wait([session])
        # The lane is free again before the job is said to have ended, whatever happened in the session. Where it cannot
        # be freed the workers are replaced, which takes long: the job's readers are told first.
        is_clear = await _clear(lane, job)
        del self._running[job]
        self._settle(job, session)
        if not is_clear:
            await until_it_works(lane.restart)
            if job.ended.is_set():
                self._store.sweep(job)  # what workers that were not cleared left while they lived

    async def _next(self, lane: Lane) -> Job:
        """The next job for a lane, which waits no longer."""
        while True:
            self._num_idle_lanes += 1
            while not self._waiting:
                self._has_jobs.clear()
                await self._has_jobs.wait()
            self._num_idle_lanes -= 1
            if not await lane.is_alive():
                # Found before the job begins, so that no job is taken up again for what happened while nobody looked.
                log.warning("a worker of an idle lane does not answer: the lane is restarted")
                await until_it_works(lane.restart)
            if (job := self._pop()) is None:
                self._num_idle_lanes += 1
                await self._has_jobs.wait()
                self._num_idle_lanes -= 1
            else:
                return job

    def _pop(self) -> Job | None:
        """The next job that may run; None: there is none before `_has_jobs` is set."""
        job = self._waiting.pop(lambda tenant: may_run_another(self.tenants, tenant, self._num_running(tenant)))
        if job is None:
            self._has_jobs.clear()
        return job

    def _begin(self, job: Job) -> bool:
        """Notes that a job is on a lane; False if that ended it."""
        try:
            if job.state == video_pb2.JOB_STATE_RUNNING:
                _resume(job)
            self._store.set_running(job)
        except PhaseError as error:
            self._end(job, error)
            return False
        job.state = video_pb2.JOB_STATE_RUNNING
        job.queue_position = 0
        return True

    def _settle(self, job: Job, session: asyncio.Task[None]) -> None:
        """Ends a job whose session has ended, or leaves it to the next server."""
        ends_with = self._ends_with.pop(job, None)
        failure = None if session.cancelled() else session.exception()
        if failure is None and not session.cancelled():
            self._end(job, None)
        elif ends_with is not None:
            self._end(job, ends_with)
        elif isinstance(self._refusal, ServerStoppingError) and not _is_own(failure):
            log.info("job %s goes on when the server is back", job.job_id)
            job.suspend()
        else:
            self._end(job, as_told(failure or PhaseError("the job was cut short"), job.job_id))

    def _end(self, job: Job, error: GenerationError | None) -> None:
        if error is not None:
            error.job_id, error.phase, error.chunk_index = job.job_id, job.phase.value, job.chunk_index
            log.warning("job %s ended in phase %s: %s: %s", job.job_id, job.phase.value, error.reason, error)
        self._pending_frames[job.tenant] -= job.clip.num_frames
        self._store.end(job, error)
        self._has_jobs.set()  # its tenant may run another one
        self._store.tidy()

    def _end_running(self, job: Job, error: GenerationError) -> None:
        """Tells a job on a lane to end with an error, if it is on one. The first error counts."""
        if (session := self._running.get(job)) is not None and job not in self._ends_with:
            self._ends_with[job] = error
            if not session.cancelling():
                session.cancel()

    def _end_late_jobs(self) -> None:
        for job in self._store.live():
            if job.deadline_s is None or job.elapsed_s < job.deadline_s:
                continue
            message = f"the job has not ended within the {job.deadline_s:g} s that its request allows"
            if self._waiting.remove(job):
                self._end(job, DeadlineError(message))
            else:
                self._end_running(job, DeadlineError(message))

    def _count_positions(self) -> None:
        """Lets every waiting job know how many are ahead of it, if that may have changed."""
        self._waiting.count_positions(0 if self._num_idle_lanes else len(self._running))

    async def _tick(self) -> None:
        """Ends jobs that are late, and keeps the log of every job that is followed from falling silent, whatever its
        workers are doing."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._end_late_jobs()
                self._store.tidy()
                self._show_life()
            except Exception:
                log.exception("jobs cannot be looked after; trying again in %g s", RETRY_AFTER_S)
                await asyncio.sleep(RETRY_AFTER_S)

    def _show_life(self) -> None:
        """Lets those who follow jobs know that they live."""
        for job in self._store.live():
            if not job.log.num_followers:
                continue
            if job not in self._running:
                self._count_positions()
                job.tell_position()
            if self._clock() - job.last_event_s >= HEARTBEAT_S:
                job.show_life()


def _is_own(failure: BaseException | None) -> bool:
    """Whether a session failed for what its job is, and not for being cut short."""
    return failure is not None and not isinstance(failure, WorkerLostError)


def _resume(job: Job) -> None:
    """Announces that a job goes on that was on a lane of another server. Raises ResumeError if that is of no use."""
    place = f"phase {types_pb2.Phase.Name(job.last_phase.phase).removeprefix('PHASE_').lower()}"
    if job.last_phase.chunk_index >= 0:
        place += f" of chunk {job.last_phase.chunk_index}"
    if job.num_vain_resumes >= MAX_VAIN_RESUMES:
        raise ResumeError(
            f"the server was lost in {place} although the job had been taken up again {job.num_vain_resumes} times "
            "without a chunk or a step that was new: the job may be what ends it"
        )
    job.resume(f"the server {'was stopped' if job.was_suspended else 'ended'} in {place}; the job goes on from there")


async def _clear(lane: Lane, job: Job) -> bool:
    """Frees what the job held on its lane; False if a worker does not answer."""
    try:
        await lane.clear(job.job_id)
    except Exception as failure:  # whatever it is: the lane is restarted
        is_expected = isinstance(failure, GenerationError)
        log.warning("lane cannot be cleared after job %s: %s", job.job_id, failure, exc_info=not is_expected)
        return False
    return True


async def _all_left(jobs: Sequence[Job]) -> None:
    for job in jobs:
        await job.left.wait()
