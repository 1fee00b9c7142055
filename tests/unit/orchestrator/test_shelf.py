from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from h3stream.errors import GenerationError, JobCancelledError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job import Job
from orchestrator.shelf import Limits, Shelf
from tests.service.conftest import CLIP

START_S = 1_700_000_000.0


class Clock:
    """A wall clock that stands still until it is set."""

    now_s = START_S

    def __call__(self) -> float:
        return self.now_s


class Shelves:
    """A shelf and the jobs that were put on it."""

    def __init__(self, data: Path, **limits: Any) -> None:
        self.data, self.clock = data, Clock()
        self.forgotten: list[str] = []
        (data / "jobs").mkdir(exist_ok=True)
        self.shelf = Shelf(data, Limits(**{"num_jobs": 9, **limits}), self.clock, self.forgotten.append)

    def end(self, name: str, **sizes: int) -> Job:
        """A job that ends now with artifacts of these sizes, a second after the one before it."""
        self.clock.now_s += 1
        directory = self.data / "jobs" / name
        directory.mkdir()
        job = Job(name, "a fox", CLIP, video_pb2.Plan(), directory)
        for artifact, size in sizes.items():
            (directory / artifact).write_bytes(bytes(size))
            job.artifacts.append(types_pb2.Artifact(name=artifact, size_bytes=size))
        job.end(None)
        self.shelf.add(job)
        self.shelf.tidy()
        return job

    def left(self) -> list[str]:
        return sorted(path.relative_to(self.data / "jobs").as_posix() for path in (self.data / "jobs").glob("*/*"))

    def record(self) -> list[dict[str, Any]]:
        path = self.data / "removed.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_oldest_job_goes_with_all_it_has(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_jobs=2)
    for name in "abc":
        made.end(name, clip=10)
    assert made.left() == ["b/clip", "b/events.log", "c/clip", "c/events.log"]
    assert made.forgotten == ["a"]
    (line,) = made.record()
    assert line == {
        "time": "2023-11-14T22:13:23.000+00:00",
        "job_id": "a",
        "artifacts": [{"name": "clip", "size_bytes": 10}],
        "reason": "more than 2 jobs have finished (kept_jobs)",
    }


def test_artifacts_go_once_they_are_too_old_and_the_job_tells(tmp_path: Path) -> None:
    made = Shelves(tmp_path, age_s=60)
    job, younger = made.end("a", clip=10, sound=5), made.end("b", clip=10)
    made.clock.now_s += 59
    made.shelf.tidy()
    assert made.left() == ["a/clip", "a/events.log", "a/sound", "b/clip", "b/events.log"], "exactly as old as allowed"
    made.clock.now_s += 0.5
    made.shelf.tidy()
    made.shelf.tidy()
    assert made.left() == ["a/events.log", "b/clip", "b/events.log"]
    assert made.forgotten == []
    told = job.to_proto()
    assert list(told.artifacts) == []
    assert [(gone.name, gone.message) for gone in told.removed_artifacts] == [
        (name, "its job ended more than 60 s ago (kept_age_s)") for name in ("clip", "sound")
    ]
    assert told.removed_artifacts[0].remove_time.ToNanoseconds() == int(made.clock.now_s * 1e9)
    assert [artifact.name for artifact in younger.to_proto().artifacts] == ["clip"]
    assert [(line["job_id"], len(line["artifacts"])) for line in made.record()] == [("a", 2)], "once"


