"""A job is what its files say: whoever reads them has the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.phases import Phase
from h3stream.errors import GenerationError, JobCancelledError, PhaseError
from h3stream.status import STATUS_OF
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.job import Job
from orchestrator.job_files import LOG_NAME
from orchestrator.job_log import SYNC_EVERY, JobLog
from tests.job_logs import read_log

PLAN = video_pb2.Plan(chunks=[video_pb2.ChunkPlan(num_frames_emitted=17)] * 3, clip=types_pb2.ClipSpec(steps=2))


def record(**generation: object) -> records_pb2.JobRecord:
    record = records_pb2.JobRecord(
        job_id="job", tenant="studio", prompt="a fox", plan=PLAN, generation=video_pb2.GenerateRequest(**generation)
    )
    record.create_time.FromSeconds(1000)
    return record


class Clocks:
    now_s, wall_s = 50.0, 1000.0

    def of(self) -> dict[str, object]:
        return {"clock": lambda: self.now_s, "wall_clock": lambda: self.wall_s}


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def new_job(directory: Path, clocks: Clocks, **generation: object) -> Job:
    job = Job(record(**generation), directory, JobLog(directory / LOG_NAME), **clocks.of())
    job.emit(video_pb2.Accepted(plan=PLAN))
    return job


def restored(job: Job, clocks: Clocks, **options: bool) -> Job:
    return Job.restore(job.record, job.directory, **options, **clocks.of())


def fragment(number: int) -> types_pb2.Fragment:
    return types_pb2.Fragment(data=bytes([number]) * 100, chunk_index=number, num_frames=17, fragment_index=number)


def make(job: Job, clocks: Clocks) -> None:
    """As much as a session would until its second fragment."""
    job.enter(Phase.PREFILL)
    job.enter(Phase.DENOISE, 0)
    job.step(1)
    job.warn("PREVIEW_UNAVAILABLE", "there will be no stills")
    job.enter(Phase.DECODE, 0)
    job.emit(types_pb2.InitSegment(data=b"init"))
    for number in range(2):
        clocks.now_s += 1
        clocks.wall_s += 1
        job.emit(fragment(number))
    job.emit(types_pb2.InitSegment(data=b"refined init"), is_refined=True)


def test_a_restored_job_knows_what_the_job_knew(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks, priority=video_pb2.JOB_PRIORITY_HIGH, deadline_s=60)
    make(job, clocks)
    again = restored(job, clocks)
    assert again.timeline.summary() == job.timeline.summary()
    assert [e.elapsed_s for e in read_log(again.log)] == [0, 0, 0, 0, 0, 0, 0, 1, 2, 2]
    for name in ("warnings", "num_frames_emitted", "last_phase", "elapsed_s", "priority", "deadline_s", "tenant"):
        assert getattr(again, name) == getattr(job, name), name
    for rendition in ("stream", "refined"):
        for name in ("num_media", "num_fragments", "num_frames", "num_bytes", "first_fragment_s"):
            assert getattr(getattr(again, rendition), name) == getattr(getattr(job, rendition), name), name
    assert (again.stream.num_media, again.stream.num_bytes, again.stream.first_fragment_s) == (3, 204, 1)
    assert (again.refined.num_media, again.refined.num_fragments, again.refined.first_fragment_s) == (1, 0, None)
    assert again.phase is Phase.QUEUED
    assert again.last_phase == video_pb2.PhaseChange(phase=types_pb2.PHASE_DECODE, chunk_index=0)
    assert [again.has_told(kind) for kind in ("fragment", "stream_complete")] == [True, False]


def test_media_are_compared_with_what_was_told(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks)
    make(job, clocks)
    for known in (job.stream, restored(job, clocks).stream):
        assert known.matches(0, types_pb2.InitSegment(data=b"init"))
        assert known.matches(2, fragment(1))
        changed = fragment(1)
        changed.start_ticks = 1
        assert not known.matches(2, changed)
        assert not known.matches(0, types_pb2.InitSegment(data=b"Init"))
        assert not known.matches(1, types_pb2.InitSegment(data=fragment(0).data))


def test_a_warning_is_told_once_and_a_resumption_each_time(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks)
    job.warn("A", "a")
    again = restored(job, clocks)
    again.warn("A", "a")
    again.warn("A", "b")
    again.resume("the dit worker was lost")
    again.resume("the dit worker was lost")
    assert [(w.reason, w.message) for w in again.warnings] == [
        ("A", "a"), ("A", "b"), *[("RESUMED", "the dit worker was lost")] * 2
    ]  # fmt: skip
    assert restored(again, clocks).num_resumes == 2


def test_time_goes_on_while_there_is_no_server_and_never_back(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks)
    make(job, clocks)
    clocks.now_s, clocks.wall_s = 7.0, clocks.wall_s + 30
    assert restored(job, clocks).elapsed_s == 32
    clocks.wall_s = 10.0
    again = restored(job, clocks)
    assert again.elapsed_s == 2
    clocks.now_s += 1
    again.announce()
    assert read_log(again.log)[-1].elapsed_s == 3


def test_a_resumption_is_in_vain_until_something_is_new(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks)
    make(job, clocks)
    for _ in range(3):
        job = restored(job, clocks)
        job.resume("the server was lost")
        job.enter(Phase.PREFILL)
        job.enter(Phase.DENOISE, 0)
    assert (job.num_resumes, job.num_vain_resumes) == (3, 3)
    job.enter(Phase.COMMIT, 0)
    job.enter(Phase.DENOISE, 1)
    assert restored(job, clocks).num_vain_resumes == job.num_vain_resumes == 0
    job.suspend()
    job = restored(job, clocks)
    assert job.was_suspended
    job.resume("the server was stopped")
    assert (job.num_resumes, job.num_vain_resumes, job.was_suspended) == (4, 0, False)
    job.resume("the vae worker was lost")
    assert restored(job, clocks).num_vain_resumes == 1


def test_after_a_loss_of_power_the_numbers_that_may_have_been_told_are_left_out(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks)
    make(job, clocks)
    num_events = len(job.log)
    again = restored(job, clocks, has_lost_power=True)
    assert len(again.log) == num_events + SYNC_EVERY
    assert all(event.progress.is_heartbeat for event in read_log(again.log)[num_events:])
    again.emit(video_pb2.Completed())
    assert len(restored(again, clocks, has_lost_power=True).log) == len(again.log), "a job that is done says no more"


def test_what_must_not_be_lost_is_on_the_disk_before_it_is_told(
    tmp_path: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(tmp_path, clocks)
    synced = []
    monkeypatch.setattr("os.fdatasync", lambda fd: synced.append(len(job.log)))
    make(job, clocks)
    names = [event.WhichOneof("payload") for event in read_log(job.log)]
    assert [names[place] for place in synced] == [
        "warning",
        "init_segment",
        "fragment",
        "fragment",
        "refined_init_segment",
    ]


def every_error() -> list[GenerationError]:
    return [cls("what happened", job_id="job", phase="denoise", chunk_index=1) for cls in STATUS_OF]


@pytest.mark.parametrize("error", [None, *every_error()], ids=lambda error: type(error).__name__)
def test_an_ended_job_is_made_of_its_end(tmp_path: Path, clocks: Clocks, error: GenerationError | None) -> None:
    job = new_job(tmp_path, clocks)
    make(job, clocks)
    job.enter(Phase.COMMIT, 0)
    job.enter(Phase.DENOISE, 1)
    job.keep(types_pb2.Artifact(name="final.mp4", size_bytes=3))
    end = job.end(error)
    job.tell_end()
    again = Job.of_end(job.record, tmp_path, records_pb2.JobEnd.FromString(end.SerializeToString()))
    assert again.to_proto() == job.to_proto() == end.job
    assert again.ended.is_set()
    assert type(again.error) is type(error)
    if error is not None:
        assert again.error is not None
        for name in ("message", "reason", "job_id", "phase", "chunk_index"):
            assert getattr(again.error, name) == getattr(error, name), name
        cancelled = isinstance(error, JobCancelledError)
        assert (again.state == video_pb2.JOB_STATE_CANCELLED) is cancelled


def test_an_error_of_another_version_keeps_its_name(tmp_path: Path, clocks: Clocks) -> None:
    job = new_job(tmp_path, clocks)
    end = job.end(PhaseError("what happened"))
    end.failure.reason = "NEW_REASON"
    again = Job.of_end(job.record, tmp_path, end)
    assert isinstance(again.error, PhaseError)
    assert again.error.reason == "NEW_REASON"
