from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h3stream.v1 import video_pb2
from orchestrator import shelf as shelves
from orchestrator import stock
from orchestrator.job_files import read_job_end, write_job_end
from orchestrator.journal import Journal
from orchestrator.shelf import Limits, Shelf
from orchestrator.stock import enter_end, load_job, row_of
from tests.job_records import end_of, make_directory, record_of

START_S = 1_700_000_000.0
RECORDS = {"job.binpb", "end.binpb", "events.log"}


class Clock:
    """A wall clock that stands still until it is set."""

    now_s = START_S

    def __call__(self) -> float:
        return self.now_s


class Shelves:
    """A shelf and the jobs that were put on it."""

    def __init__(self, data: Path, **limits: Any) -> None:
        self.jobs, self.clock = data / "jobs", Clock()
        self.removed = data / "removed.jsonl"
        self.journal = Journal(data / "journal.db")
        self.limits = Limits(**{"num_jobs": 9, **limits})
        self.shelf = Shelf(data, self.journal, self.limits, self.clock)

    def end(self, name: str, *, tenant: str = "default", **sizes: int) -> None:
        """A job that ends now with artifacts of these sizes, a second after the one before it."""
        self.clock.now_s += 1
        record = record_of(name)
        record.tenant = tenant
        directory = make_directory(self.jobs, record)
        self.journal.add(row_of(record))
        for artifact, size in sizes.items():
            (directory / artifact).write_bytes(bytes(size))
        enter_end(self.journal, directory, end_of(record, ended_s=self.clock.now_s, artifacts=sizes))
        self.shelf.tidy()

    def left(self) -> dict[str, set[str]]:
        """What there is of each job beside its records."""
        found = {directory.name: {path.name for path in directory.iterdir()} for directory in self.jobs.glob("[!.]*")}
        assert all(names >= RECORDS for names in found.values())
        return {job_id: names - RECORDS for job_id, names in found.items()}

    def told(self, name: str) -> video_pb2.Job:
        row = self.journal.row(name)
        assert row is not None
        _, end = load_job(self.jobs / name, row)
        assert end is not None
        return end.job

    def record(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.removed.read_text().splitlines()] if self.removed.exists() else []


def test_the_oldest_job_goes_with_all_it_has(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_jobs=2)
    for name in "abc":
        made.end(name, clip=10)
    assert made.left() == {"b": {"clip"}, "c": {"clip"}}
    assert [row.job_id for row in made.journal.rows()] == ["b", "c"]
    (line,) = made.record()
    assert line == {
        "time": "2023-11-14T22:13:23.000+00:00",
        "job_id": "a",
        "artifacts": [{"name": "clip", "size_bytes": 10}],
        "reason": "more than 2 jobs have finished (kept_jobs)",
    }


def test_artifacts_go_once_they_are_too_old_and_the_job_tells(tmp_path: Path) -> None:
    made = Shelves(tmp_path, age_s=60)
    made.end("a", clip=10, sound=5)
    made.end("b", clip=10)
    made.clock.now_s += 59
    made.shelf.tidy()
    assert made.left() == {"a": {"clip", "sound"}, "b": {"clip"}}, "exactly as old as allowed"
    made.clock.now_s += 0.5
    made.shelf.tidy()
    made.shelf.tidy()
    assert made.left() == {"a": set(), "b": {"clip"}}
    told = made.told("a")
    assert list(told.artifacts) == []
    assert [(gone.name, gone.message) for gone in told.removed_artifacts] == [
        (name, "its job ended more than 60 s ago (kept_age_s)") for name in ("clip", "sound")
    ]
    assert told.removed_artifacts[0].remove_time.ToNanoseconds() == int(made.clock.now_s * 1e9)
    assert [artifact.name for artifact in made.told("b").artifacts] == ["clip"]
    assert [(line["job_id"], len(line["artifacts"])) for line in made.record()] == [("a", 2)], "once"


