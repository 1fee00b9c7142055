"""A server killed at any instruction: what its callers were told is there, and nothing is there half made."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from h3stream.v1 import video_pb2
from orchestrator.job import Job
from orchestrator.job_files import END_NAME, LOG_NAME, RECORD_NAME
from orchestrator.job_store import JobStore
from tests.faults.job_lives import ARTIFACT, LIMITS, NUM_FRAGMENTS, artifact_of, open_store

ROOT = Path(__file__).parents[2]
NUM_SHARES = 4
"""Tests that share the moments of one life, so that none of them takes long."""
ENDED = {
    "succeeds": video_pb2.JOB_STATE_SUCCEEDED,
    "fails": video_pb2.JOB_STATE_FAILED,
    "is": video_pb2.JOB_STATE_CANCELLED,
}


@pytest.fixture(scope="module")
def lives() -> Iterator[subprocess.Popen[str]]:
    """A process that makes lives."""
    command = [sys.executable, "-m", "tests.faults.job_lives"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory that costs no disk: a killed process loses nothing of what it has written anywhere."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture
def directory() -> Iterator[Path]:
    with in_memory() as path:
        yield path


@dataclass
class Told:
    """What callers know of the jobs of a data directory."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Of the jobs that were accepted."""
    logs: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes of each log that were told, and their checksum."""
    ended: dict[str, int] = field(default_factory=dict)
    """States, in the order of the ends."""
    going: set[str] = field(default_factory=set)
    """Jobs that were to be removed."""
    gone: set[str] = field(default_factory=set)
    """Jobs whose removal was told."""
    num_moments: int = 0
    """Of the last life, if it came to its end."""

    @classmethod
    def read(cls, path: Path) -> Told:
        told = cls()
        for text in path.read_text().splitlines() if path.exists() else ():
            match json.loads(text):
                case {"accepted": job_id, "prompt": prompt}:
                    told.prompts[job_id] = prompt
                case {"logged": job_id, "num_bytes": num_bytes, "sha256": sha256}:
                    told.logs[job_id] = num_bytes, sha256
                case {"ended": job_id, "state": state}:
                    told.ended[job_id] = state
                case {"going": job_id}:
                    told.going.add(job_id)
                case {"gone": job_id}:
                    told.gone.add(job_id)
                case {"num_moments": num_moments}:
                    told.num_moments = num_moments
        return told


def make_life(lives: subprocess.Popen[str], directory: Path, **order: Any) -> int:
    """Lives once on a directory; returns the exit status."""
    assert lives.stdin is not None
    assert lives.stdout is not None
    paths = {"data": str(directory / "data"), "told": str(directory / "told")}
    (directory / "data").mkdir(exist_ok=True)
    lives.stdin.write(json.dumps({**paths, "life": 0, **order}) + "\n")
    lives.stdin.flush()
    return int(lives.stdout.readline())


def check(directory: Path) -> None:
    """Starts on what is left, twice, and holds it against what was told; the second time removes what is too much."""
    told = Told.read(directory / "told")
    jobs = directory / "data" / "jobs"
    store, live = open_store(directory / "data")
    kept = {path.name for path in jobs.iterdir() if not path.name.startswith(".")}
    listed = store.page(None, (), "", 1000)[0]
    assert {job.job_id for job in listed} == kept
    assert not list(jobs.glob(".*"))
    assert {job.job_id for job in live} == {job.job_id for job in listed if not job.ended.is_set()}
    for job in listed:
        check_job(job, told)
    check_what_is_gone(told, kept, store)
    understood = [job.to_proto() for job in listed]
    store.close()

    store, _ = open_store(directory / "data")
    assert [job.to_proto() for job in store.page(None, (), "", 1000)[0]] == understood, "a start has changed something"
    store.tidy()
    ended = [job for job in store.page(None, (), "", 1000)[0] if job.ended.is_set()]
    assert len(ended) <= LIMITS.num_jobs
    assert sum(artifact.size_bytes for job in ended for artifact in job.artifacts) <= LIMITS.num_bytes
    for job in ended:
        check_job(job, told)
        assert {path.name for path in job.directory.iterdir()} == {
            RECORD_NAME, END_NAME, LOG_NAME, *(artifact.name for artifact in job.artifacts)
        }  # fmt: skip
    store.close()


def check_job(job: Job, told: Told) -> None:
    """One job, as the files tell it, against what was told of it."""
    assert job.job_id not in told.gone
    assert told.prompts.get(job.job_id, job.prompt) == job.prompt
    assert job.plan.clip.num_frames == 39
    num_bytes, sha256 = told.logs.get(job.job_id, (0, hashlib.sha256().hexdigest()))
    content = job.log.path.read_bytes()
    assert hashlib.sha256(content[:num_bytes]).hexdigest() == sha256, "what was told is no longer there"
    assert len(job.log) > 0
    outcome = ENDED.get(job.prompt.split()[0], 0)
    if not job.ended.is_set():
        assert job.job_id not in told.ended
        return
    assert job.state == told.ended.get(job.job_id, outcome)
    assert job.num_frames_emitted == 5 * NUM_FRAGMENTS
    assert (job.error is None) == (job.state == video_pb2.JOB_STATE_SUCCEEDED)
    names = {artifact.name for artifact in job.artifacts} | {gone.name for gone in job.removed_artifacts}
    assert names == ({ARTIFACT} if outcome == video_pb2.JOB_STATE_SUCCEEDED else set())
    for artifact in job.artifacts:
        assert (job.directory / artifact.name).read_bytes() == artifact_of(job.prompt)


def check_what_is_gone(told: Told, kept: set[str], store: JobStore) -> None:
    """Jobs that were told of and are gone: they were removed, or ended before all that are kept."""
    missing = {*told.prompts, *told.ended} - kept
    assert told.gone <= missing
    by_age = [job_id for job_id in told.ended if job_id not in told.going]
    aged = missing - told.going
    num_aged = len(aged & set(by_age))  # others ended when nobody could be told any more
    assert aged >= set(by_age[:num_aged]), "not the oldest"
    if aged:
        assert sum(job.ended.is_set() for job in store.page(None, (), "", 1000)[0]) >= LIMITS.num_jobs
    for job_id in set(told.prompts) & kept:
        row = store.find_key("default", told.prompts[job_id].replace(" ", "-"))
        assert row is not None
        assert row.job_id == job_id


@pytest.fixture(scope="module")
def second_life(lives: subprocess.Popen[str]) -> Iterator[tuple[Path, int]]:
    """A directory with a whole life behind it and one that was cut short, and the moments of the life that follows."""
    with in_memory() as directory:
        assert make_life(lives, directory, life=0) == 0
        first = Told.read(directory / "told").num_moments
        assert make_life(lives, directory, life=1, kill_at=first // 3) == -signal.SIGKILL
        following = directory / "following"
        shutil.copytree(directory / "data", following / "data")
        assert make_life(lives, following, life=2) == 0
        num_moments = Told.read(following / "told").num_moments
        shutil.rmtree(following)
        yield directory, num_moments


@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_a_server_killed_at_any_moment_leaves_what_the_next_understands(
    lives: subprocess.Popen[str], second_life: tuple[Path, int], directory: Path, share: int
) -> None:
    template, num_moments = second_life
    assert num_moments > 200
    for moment in range(share, num_moments, NUM_SHARES):
        state = directory / str(moment)
        shutil.copytree(template, state)
        assert make_life(lives, state, life=2, kill_at=moment) == -signal.SIGKILL
        check(state)
        shutil.rmtree(state)


def test_servers_killed_at_any_time_one_after_the_other_lose_nothing(
    lives: subprocess.Popen[str], directory: Path
) -> None:
    rng = random.Random(0)
    for life in range(60):
        make_life(lives, directory, life=life, kill_after_s=rng.uniform(0.0, 0.1))
        check(directory)
    assert len(Told.read(directory / "told").ended) > 30, "too little has happened"
