from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from h3stream.errors import StartupError
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator import stock
from orchestrator.job_files import read_job_record, write_job_end
from orchestrator.journal import JobRow, Journal
from orchestrator.stock import enter_end, load_job, remove, row_of, take_stock
from tests.job_records import CREATED_S, end_of, make_directory, record_of

RUN = video_pb2.PhaseChange(phase=types_pb2.PHASE_DENOISE, chunk_index=1)
FINAL = types_pb2.Artifact(name="final.mp4", size_bytes=5)
COMPLETED = video_pb2.Completed(artifacts=[FINAL])


class Found:
    """A data directory as a server finds it."""

    def __init__(self, data: Path) -> None:
        self.jobs = data / "jobs"
        self.journal = Journal(data / "journal.db")

    def job(self, record: records_pb2.JobRecord, *payloads: object) -> Path:
        """A job with its row and its directory."""
        self.journal.add(row_of(record))
        return make_directory(self.jobs, record, *payloads)

    def take(self) -> dict[str, JobRow]:
        take_stock(self.journal, self.jobs)
        return {row.job_id: row for row in self.journal.rows()}

    def load(self, job_id: str) -> tuple[records_pb2.JobRecord, records_pb2.JobEnd | None]:
        row = self.journal.row(job_id)
        assert row is not None
        return load_job(self.jobs / job_id, row)

    def job_of(self, job_id: str) -> video_pb2.Job:
        _, end = self.load(job_id)
        assert end is not None
        return end.job


@pytest.fixture
def found(tmp_path: Path) -> Found:
    return Found(tmp_path)


def write_final(directory: Path) -> None:
    (directory / "final.mp4").write_bytes(b"video")


def test_a_directory_that_is_odd_is_left_alone_and_keeps_no_other_job_from_going_on(found: Found) -> None:
    found.job(record_of("good"))
    odd = found.job(record_of("odd"), RUN, COMPLETED)
    (odd / "end.binpb").mkdir()
    for _ in range(2):
        assert set(found.take()) == {"good"}
    assert odd.is_dir()


def test_the_row_of_a_job_says_what_it_was_taken_as() -> None:
    record = record_of("a", tenant="ann", key="k")
    record.generation.priority = video_pb2.JOB_PRIORITY_HIGH
    row = row_of(record)
    assert (row.job_id, row.tenant, row.state, row.priority, row.idempotency_key) == ("a", "ann", "queued", 3, "k")
    assert (row.num_frames, row.created_s) == (39, CREATED_S)
    assert row_of(record_of("b")).priority == video_pb2.JOB_PRIORITY_NORMAL


def test_nothing_is_found_where_nothing_was(found: Found) -> None:
    assert found.take() == {}
    assert found.jobs.is_dir()


def test_jobs_that_agree_with_their_rows_are_left_as_they_are(found: Found) -> None:
    waiting = found.job(record_of("waiting"))
    found.job(record_of("running"), RUN)
    found.journal.set_running("running", 0)
    record = record_of("ended")
    enter_end(found.journal, found.job(record), end_of(record))
    before = list(found.journal.rows())
    assert list(found.take().values()) == before
    assert found.load("waiting") == (record_of("waiting"), None)
    assert {path.name for path in waiting.iterdir()} == {"job.binpb", "events.log"}


def test_a_lost_journal_is_made_anew_from_the_directories(found: Found, tmp_path: Path) -> None:
    for number, name in enumerate(("c", "a", "b")):
        record = record_of(name, tenant="ann", key=f"k{number}")
        record.create_time.seconds += number
        found.job(record, *([RUN, video_pb2.Warning(reason="RESUMED")] if name == "b" else []))
    found.journal.set_running("b", 1)
    record = read_job_record(found.jobs / "a")
    enter_end(
        found.journal, found.jobs / "a", end_of(record, video_pb2.JOB_STATE_CANCELLED, artifacts={"final.mp4": 5})
    )
    rows = list(found.journal.rows())
    found.journal.close()
    (tmp_path / "journal.db").unlink()
    anew = Found(tmp_path)
    assert list(anew.take().values()) == rows
    assert [row.job_id for row in anew.journal.live()] == ["b", "c"]


def test_jobs_found_without_rows_have_ended_in_the_order_in_which_they_did(found: Found) -> None:
    for name, ended_s in (("a", 30), ("b", 10), ("c", 20)):
        directory = make_directory(found.jobs, record_of(name))
        write_job_end(directory, end_of(record_of(name), ended_s=CREATED_S + ended_s))
    found.take()
    oldest = []
    while (row := found.journal.oldest_ended(found.journal.num_ended)) is not None:
        oldest.append(row.job_id)
        remove(found.journal, found.jobs / row.job_id)
    assert oldest == ["b", "c", "a"]
    assert not list(found.jobs.glob("[!.]*"))


def test_a_row_without_a_directory_is_forgotten(found: Found) -> None:
    shutil.rmtree(found.job(record_of("a")))
    found.job(record_of("b"))
    assert set(found.take()) == {"b"}


