"""Files of jobs cut short and with flipped bits: every start understands them, and no job becomes what it was not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from h3stream.v1 import video_pb2
from orchestrator.journal import JobRow
from tests.faults.job_lives import live, open_store, run, submit, tell_nobody
from tests.faults.test_journal_kills import in_memory

NUM_DAMAGES = 40
ENDED = ("succeeds 0", "is cancelled 3", "fails 4")
"""Jobs that have ended."""
HEADER_BYTES = 100
"""Of both files of the journal: where a bit changes the meaning of all the others."""


@dataclass
class Whole:
    """A data directory as a killed server left it, and what a start makes of it undamaged."""

    path: Path
    rows: dict[str, JobRow]
    jobs: dict[str, video_pb2.Job]


def start(data: Path) -> tuple[dict[str, JobRow], dict[str, video_pb2.Job]]:
    """The jobs that a start finds, as the journal and as callers have them."""
    store, _ = open_store(data)
    jobs = {job.job_id: job.to_proto() for job in store.page(None, (), "", 1000)[0]}
    for job in jobs.values():
        if not job.HasField("end_time"):
            job.ClearField("num_events")  # where the journal is lost, the power may have been
    rows = {row.job_id: row for row in store._journal.rows()}
    for row in rows.values():
        assert store.find_key(row.tenant, row.idempotency_key) == row
    assert store.stored_bytes("default") == sum(row.stored_bytes for row in rows.values())
    store.close()
    return rows, jobs


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    with in_memory() as directory:
        data = directory / "data"
        data.mkdir()
        live(data, 0, tell_nobody)
        store, _ = open_store(data)
        for number, outcome in enumerate(("succeeds", "waits", "runs", "is cancelled", "fails")):
            run(store, submit(store, f"{outcome} {number}", tell_nobody), tell_nobody)
        shutil.copytree(data, directory / "left")
        shutil.copytree(data, directory / "started")
        rows, jobs = start(directory / "started")
        assert {row.state for row in rows.values()} == {"queued", "running", "succeeded", "cancelled", "failed"}
        yield Whole(directory / "left", rows, jobs)
        store.close()


def damages(path: Path, rng: random.Random) -> Iterator[bytes]:
    """What can become of a file."""
    content = path.read_bytes()
    for number in range(NUM_DAMAGES):
        if number % 4 == 0:
            yield content[: rng.randrange(len(content))]
        else:
            place = rng.randrange(min(HEADER_BYTES, len(content)) if number % 4 == 1 else len(content))
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            yield bytes(changed)


def damaged(whole: Whole, name: str) -> Iterator[tuple[dict[str, JobRow], dict[str, video_pb2.Job]]]:
    """What starts make of a data directory with one file damaged, each time otherwise."""
    for content in damages(whole.path / name, random.Random(Path(name).name)):
        with in_memory() as directory:
            shutil.copytree(whole.path, directory / "data")
            (directory / "data" / name).write_bytes(content)
            yield start(directory / "data")


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
def test_a_damaged_journal_changes_nothing(whole: Whole, name: str) -> None:
    for rows, jobs in damaged(whole, name):
        assert rows == whole.rows
        assert jobs == whole.jobs


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        *(("end.binpb", prompt) for prompt in ENDED),
        *((name, prompt) for name in ("job.binpb", "events.log") for prompt in (*ENDED, "waits 1", "runs 2")),
    ],
)
def test_a_damaged_file_of_a_job_is_that_jobs_affair_and_never_changes_how_it_ended(
    whole: Whole, name: str, prompt: str
) -> None:
    (job_id,) = (job.job_id for job in whole.jobs.values() if job.prompt == prompt)
    before = whole.jobs[job_id]
    has_ended = before.HasField("end_time")
    for rows, jobs in damaged(whole, f"jobs/{job_id}/{name}"):
        job = jobs.pop(job_id)
        assert jobs == {other: whole.jobs[other] for other in whole.jobs if other != job_id}
        assert rows.keys() == whole.rows.keys()
        assert (job.tenant, job.plan) == (before.tenant, before.plan)
        # A log without its first event may have held others, which callers know.
        is_log_gone = prompt == "runs 2" and job.error.message.startswith("the events that callers were told of")
        if (name == "job.binpb" or is_log_gone) and not has_ended:
            assert (job.state, job.error.reason) == (video_pb2.JOB_STATE_FAILED, "RESUME_FAILED")
        else:
            assert (job.state, job.prompt) == (before.state, before.prompt)
            assert job.end_time == before.end_time
        if has_ended:
            assert [(a.name, a.size_bytes, a.sha256) for a in job.artifacts] == [
                (a.name, a.size_bytes, a.sha256) for a in before.artifacts
            ]
