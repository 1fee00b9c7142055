"""Servers' lives on a data directory, each in a process of its own that is killed somewhere: what a journal and its
jobs go through without lanes. Run as a module, it makes one life after the other of what it reads.

A life says what has been told in a file, line by line, right behind the moment in which callers could know it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.phases import Phase
from h3stream.errors import JobCancelledError, PhaseError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job import Job
from orchestrator.job_store import JobStore
from orchestrator.shelf import Limits
from services.common.files import write_whole
from tests.job_records import record_of

LIMITS = Limits(num_jobs=4, num_bytes=3000)
ARTIFACT = "final.mp4"
NUM_FRAGMENTS = 1
OUTCOMES = ("succeeds", "fails", "waits", "succeeds", "is cancelled")
"""What becomes of the jobs of a life, in order."""

Tell = Callable[..., None]


def open_store(data: Path) -> tuple[JobStore, list[Job]]:
    """The jobs of a data directory, and those of them that go on."""
    store = JobStore(data, LIMITS, clock=time.monotonic, wall_clock=time.time)
    return store, store.open()


def artifact_of(prompt: str) -> bytes:
    """What a job makes, of what it was asked for alone."""
    return hashlib.sha256(prompt.encode()).digest() * 60


def tell_nobody(**_: object) -> None:
    """Where nobody listens."""


def live(data: Path, life: int, tell: Tell) -> None:
    """One server: goes on with the jobs it finds, takes new ones, and removes one and what is too much."""
    store, found = open_store(data)
    for job in found:
        tell(found=job.job_id)
        run(store, job, tell)
    removed = None
    for number, outcome in enumerate(OUTCOMES):
        job = submit(store, f"{outcome} {life}.{number}", tell)
        run(store, job, tell)
        removed = removed or job
    assert removed is not None
    tell(going=removed.job_id)
    store.remove(removed)
    tell(gone=removed.job_id)
    store.tidy()
    store.close()


def submit(store: JobStore, prompt: str, tell: Tell) -> Job:
    """Takes a job that will do what its prompt says."""
    record = record_of("", prompt=prompt, key=prompt.replace(" ", "-"))
    job = store.add(record, None)
    tell(accepted=job.job_id, prompt=prompt)
    _tell_log(job, tell)
    return job


def run(store: JobStore, job: Job, tell: Tell) -> None:
    """Does with a job what its prompt says, from wherever it is."""
    if job.prompt.startswith("waits"):
        return
    if job.state == video_pb2.JOB_STATE_RUNNING:
        job.resume("the server ended")
    store.set_running(job)
    job.state = video_pb2.JOB_STATE_RUNNING
    job.enter(Phase.ENCODE)
    scratch = job.directory / ".chunks"
    scratch.mkdir(exist_ok=True)
    write_whole(scratch / "0000.latents", b"latents")
    for number in range(job.stream.num_fragments, NUM_FRAGMENTS):
        job.emit(types_pb2.Fragment(num_frames=5, data=f"{job.prompt}, {number}".encode() * 50))
        _tell_log(job, tell)
    if job.prompt.startswith("runs"):
        return
    error = None
    if job.prompt.startswith("succeeds"):
        size_bytes, sha256 = write_whole(job.directory / ARTIFACT, artifact_of(job.prompt))
        job.keep(types_pb2.Artifact(name=ARTIFACT, size_bytes=size_bytes, sha256=sha256))
        job.emit(video_pb2.Completed(artifacts=job.artifacts))
        _tell_log(job, tell)
    elif job.prompt.startswith("fails"):
        error = PhaseError("it broke", phase="encode")
    else:
        error = JobCancelledError("the job was cancelled", phase="encode")
    store.end(job, error)
    tell(ended=job.job_id, state=job.state)


def _tell_log(job: Job, tell: Tell) -> None:
    content = job.log.path.read_bytes()
    tell(logged=job.job_id, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


class Death:
    """Kills this process at the n-th of the moments before and after each thing that it does to its files."""

    def __init__(self, kill_at: int | None) -> None:
        self._kill_at = kill_at
        self.num_moments = 0

    def watch(self) -> None:
        """Begins to count."""
        for name in ("fsync", "fdatasync", "replace", "rename", "mkdir", "unlink", "rmdir", "pwrite", "ftruncate"):
            setattr(os, name, self._around(getattr(os, name)))
        death = self

        class Connection(sqlite3.Connection):
            def execute(self, *args: Any) -> sqlite3.Cursor:
                return death._around(super().execute)(*args)  # type: ignore[no-any-return]

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **options: connect(*args, factory=Connection, **options)  # type: ignore[assignment]

    def _around(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **options: Any) -> Any:
            self._moment()
            result = do(*args, **options)
            self._moment()
            return result

        return done

    def _moment(self) -> None:
        if self.num_moments == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_moments += 1


def _live_and_die(data: Path, told: Path, life: int, kill_at: int | None) -> None:
    fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    death = Death(kill_at)

    def tell(**line: object) -> None:
        os.write(fd, json.dumps(line).encode() + b"\n")

    death.watch()
    live(data, life, tell)
    tell(num_moments=death.num_moments)


def main() -> None:
    """Reads lives as lines of JSON and answers each with the number of the signal that ended it."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _live_and_die(Path(order["data"]), Path(order["told"]), order["life"], order.get("kill_at"))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if (delay_s := order.get("kill_after_s")) is not None:
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