def test_what_was_being_made_or_removed_goes(found: Found) -> None:
    make_directory(found.jobs / ".incoming", record_of("a"))
    make_directory(found.jobs, record_of(".b.removed"))
    assert found.take() == {}
    assert list(found.jobs.iterdir()) == []


def test_a_key_that_is_taken_stays_where_it_is(found: Found) -> None:
    found.job(record_of("a", key="k"))
    make_directory(found.jobs, record_of("copy", key="k"))
    rows = found.take()
    assert [(name, row.idempotency_key) for name, row in rows.items()] == [("a", "k"), ("copy", "")]


def test_what_is_no_job_is_left_alone(found: Found, caplog: pytest.LogCaptureFixture) -> None:
    (found.jobs / "lost+found").mkdir(parents=True)
    (found.jobs / "notes.txt").touch()
    assert found.take() == {}
    assert {path.name for path in found.jobs.iterdir()} == {"lost+found", "notes.txt"}
    assert "lost+found is no job's directory" in caplog.text


def test_an_end_that_is_written_counts_and_what_the_job_needed_goes(found: Found) -> None:
    record = record_of("a")
    directory = found.job(record, RUN)
    found.journal.set_running("a", 0)
    write_final(directory)
    (directory / ".chunks").mkdir()
    write_job_end(directory, end_of(record, artifacts={"final.mp4": 5}))
    row = found.take()["a"]
    assert (row.state, row.ended_s, row.artifact_bytes) == ("succeeded", CREATED_S + 1, 5)
    assert row.stored_bytes == 5 + (directory / "events.log").stat().st_size
    assert not (directory / ".chunks").exists()


def test_a_job_that_had_completed_has_succeeded(found: Found) -> None:
    directory = found.job(record_of("a", tenant="ann"), RUN, types_pb2.Fragment(num_frames=22), COMPLETED)
    write_final(directory)
    os.utime(directory / "events.log", (CREATED_S + 9,) * 2)
    assert found.take()["a"].state == "succeeded"
    job = found.job_of("a")
    assert (job.state, job.num_events, job.num_frames_emitted) == (video_pb2.JOB_STATE_SUCCEEDED, 4, 22)
    assert (job.tenant, job.prompt, job.create_time.seconds) == ("ann", "a fox", CREATED_S)
    assert job.end_time.seconds == CREATED_S + 9
    assert list(job.artifacts) == [FINAL]


def test_a_job_that_had_completed_lists_no_file_that_is_not_as_it_was(found: Found) -> None:
    directory = found.job(record_of("a"), COMPLETED)
    (directory / "final.mp4").write_bytes(b"vid")
    found.take()
    job = found.job_of("a")
    assert job.state == video_pb2.JOB_STATE_SUCCEEDED
    assert list(job.artifacts) == []
    assert [(gone.name, gone.message) for gone in job.removed_artifacts] == [
        ("final.mp4", "it was not found as the job had left it")
    ]


def test_a_waiting_row_of_a_job_that_has_run_says_so(found: Found) -> None:
    found.job(record_of("a"))
    found.job(record_of("b"), RUN, video_pb2.Warning(reason="RESUMED", message="x"), RUN)
    rows = found.take()
    assert (rows["b"].state, rows["b"].num_resumes) == ("running", 1)
    assert [row.job_id for row in found.journal.live()] == ["b", "a"]


@pytest.mark.parametrize("content", [b"", b"no record"])
def test_a_job_whose_record_is_damaged_fails_and_can_be_asked_for(found: Found, content: bytes) -> None:
    directory = found.job(record_of("a", tenant="ann"), RUN)
    write_final(directory)
    (directory / "job.binpb").write_bytes(content)
    assert found.take()["a"].state == "failed"
    record, end = found.load("a")
    assert end is not None
    message = "the job cannot be taken up again: job.binpb of job a is damaged"
    assert (end.failure.reason, end.failure.message, end.failure.phase) == ("RESUME_FAILED", message, "denoise")
    assert (end.job.error.reason, end.job.error.phase, end.job.error.chunk_index) == (
        "RESUME_FAILED", types_pb2.PHASE_DENOISE, 1
    )  # fmt: skip
    assert (record.tenant, record.plan, end.job.tenant) == ("ann", record_of("a").plan, "ann")
    assert [artifact.name for artifact in end.job.artifacts] == ["final.mp4"], "what has its name is whole"


def test_a_damaged_record_without_a_row_is_nobodys_unless_the_end_tells_whose_it_is(found: Found) -> None:
    for name in ("live", "ended"):
        record = record_of(name, tenant="ann")
        directory = make_directory(found.jobs, record)
        (directory / "job.binpb").write_bytes(b"no record")
        if name == "ended":
            write_job_end(directory, end_of(record))
    rows = found.take()
    assert {name: (row.tenant, row.state) for name, row in rows.items()} == {
        "live": ("", "failed"),
        "ended": ("ann", "succeeded"),
    }
    assert found.load("ended")[0].prompt == "a fox"


