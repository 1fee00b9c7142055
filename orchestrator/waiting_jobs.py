"""The jobs that wait for a lane: those that a server before had on one, then the tenants' in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from core.fair_queue import FairQueue
from h3stream.v1 import video_pb2
from orchestrator.job import Job


class WaitingJobs:
    """Jobs in the order in which they are to run."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        """weight: of a tenant."""
        self._weight = weight
        self._interrupted: deque[Job] = deque()  # were admitted before all others
        self._queue: FairQueue[Job] = FairQueue()
        self._num_changes = 0
        self._counted: tuple[int, int] | None = None  # what the positions that jobs know were counted from

    def __len__(self) -> int:
        return len(self._interrupted) + len(self._queue)

    def add(self, job: Job) -> None:
        """Lets a job wait."""
        self._num_changes += 1
        if job.state == video_pb2.JOB_STATE_RUNNING:
            self._interrupted.append(job)
        else:
            weight = self._weight(job.tenant)
            self._queue.push(job, tenant=job.tenant, priority=job.priority, cost=_cost(job), weight=weight)

    def pop(self, may_run: Callable[[str], bool]) -> Job | None:
        """Takes the next job of a tenant that may run one; None if there is none."""
        self._num_changes += 1
        return self._interrupted.popleft() if self._interrupted else self._queue.pop(may_run)

    def remove(self, job: Job) -> bool:
        """Lets a job wait no longer; False if it does not wait."""
        self._num_changes += 1
        if job in self._interrupted:
            self._interrupted.remove(job)
            return True
        return self._queue.remove(job)

    def clear(self) -> list[Job]:
        """Takes all jobs."""
        jobs = self._in_order()
        for job in jobs:
            self.remove(job)
        return jobs

    def num_of(self, tenant: str) -> int:
        """Jobs of a tenant."""
        return self._queue.num_of(tenant) + sum(job.tenant == tenant for job in self._interrupted)

    def count_positions(self, first: int) -> None:
        """Lets every job know how many are ahead of it, if that may have changed.

        first: how many are ahead of the first one.
        """
        if self._counted != (self._num_changes, first):
            for position, job in enumerate(self._in_order(), first):
                job.queue_position = position
            self._counted = self._num_changes, first

    def _in_order(self) -> list[Job]:
        return [*self._interrupted, *(job for job, _ in self._queue.positions())]


def _cost(job: Job) -> float:
    """What a job takes of a lane, in pixels that are sampled: what tenants share alike."""
    steps = job.plan.refine_audio.steps if job.source is not None else job.clip.steps
    return max(1, job.clip.num_frames * job.clip.width * job.clip.height * steps)
