"""A server with one job of many bytes, in a process of its own so that its memory can be looked at.

    python -m tests.service.big_job_server DIRECTORY

Prints its address, and its resident bytes for every line it reads.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.caller import Caller
from orchestrator.job import Job
from orchestrator.job_files import LOG_NAME
from orchestrator.job_log import JobLog
from tests.service.conftest import serving

JOB_ID = "big"
NUM_FRAGMENTS = 64
FRAGMENT_BYTES = 500_000


@dataclass
class OneJob:
    """As much of a scheduler as following a job takes."""

    its: Job

    def job(self, job_id: str, caller: Caller) -> Job:
        assert job_id == JOB_ID
        return self.its


async def main(directory: Path) -> None:
    nothing: Any = None
    plan = video_pb2.Plan(chunks=[video_pb2.ChunkPlan()] * NUM_FRAGMENTS)
    job = Job(records_pb2.JobRecord(job_id=JOB_ID, plan=plan), directory, JobLog(directory / LOG_NAME))
    job.emit(video_pb2.Accepted(plan=plan))
    job.emit(types_pb2.InitSegment(data=b"init"))
    for index in range(NUM_FRAGMENTS):
        job.emit(types_pb2.Fragment(data=bytes([index]) * FRAGMENT_BYTES, chunk_index=index, is_keyframe=True))
    job.emit(video_pb2.Completed())
    job.end(None)
    job.tell_end()
    async with serving(directory, OneJob(job), nothing, (), nothing) as address:
        print(address, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(psutil.Process().memory_info().rss, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