@pytest.mark.parametrize("state", [video_pb2.JOB_STATE_SUCCEEDED, video_pb2.JOB_STATE_CANCELLED])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_end_that_is_damaged_is_made_anew_as_the_journal_has_it(
    found: Found, state: video_pb2.JobState, damage: str
) -> None:
    record = record_of("a")
    directory = found.job(record, RUN)
    write_final(directory)
    enter_end(found.journal, directory, end_of(record, state, artifacts={"final.mp4": 5}))
    row = found.take()["a"]
    if damage == "cut":
        os.truncate(directory / "end.binpb", 3)
    else:
        (directory / "end.binpb").unlink()
    assert found.take()["a"] == row
    job = found.job_of("a")
    assert job.state == state
    assert job.end_time.seconds == CREATED_S + 1
    assert [(artifact.name, artifact.size_bytes, len(artifact.sha256)) for artifact in job.artifacts] == [
        ("final.mp4", 5, 64)
    ]
    assert found.job_of("a") == job, "from then on it is written"


def test_an_end_that_is_damaged_before_it_was_entered_is_a_failure(found: Found) -> None:
    directory = found.job(record_of("a"), RUN)
    (directory / "end.binpb").write_bytes(b"no record")
    assert found.take()["a"].state == "failed"
    assert "end.binpb of job a is damaged" in found.job_of("a").error.message


def test_jobs_of_servers_that_kept_no_records_have_ended(found: Found) -> None:
    for name, payload in (("done", COMPLETED), ("cut", RUN)):
        directory = make_directory(found.jobs, record_of(name), payload)
        (directory / "job.binpb").unlink()
        write_final(directory)
        (directory / "provenance.json").write_text(json.dumps({"prompt": "a bear"}))
        (directory / ".audio.f32").touch()
        os.utime(directory / "events.log", (CREATED_S - 5,) * 2)
    rows = found.take()
    assert {name: dataclasses.astuple(row)[1:9] for name, row in rows.items()} == {
        name: ("default", state, 2, "", rows[name].request_digest, 39, CREATED_S - 5, CREATED_S - 5)
        for name, state in (("done", "succeeded"), ("cut", "failed"))
    }
    done, cut = found.job_of("done"), found.job_of("cut")
    assert [artifact.name for artifact in done.artifacts] == ["final.mp4"]
    assert (done.prompt, done.plan) == ("a bear", record_of("done").plan)
    assert cut.error.reason == "INTERRUPTED"
    assert {artifact.name for artifact in cut.artifacts} == {"final.mp4", "provenance.json"}
    assert not list(found.jobs.glob("*/.audio.f32"))
    assert found.load("cut")[0].prompt == "a bear"


@pytest.mark.parametrize("content", ["no json", "[]", '{"prompt": 5}', "{}"])
def test_a_provenance_that_tells_no_prompt_is_no_trouble(found: Found, content: str) -> None:
    directory = make_directory(found.jobs, record_of("a"), COMPLETED)
    (directory / "job.binpb").unlink()
    (directory / "provenance.json").write_text(content)
    found.take()
    assert found.load("a")[0].prompt == ""


@pytest.mark.parametrize("log", [None, b"", b"no events"])
def test_a_job_whose_log_is_lost_goes_on(found: Found, log: bytes | None) -> None:
    directory = found.job(record_of("a"))
    (directory / "events.log").unlink()
    if log is not None:
        (directory / "events.log").write_bytes(log)
    assert found.take()["a"].state == "queued"


def test_a_disk_that_takes_nothing_ends_the_start(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    found.job(record_of("a"), COMPLETED)

    def full(directory: Path, end: records_pb2.JobEnd) -> None:
        raise stock.PhaseError("end.binpb of the job cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stock, "write_job_end", full)
        with pytest.raises(StartupError, match=r"cannot be taken up: end.binpb .* No space left on device"):
            found.take()
    assert found.take()["a"].state == "succeeded"


def test_a_removal_that_fails_leaves_the_job(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = found.job(record_of("a"))

    def refuse(directory: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(stock, "remove_job", refuse)
    with pytest.raises(stock.PhaseError, match="job a cannot be removed: Input/output error"):
        remove(found.journal, directory)
    assert found.journal.row("a") is not None


def test_an_end_that_does_not_fit_is_written_once_what_the_job_needed_is_gone(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of("a")
    directory = found.job(record)
    (directory / ".chunks").mkdir()
    write = write_job_end

    def write_where_there_is_room(directory: Path, end: records_pb2.JobEnd) -> None:
        if (directory / ".chunks").exists():
            raise stock.PhaseError("end.binpb of the job cannot be written: No space left on device")
        write(directory, end)

    monkeypatch.setattr(stock, "write_job_end", write_where_there_is_room)
    enter_end(found.journal, directory, end_of(record))
    assert found.take()["a"].state == "succeeded"
