"""Schedulers over fake workers that come one after the other to one data directory, as servers do."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from h3stream.request import ClipSpec
from h3stream.v1 import records_pb2, video_pb2
from orchestrator.admission import make_plan
from orchestrator.caller import Caller
from orchestrator.job import Job
from orchestrator.job_files import request_digest
from orchestrator.lane import Lane
from orchestrator.scheduler import Scheduler
from tests.job_logs import read_log
from tests.service.conftest import CLIP, MODEL
from tests.service.fake_workers import FakeLaneHost, Script

NOBODY = Caller()


def record(prompt: str = "a fox", *, clip: ClipSpec = CLIP, **fields: Any) -> records_pb2.JobRecord:
    """A job as callers ask for it. fields: of its request."""
    return records_pb2.JobRecord(
        prompt=prompt,
        plan=make_plan(clip, MODEL, (), 6_000_000),
        generation=video_pb2.GenerateRequest(prompt=prompt, **fields),
    )


class Servers:
    """The servers of a test, of which the last one lives."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self.data.mkdir()
        self.script = Script()
        """What the workers of the present server are told."""
        self.scheduler: Scheduler
        """The present server."""
        self.hosts: list[FakeLaneHost] = []
        """Its lanes' hosts."""
        self._directory = directory
        self._numbers = itertools.count()
        self._left: list[tuple[Scheduler, Script]] = []

    async def start(self, **options: Any) -> Scheduler:
        """A new server on the data directory; options as in `open`."""
        self.open(**options)
        await self.scheduler.start()
        return self.scheduler

    def open(
        self, *, until: Callable[[Script], None] = lambda script: None, num_lanes: int = 1, **options: Any
    ) -> Scheduler:
        """One that has yet to start its lanes. until: tells its workers what to do."""
        self.script = Script()
        until(self.script)
        lanes, self.hosts = [], []
        for _ in range(num_lanes):
            lane = self._directory / f"lane{next(self._numbers)}"
            lane.mkdir()
            self.hosts.append(FakeLaneHost(lane, self.script))
            lanes.append(Lane(self.hosts[-1]))
        options = {"max_queued_jobs": 2000, "kept_jobs": 8, **options}
        self.scheduler = Scheduler(lanes, self.data, **options)
        self.scheduler.open()
        self._left.append((self.scheduler, self.script))
        return self.scheduler

    def kill(self) -> None:
        """Leaves the data directory to the next server as a crash of this one would at this instant."""
        copy = self._directory / f"data{next(self._numbers)}"
        shutil.copytree(self.data, copy)
        self.data = copy

    async def close(self) -> None:
        for scheduler, script in self._left:
            for gate in script.gates.values():
                gate.set()
            await scheduler.stop(0, asyncio.Event())

    def open_gates(self) -> None:
        """Lets the present server's workers go on, and all that come to these points later."""
        for event in self.script.gates.values():
            event.set()

    def submit(self, asked: records_pb2.JobRecord, caller: Caller = NOBODY) -> Job:
        job, _ = self.scheduler.submit(asked, request_digest=request_digest(asked), caller=caller)
        return job

    def job(self, job_id: str) -> Job:
        return self.scheduler.job(job_id, NOBODY)

    async def reached(self, point: str, times: int = 1) -> None:
        async with asyncio.timeout(10):
            while self.script.calls.count(point) < times:
                await asyncio.sleep(0.005)


def gate(*points: str) -> Callable[[Script], None]:
    """Workers that stand still at these points."""

    def prepare(script: Script) -> None:
        for point in points:
            script.gates[point] = asyncio.Event()

    return prepare


async def ended(*jobs: Job) -> None:
    async with asyncio.timeout(20):
        for job in jobs:
            await job.ended.wait()


def media(job: Job) -> list[bytes]:
    """What a job has sent, without the times."""
    events = read_log(job.log)
    return [
        getattr(event, kind).SerializeToString()
        for event in events
        if (kind := event.WhichOneof("payload")) in ("init_segment", "fragment")
    ]


def warnings(job: Job, reason: str) -> list[str]:
    return [e.warning.message for e in read_log(job.log) if e.HasField("warning") and e.warning.reason == reason]
