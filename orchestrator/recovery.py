"""A job on a lane whose workers may be lost: who is gone is replaced, and the job goes on from where it stood."""

from __future__ import annotations

from collections.abc import Sequence

from core.phases import Worker
from h3stream.errors import WorkerLostError
from orchestrator.clip_record import has_clip
from orchestrator.job import Job
from orchestrator.lane import Lane, until_it_works
from orchestrator.refine import run_refinement
from orchestrator.session import give_up_refinement, run_session

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
            if num_losses < MAX_LOSSES:
                await _recover(job, lane)
            elif has_clip(job):
                await give_up_refinement(job, lane, error)
                return
            else:
                raise


async def _recover(job: Job, lane: Lane) -> None:
    """Replaces the workers that are gone, trying until it works, and says so."""
    where = f"phase {job.phase.value}" + (f" of chunk {job.chunk_index}" if job.chunk_index >= 0 else "")
    lost = await until_it_works(lane.recover)
    job.resume(f"{_told(lost)} lost in {where}; the job goes on from its last finished chunk")


def _told(lost: Sequence[Worker]) -> str:
    names = [worker.value for worker in lost]
    if len(names) < 2:
        return f"the {''.join(names) or 'connection to a'} worker was"
    return f"the {', '.join(names[:-1])} and {names[-1]} workers were"
