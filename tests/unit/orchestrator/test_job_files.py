from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from h3stream.errors import PhaseError, ResumeError
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.job_files import (
    move_into_place,
    read_job_end,
    read_job_record,
    remove_job,
    request_digest,
    sweep,
    write_job_end,
    write_job_record,
)
from tests.job_records import end_of, record_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "jobs" / "a"
    made.mkdir(parents=True)
    return made


def test_records_come_back_as_they_were_written(directory: Path) -> None:
    record = record_of("a", key="k")
    write_job_record(directory, record)
    assert read_job_record(directory) == record
    assert read_job_end(directory) is None, "it has not ended"
    for state in (video_pb2.JOB_STATE_FAILED, video_pb2.JOB_STATE_SUCCEEDED):
        write_job_end(directory, end_of(record, state, artifacts={"final.mp4": 5}))
        assert read_job_end(directory) == end_of(record, state, artifacts={"final.mp4": 5})
    assert sorted(path.name for path in directory.iterdir()) == ["end.binpb", "job.binpb"]


def test_what_is_in_the_file_is_a_message_still(directory: Path) -> None:
    record = record_of("a")
    write_job_record(directory, record)
    read = records_pb2.JobRecord.FromString((directory / "job.binpb").read_bytes())
    read.DiscardUnknownFields()
    assert read == record


@pytest.mark.parametrize("name", ["job.binpb", "end.binpb"])
def test_no_damage_to_a_record_goes_unnoticed(directory: Path, name: str) -> None:
    record = record_of("a")
    write_job_record(directory, record)
    write_job_end(directory, end_of(record))
    path = directory / name
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [_flipped(whole, bit) for bit in range(0, 8 * len(whole), 7)]
    damaged += [whole + b"\0", whole + whole, bytes(len(whole))]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ResumeError, match=rf"{name} of job a is damaged"):
            _ = read_job_record(directory) if name == "job.binpb" else read_job_end(directory)


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_records_of_another_job_or_that_cannot_be_read_are_refused(directory: Path) -> None:
    with pytest.raises(ResumeError, match=r"job.binpb of job a is not there"):
        read_job_record(directory)
    write_job_record(directory, record_of("b"))
    write_job_end(directory, end_of(record_of("b")))
    with pytest.raises(ResumeError, match="is that of job 'b'"):
        read_job_record(directory)
    with pytest.raises(ResumeError, match="is that of job 'b'"):
        read_job_end(directory)
    (directory / "end.binpb").unlink()
    (directory / "end.binpb").mkdir()
    with pytest.raises(ResumeError, match=r"end.binpb of job a cannot be read: Is a directory"):
        read_job_end(directory)


def test_a_full_disk_leaves_what_was_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of("a")
    write_job_end(directory, end_of(record, artifacts={"final.mp4": 5}))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PhaseError, match=r"end.binpb of the job cannot be written: No space left on device"):
        write_job_end(directory, end_of(record))
    with pytest.raises(PhaseError, match=r"job.binpb of the job cannot be written: No space left on device"):
        write_job_record(directory, record)
    assert read_job_end(directory) == end_of(record, artifacts={"final.mp4": 5})
    assert [path.name for path in directory.iterdir()] == ["end.binpb"]


def test_requests_are_the_same_whatever_they_are_named() -> None:
    digest = request_digest(record_of("a"))
    assert len(digest) == 64
    assert request_digest(record_of("b", key="k", tenant="ann")) == digest
    assert request_digest(record_of("a", prompt="a bear")) != digest
    keyed = record_of("a", key="k")
    request_digest(keyed)
    assert keyed == record_of("a", key="k"), "the record is left as it is"


def test_requests_to_refine_differ_by_what_was_uploaded() -> None:
    def digest(latents_sha256: str, job_id: str = "") -> str:
        source = records_pb2.RefineSourceRecord(job_id=job_id, latents_sha256=latents_sha256)
        header = video_pb2.RefineHeader(job_id=job_id) if job_id else video_pb2.RefineHeader()
        return request_digest(records_pb2.JobRecord(refinement=header, source=source))

    assert digest("one") == digest("one")
    assert digest("one") != digest("two")
    assert digest("one", "source") == digest("two", "source"), "a job's latents are found by its name"


def test_a_directory_has_its_name_once_it_is_whole_and_none_once_it_goes(directory: Path, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "events.log").write_bytes(b"events")
    placed = directory.with_name("b")
    move_into_place(prepared, placed)
    assert not prepared.exists()
    with (placed / "events.log").open("rb") as reader:
        remove_job(placed)
        assert reader.read() == b"events", "who reads goes on reading"
    assert not placed.exists()
    remove_job(placed)  # somebody has removed it
    assert list(directory.parent.iterdir()) == [directory]


def test_a_sweep_leaves_records_events_and_what_is_listed(directory: Path) -> None:
    for name in ("job.binpb", "end.binpb", "events.log", "final.mp4", "frames.mkv", ".final.mp4.pcm"):
        (directory / name).write_bytes(b"x")
    (directory / ".chunks").mkdir()
    (directory / ".chunks" / "0000.latents").write_bytes(b"x")
    (directory / ".link").symlink_to(directory.parent)
    sweep(directory, video_pb2.Job(artifacts=[types_pb2.Artifact(name="final.mp4")]))
    assert {path.name for path in directory.iterdir()} == {"job.binpb", "end.binpb", "events.log", "final.mp4"}
    assert directory.parent.is_dir()