def test_the_oldest_artifacts_go_until_the_rest_fits(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    for name, size in (("a", 40), ("b", 40), ("c", 20)):
        made.end(name, clip=size)
    assert made.record() == [], "exactly as much as allowed"
    made.end("d", clip=41)
    assert made.left() == {"a": set(), "b": set(), "c": {"clip"}, "d": {"clip"}}
    assert [line["reason"] for line in made.record()] == ["artifacts took more than 100 bytes (kept_bytes)"] * 2


def test_the_newest_job_keeps_what_it_made_whatever_it_weighs(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    made.end("a", clip=10)
    made.end("b", clip=500)
    assert made.left() == {"a": set(), "b": {"clip"}}
    made.end("c")
    assert made.left()["b"] == {"clip"}, "a job that made nothing takes nothing away"
    made.end("d", clip=1)
    assert made.left() == {"a": set(), "b": set(), "c": set(), "d": {"clip"}}


def test_who_makes_many_jobs_pushes_out_none_of_those_of_others(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_jobs=4)
    made.end("a", tenant="alice", clip=10)
    for number in range(20):
        made.end(f"b{number}", tenant="bob")
    assert set(made.left()) == {"a", "b17", "b18", "b19"}
    assert made.left()["a"] == {"clip"}
    for number in range(3):
        made.end(f"c{number}", tenant="carol")
    assert set(made.left()) == {"a", "b19", "c1", "c2"}, "of two that had as many, the one with the oldest lost it"


def test_who_makes_much_pushes_out_nothing_of_others(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_jobs=30, num_bytes=100)
    made.end("a", tenant="alice", clip=40)
    for number in range(5):
        made.end(f"b{number}", tenant="bob", clip=30)
    left = made.left()
    assert {name for name in left if left[name]} == {"a", "b3", "b4"}
    for number in range(10):
        made.end(f"c{number}", tenant="carol", clip=1)
    assert {name for name in made.left() if made.left()[name]} == {"a", "b4", *(f"c{number}" for number in range(10))}


def test_of_those_that_have_as_much_the_oldest_goes(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    for name, tenant in (("a", "bob"), ("b", "alice"), ("c", "carol")):
        made.end(name, tenant=tenant, clip=40)
    assert made.left() == {"a": set(), "b": {"clip"}, "c": {"clip"}}


def test_a_newest_clip_that_is_too_large_stays_alone_whosever_the_others_are(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    made.end("a", tenant="alice", clip=40)
    made.end("b", tenant="bob", clip=500)
    assert made.left() == {"a": set(), "b": {"clip"}}
    made.end("c", tenant="alice", clip=10)
    assert made.left() == {"a": set(), "b": set(), "c": {"clip"}}


def test_what_is_too_old_goes_whoever_has_it(tmp_path: Path) -> None:
    made = Shelves(tmp_path, age_s=2.5)
    made.end("a", tenant="alice", clip=1)
    for number in range(3):
        made.end(f"b{number}", tenant="bob", clip=1)
    assert {name for name in made.left() if made.left()[name]} == {"b0", "b1", "b2"}


def test_without_limits_nothing_goes(tmp_path: Path) -> None:
    made = Shelves(tmp_path)
    made.end("a", clip=1000)
    made.end("b")
    made.clock.now_s += 1e9
    made.shelf.tidy()
    assert made.left() == {"a": {"clip"}, "b": set()}


@pytest.mark.parametrize("limits", [{"num_bytes": 15}, {"age_s": 1.5}, {"num_jobs": 2}])
def test_what_an_earlier_run_left_takes_its_turn(tmp_path: Path, limits: dict[str, Any]) -> None:
    earlier = Shelves(tmp_path)
    earlier.end("older", clip=10)
    earlier.end("newer", clip=10)
    earlier.journal.close()
    made = Shelves(tmp_path, **limits)
    made.clock.now_s = earlier.clock.now_s
    made.end("a", clip=5)
    assert made.left()["newer"] == {"clip"}
    assert not made.left().get("older")
    assert [line["job_id"] for line in made.record()] == ["older"]


def test_a_clock_that_is_set_back_makes_no_job_older(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_jobs=2)
    made.end("a")
    made.clock.now_s -= 1e6
    made.end("b")
    made.end("c")
    assert set(made.left()) == {"b", "c"}


def test_sums_are_those_of_what_is_left(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    made.end("a", clip=60)
    log_bytes = (made.jobs / "a" / "events.log").stat().st_size
    assert made.journal.stored_bytes("default") == 60 + log_bytes
    made.end("b", clip=50)
    assert made.journal.stored_bytes("default") == 50 + 2 * log_bytes
    assert made.journal.artifact_bytes == {"default": 50}


def test_a_record_that_cannot_be_written_stops_no_removal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "removed.jsonl").symlink_to("/dev/full")
    made = Shelves(tmp_path, num_bytes=1)
    made.end("a", clip=10)
    made.end("b", clip=10)
    assert made.left()["a"] == set()
    assert "removed a, which cannot be recorded (No space left on device)" in caplog.text


def test_a_disk_that_takes_no_new_end_loses_the_artifacts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Shelves(tmp_path, num_bytes=15)
    made.end("a", clip=10)
    write, failures = write_job_end, [True]

    def write_when_there_is_room(directory: Path, end: Any) -> None:
        if failures and (directory / "clip").exists():
            raise failures.pop() and shelves.PhaseError("end.binpb of the job cannot be written: No space left")
        write(directory, end)

    monkeypatch.setattr(stock, "write_job_end", write_when_there_is_room)
    made.end("b", clip=10)
    assert made.left() == {"a": set(), "b": {"clip"}}
    assert [gone.name for gone in made.told("a").removed_artifacts] == ["clip"]


def test_what_cannot_be_removed_is_left_to_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Shelves(tmp_path, num_jobs=1)
    made.end("a", clip=1)

    def refuse(*_: object) -> None:
        raise shelves.PhaseError("the journal cannot be written: disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(shelves, "remove", refuse)
        made.end("b", clip=1)
        made.shelf.tidy()
    assert set(made.left()) == {"a", "b"}
    assert "what is beyond the limits cannot be removed: the journal cannot be written" in caplog.text
    made.shelf.tidy()
    assert set(made.left()) == {"b"}


def test_artifacts_whose_removal_was_cut_short_go(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=15)
    made.end("a", clip=10)
    end = read_job_end(made.jobs / "a")
    assert end is not None
    del end.job.artifacts[:]
    write_job_end(made.jobs / "a", end)  # and the server was killed
    made.end("b", clip=10)
    assert made.left() == {"a": set(), "b": {"clip"}}
    assert made.journal.artifact_bytes == {"default": 10}
    assert made.record() == [], "the server that was killed had recorded it"
