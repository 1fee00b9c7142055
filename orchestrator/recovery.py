"""A job on a lane whose workers may be lost: who is gone is replaced, and the job goes on from where it stood."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core.phases import Worker
from h3stream.errors import StartupError, WorkerLostError
from orchestrator.clip_record import has_clip
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.refine import run_refinement
from orchestrator.session import give_up_refinement, run_session

log = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Losses in a row, without a new chunk, fragment or step of the refinement between them, that end a job: what kills a
worker at the same place each time is the job itself."""


async def run_job(job: Job, lane: Lane) -> None:
    """Makes or refines the job's clip from wherever it stands, emitting its events as things happen.

    Frees nothing, as `run_session` does not. Raises WorkerLostError once too many workers were lost, and a
    GenerationError where a phase fails.
    """
    run = run_session if job.source is None else run_refinement
    num_losses = 0
    while True:
        try:
            await run(job, lane)
            return
        except WorkerLostError as error:
            num_losses = min(num_losses, job.num_vain_resumes) + 1  # those before the last step forward do not count
            if num_losses < MAX_LOSSES and await _recovers(job, lane):
                continue
            if not has_clip(job):
                raise
            await give_up_refinement(job, lane, error)
            return


async def _recovers(job: Job, lane: Lane) -> bool:
    """Replaces the workers that are gone and says so; False if they cannot be replaced."""
    where = f"phase {job.phase.value}" + (f" of chunk {job.chunk_index}" if job.chunk_index >= 0 else "")
    try:
        lost = await lane.recover()
    except StartupError as error:
        log.warning("job %s cannot go on: %s", job.job_id, error)
        return False
    job.resume(f"{_told(lost)} lost in {where}; the job goes on from its last finished chunk")
    return True


def _told(lost: Sequence[Worker]) -> str:
    names = [worker.value for worker in lost]
    if len(names) < 2:
        return f"the {''.join(names) or 'connection to a'} worker was"
    return f"the {', '.join(names[:-1])} and {names[-1]} workers were"