def test_the_oldest_artifacts_go_until_the_rest_fits(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    for name, size in (("a", 40), ("b", 40), ("c", 20)):
        made.end(name, clip=size)
    assert made.record() == [], "exactly as much as allowed"
    made.end("d", clip=41)
    assert made.left() == ["a/events.log", "b/events.log", "c/clip", "c/events.log", "d/clip", "d/events.log"]
    assert [line["reason"] for line in made.record()] == ["artifacts took more than 100 bytes (kept_bytes)"] * 2


def test_the_newest_job_keeps_what_it_made_whatever_it_weighs(tmp_path: Path) -> None:
    made = Shelves(tmp_path, num_bytes=100)
    made.end("a", clip=10)
    made.end("b", clip=500)
    assert made.left() == ["a/events.log", "b/clip", "b/events.log"]
    made.end("c")
    assert "b/clip" in made.left(), "a job that made nothing takes nothing away"
    made.end("d", clip=1)
    assert made.left() == ["a/events.log", "b/events.log", "c/events.log", "d/clip", "d/events.log"]


def test_without_limits_nothing_goes(tmp_path: Path) -> None:
    made = Shelves(tmp_path)
    made.end("a", clip=1000)
    made.end("b")
    made.clock.now_s += 1e9
    made.shelf.tidy()
    assert made.left() == ["a/clip", "a/events.log", "b/events.log"]


@pytest.mark.parametrize("limits", [{"num_bytes": 15}, {"age_s": 1000.0}, {"num_jobs": 2}])
def test_what_an_earlier_run_left_counts(tmp_path: Path, limits: dict[str, Any]) -> None:
    for age, name in enumerate(("newer", "older")):
        directory = tmp_path / "jobs" / name
        directory.mkdir(parents=True)
        (directory / "clip").write_bytes(bytes(10))
        (directory / "events.log").write_bytes(bytes(10))
        os.utime(directory, (START_S - 998 - 2 * age,) * 2)
    made = Shelves(tmp_path, **limits)
    made.shelf.adopt()
    made.end("a", clip=5)
    assert "newer/clip" in made.left()
    assert "older/clip" not in made.left()
    assert [line["job_id"] for line in made.record()] == ["older"]


def test_what_an_earlier_run_had_in_the_making_goes_and_changes_no_age(tmp_path: Path) -> None:
    directory = tmp_path / "jobs" / "old"
    directory.mkdir(parents=True)
    for name in ("clip", "events.log", ".final.mp4.pcm", ".frames.mkv.part"):
        (directory / name).write_bytes(bytes(10))
    os.utime(directory, (START_S - 60,) * 2)
    made = Shelves(tmp_path, age_s=50)
    made.shelf.adopt()
    assert made.left() == ["old/clip", "old/events.log"]
    made.shelf.tidy()
    assert made.left() == ["old/events.log"], "as old as it was"


def test_a_record_that_cannot_be_written_stops_no_removal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "removed.jsonl").symlink_to("/dev/full")
    made = Shelves(tmp_path, num_bytes=1)
    made.end("a", clip=10)
    made.end("b", clip=10)
    assert "a/clip" not in made.left()
    assert "removed a, which cannot be recorded (No space left on device)" in caplog.text


@pytest.mark.parametrize("error", [None, JobCancelledError("no")])
def test_a_job_that_ends_keeps_its_log_and_what_it_lists_and_nothing_else(
    tmp_path: Path, error: GenerationError | None
) -> None:
    made = Shelves(tmp_path)
    directory = tmp_path / "jobs" / "a"
    directory.mkdir()
    job = Job("a", "a fox", CLIP, video_pb2.Plan(), directory)
    for name in ("final.mp4", ".source.mp4", ".audio.f32", "refined.flac"):
        (directory / name).write_bytes(b"x")
    job.keep(types_pb2.Artifact(name="final.mp4", size_bytes=1, sha256="old"))
    job.keep(types_pb2.Artifact(name="final.mp4", size_bytes=1))
    assert [(artifact.sha256, artifact.relative_path) for artifact in job.artifacts] == [("", "jobs/a/final.mp4")]
    assert list(job.to_proto().artifacts) == [], "not before it has ended"
    job.end(error)
    made.shelf.add(job)
    assert made.left() == ["a/events.log", "a/final.mp4"]
    assert [artifact.name for artifact in job.to_proto().artifacts] == ["final.mp4"]
