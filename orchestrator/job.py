"""One job: what it makes, how far it is, and the log its events go to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from core.clock import TICKS_PER_FRAME
from core.phases import MOVES, Phase
from h3stream.codec import clip_spec_from_proto
from h3stream.errors import GenerationError, JobCancelledError, PhaseError, ResumeError, ServerStoppingError
from h3stream.status import STATUS_OF
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.delivered import Delivered
from orchestrator.job_files import LOG_NAME
from orchestrator.job_log import SYNC_EVERY, JobLog
from orchestrator.timeline import Timeline

log = logging.getLogger(__name__)

Payload = (
    video_pb2.Accepted
    | video_pb2.PhaseChange
    | video_pb2.Progress
    | types_pb2.InitSegment
    | types_pb2.Fragment
    | types_pb2.Preview
    | video_pb2.Warning
    | video_pb2.StreamComplete
    | video_pb2.Completed
    | types_pb2.RefineStarted
    | types_pb2.RefineProgress
    | types_pb2.RefinedAudio
    | types_pb2.RefineFailed
)
"""What an event may hold. The session makes the contract's own messages: what is logged is what goes out."""

REFINED = "refined_"
"""What the fields of the refined rendition's media begin with; its messages are those of the stream's media."""
_FIELD_OF = {
    field.message_type.full_name: field.name
    for field in video_pb2.Event.DESCRIPTOR.oneofs_by_name["payload"].fields
    if field.message_type is not None and field.name not in ("refined_init_segment", "refined_fragment")
}
RESUMED, SUSPENDED = "RESUMED", "SUSPENDED"
"""Reasons of the warnings that a job is taken up again, and that its server stops."""
STOPPING = "the server is stopping; the job goes on when it is back"
NOT_SYNCED = ("phase", "progress", "preview")
"""Events that need not be on the disk before they are told: what is lost of them with the power is made again."""
_ERROR_OF = {cls.reason: cls for cls in STATUS_OF}
PHASE_TO_PROTO: dict[Phase, types_pb2.Phase] = {
    phase: cast(types_pb2.Phase, types_pb2.Phase.Value(f"PHASE_{phase.name}")) for phase in Phase
}


@dataclass(frozen=True)
class RefineSource:
    """The clip that a job refines; its files lie in the job's own directory, as `orchestrator/source.py` put them."""

    job_id: str
    """The job that made it; empty for uploaded latents."""
    latents_sha256: str
    """Of the file of its latents, lower-case hexadecimal."""
    has_video: bool
    """Whether there is an MP4 of its pictures."""


class Job:
    """State of one job. Only the scheduler moves it.

    All of it is in the files of its directory: a job that another process has left is made of them again.
    """

    def __init__(
        self,
        record: records_pb2.JobRecord,
        directory: Path,
        log: JobLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """record: the job as it was taken.  directory: exists and is the job's own.  log: of it, empty."""
        self.record = record
        self.job_id = record.job_id
        self.tenant = record.tenant
        self.prompt = record.prompt
        self.plan = record.plan
        self.clip = clip_spec_from_proto(record.plan.clip)
        self.noise = tuple(record.noise)
        """Seeds of its noise; empty: the clip's own."""
        self.request: video_pb2.GenerateRequest | video_pb2.RefineHeader | None = None
        """The request as it came, for the record."""
        if kind := record.WhichOneof("request"):
            self.request = getattr(record, kind)
        self.deadline_s: float | None = None
        """Seconds from its acceptance within which it must have ended; None: none."""
        if self.request is not None and self.request.HasField("deadline_s"):
            self.deadline_s = self.request.deadline_s
        self.source: RefineSource | None = None
        """What it refines; None: it makes a clip."""
        if record.HasField("source"):
            told = record.source
            self.source = RefineSource(told.job_id, told.latents_sha256, told.has_video)
        self.directory = directory
        self.log = log
        self.state = video_pb2.JOB_STATE_QUEUED
        self.error: GenerationError | None = None
        self.created_s = record.create_time.ToNanoseconds() / 1e9
        self.ended_s: float | None = None
        self.timeline = Timeline()
        self.warnings: list[video_pb2.Warning] = []
        self.artifacts: list[types_pb2.Artifact] = []
        """Files that are whole, whatever becomes of the job."""
        self.removed_artifacts: list[video_pb2.RemovedArtifact] = []
        self.stream, self.refined = Delivered(log.event), Delivered(log.event)
        """What has been told of the clip's media, and of its refined rendition's."""
        self.num_frames_emitted = 0
        self.num_resumes = 0
        """How often it was taken up again."""
        self.num_vain_resumes = 0
        """How often in a row because its server or a worker was lost, without a chunk or a step that was new."""
        self.was_suspended = False
        """Whether the server that had it stopped, and was not lost."""
        self.queue_position = 0
        """Jobs ahead of it while it is queued."""
        self.phase = Phase.QUEUED
        self.last_phase = video_pb2.PhaseChange(chunk_index=-1)
        """The phase that was announced last, by whichever process."""
        self.last_event_s = clock()
        self.ended = asyncio.Event()
        self.left = asyncio.Event()
        """Set once this process has nothing more to do with it: it has ended, or is left to the next server."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._accepted_s = clock()  # as if this process had taken it
        self._reached = (-1, 0, 0)  # chunk, media, step of the refinement: the furthest of each
        self._progress = video_pb2.Progress()
        self._wait()

    @classmethod
    def restore(
        cls,
        record: records_pb2.JobRecord,
        directory: Path,
        *,
        has_run: bool = False,
        has_lost_power: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> Job:
        """A job that has not ended, as its files tell it. What was not written to its end is cut off.

        has_run: it was on a lane.  has_lost_power: events may be lost that callers were told of; the numbers that they
        had are not used again.
        Raises PhaseError if its log cannot be read or continued, ResumeError if it is gone with all that
        callers know of it.
        """
        log, events = JobLog.recover(directory / LOG_NAME)
        job = cls(record, directory, log, clock=clock, wall_clock=wall_clock)
        elapsed_s = 0.0
        for event in events:
            job._note(event)
            elapsed_s = event.elapsed_s
        # The wall clock tells how long there was no server; where it was set back, no time has passed.
        job._accepted_s = clock() - max(elapsed_s, wall_clock() - job.created_s)
        if not len(log) and has_run:
            raise ResumeError("the events that callers were told of are no longer there", job_id=job.job_id)
        if not len(log):
            job.emit(video_pb2.Accepted(plan=job.plan))
        elif has_lost_power and not job.has_told("completed"):
            for _ in range(SYNC_EVERY):
                job.announce(is_heartbeat=True)
        return job

    @classmethod
    def of_end(cls, record: records_pb2.JobRecord, directory: Path, end: records_pb2.JobEnd) -> Job:
        """A job that has ended, as its end was written down."""
        failure = _error_of(end.failure, record.job_id) if end.HasField("failure") else None
        job = cls(record, directory, JobLog.of_ended(directory / LOG_NAME, end.job.num_events, failure))
        job.state = end.job.state
        job.error = failure
        job.ended_s = end.job.end_time.ToNanoseconds() / 1e9
        job.num_frames_emitted = end.job.num_frames_emitted
        job.num_resumes = end.job.num_resumes
        job.artifacts = list(end.job.artifacts)
        job.removed_artifacts = list(end.job.removed_artifacts)
        if failure is not None and failure.phase:
            job.phase = Phase(failure.phase)
        job.ended.set()
        job.left.set()
        return job

    @property
    def priority(self) -> video_pb2.JobPriority:
        """Which of its tenant's jobs come first."""
        given = video_pb2.JOB_PRIORITY_UNSPECIFIED if self.request is None else self.request.priority
        return given or video_pb2.JOB_PRIORITY_NORMAL

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was accepted, those without a server included."""
        return self._clock() - self._accepted_s

    def has_told(self, kind: str) -> bool:
        """Whether the log holds an event with that payload, such as "stream_complete"."""
        return self.timeline.num_events(kind) > 0

    def emit(self, payload: Payload, *, is_refined: bool = False) -> None:
        """Numbers an event, writes it to the log and lets the readers have it. Raises PhaseError if it cannot.

        is_refined: the payload is media of the refined rendition, which moves no media time.
        """
        num_frames = self.num_frames_emitted
        if isinstance(payload, types_pb2.Fragment) and not is_refined:
            num_frames += payload.num_frames
        event = video_pb2.Event(
            seq=len(self.log),
            job_id=self.job_id,
            media_time_ticks=num_frames * TICKS_PER_FRAME,
            elapsed_s=self.elapsed_s,
        )
        field = _FIELD_OF[payload.DESCRIPTOR.full_name]
        field = REFINED + field if is_refined else field
        getattr(event, field).CopyFrom(payload)
        self.log.append(event, sync=field not in NOT_SYNCED)
        self._note(event)

    def warn(self, reason: str, message: str) -> None:
        """Warns, unless that has been told before: a phase that is repeated has the same to say."""
        warning = video_pb2.Warning(reason=reason, message=message)
        if warning not in self.warnings:
            self.emit(warning)

    def resume(self, reason: str) -> None:
        """Announces that the job is taken up again, from its first phase.

        reason: why it had been left, in a sentence.
        """
        self._wait()
        self.emit(video_pb2.Warning(reason=RESUMED, message=reason))

    def enter(self, phase: Phase, chunk_index: int = -1) -> None:
        """Announces the next phase."""
        assert phase in MOVES[self.phase], f"{self.phase} -> {phase} is no allowed move"
        self.phase = phase
        self._progress.phase = PHASE_TO_PROTO[phase]
        self._progress.chunk_index = chunk_index
        self._progress.step = 0
        self._progress.num_steps = self.plan.refine_audio.steps if phase is Phase.REFINE else self.clip.steps
        self._progress.queue_position = self.queue_position = 0
        self.emit(video_pb2.PhaseChange(phase=self._progress.phase, chunk_index=chunk_index))

    def step(self, step: int) -> None:
        """Announces that a noise forward of the chunk is done."""
        self._progress.step = step
        self.announce()

    def refine_step(self, progress: types_pb2.RefineProgress) -> None:
        """Announces that a step of the refinement is done."""
        self._progress.step = progress.step
        self.emit(progress)

    def keep(self, artifact: types_pb2.Artifact) -> None:
        """Lists a file of the job's directory that is whole, in place of an older one of that name."""
        listed = types_pb2.Artifact()
        listed.CopyFrom(artifact)
        listed.relative_path = f"jobs/{self.job_id}/{artifact.name}"
        kept = {known.name: known for known in self.artifacts}
        self.artifacts = list({**kept, artifact.name: listed}.values())

    def tell_position(self) -> None:
        """Announces how many jobs are ahead in the queue, if the last progress said another number."""
        if self.queue_position != self._progress.queue_position:
            self._progress.queue_position = self.queue_position
            with suppress(PhaseError):  # the next heartbeat says it too
                self.announce()

    def show_life(self) -> None:
        """Announces that nothing has moved."""
        with suppress(PhaseError):  # what the job itself has to say will fail it; other jobs must not suffer
            self.announce(is_heartbeat=True)

    def announce(self, *, is_heartbeat: bool = False) -> None:
        """Says where the job is. Raises PhaseError if it cannot be written."""
        progress = video_pb2.Progress()
        progress.CopyFrom(self._progress)
        progress.num_frames_emitted = self.num_frames_emitted
        progress.is_heartbeat = is_heartbeat
        self.emit(progress)

    def end(self, error: GenerationError | None) -> records_pb2.JobEnd:
        """Moves the job to its last state; everything it held has been freed. Returns what is to be written down before
        `tell_end`."""
        self.error = error
        self.ended_s = self._wall_clock()
        if error is None:
            self.state = video_pb2.JOB_STATE_SUCCEEDED
        elif isinstance(error, JobCancelledError):
            self.state = video_pb2.JOB_STATE_CANCELLED
        else:
            self.state = video_pb2.JOB_STATE_FAILED
        end = records_pb2.JobEnd(job=self.to_proto())
        if error is not None:
            end.failure.reason, end.failure.message = error.reason, error.message
            end.failure.phase, end.failure.chunk_index = error.phase, error.chunk_index
        return end

    def tell_end(self) -> None:
        """Makes the end known."""
        self.log.close(self.error)
        self.ended.set()
        self.left.set()

    async def wait_ended(self) -> None:
        """Returns when the job has ended. Raises ServerStoppingError if it is left to the next server before."""
        await self.left.wait()
        if not self.ended.is_set():
            raise _stopping(self.job_id)

    def suspend(self) -> None:
        """Leaves the job to the next server: its followers are let go, though it has not ended."""
        if self.phase is not Phase.QUEUED:
            with suppress(PhaseError):  # the next server takes it for one that was killed
                self.emit(video_pb2.Warning(reason=SUSPENDED, message=STOPPING))
        self.log.suspend(_stopping(self.job_id))
        self.left.set()

    @property
    def chunk_index(self) -> int:
        """The chunk being worked on; -1 where there is none."""
        return self._progress.chunk_index

    def to_proto(self) -> video_pb2.Job:
        """What callers may know of the job."""
        message = video_pb2.Job(
            job_id=self.job_id,
            state=self.state,
            plan=self.plan,
            num_events=len(self.log),
            num_frames_emitted=self.num_frames_emitted,
            artifacts=() if self.ended_s is None else self.artifacts,
            removed_artifacts=self.removed_artifacts,
            source_job_id="" if self.source is None else self.source.job_id,
            tenant=self.tenant,
            prompt=self.prompt,
            priority=self.priority,
            queue_position=self.queue_position,
            num_resumes=self.num_resumes,
        )
        message.create_time.FromNanoseconds(int(self.created_s * 1e9))
        if self.ended_s is not None:
            message.end_time.FromNanoseconds(int(self.ended_s * 1e9))
        if self.error is not None and self.state == video_pb2.JOB_STATE_FAILED:
            message.error.reason = self.error.reason
            message.error.message = self.error.message
            message.error.phase = PHASE_TO_PROTO[self.phase]
            message.error.chunk_index = self.error.chunk_index
        return message

    def _wait(self) -> None:
        """Puts the job before its first phase."""
        self.phase = Phase.QUEUED
        self._progress = video_pb2.Progress(
            phase=PHASE_TO_PROTO[Phase.QUEUED],
            chunk_index=-1,
            num_chunks=len(self.plan.chunks),
            num_steps=self.clip.steps,
        )

    def _note(self, event: video_pb2.Event) -> None:
        """Takes the next event of the log into what is known of the job."""
        self.last_event_s = self._clock()
        self.timeline.note(event)
        match event.WhichOneof("payload"):
            case "phase":
                self.last_phase = event.phase
                self._reach(chunk_index=event.phase.chunk_index)
            case "init_segment":
                self.stream.note(event.seq, event.init_segment, event.elapsed_s)
            case "fragment":
                self.stream.note(event.seq, event.fragment, event.elapsed_s)
                self.num_frames_emitted = self.stream.num_frames
            case "refined_init_segment":
                self.refined.note(event.seq, event.refined_init_segment, event.elapsed_s)
            case "refined_fragment":
                self.refined.note(event.seq, event.refined_fragment, event.elapsed_s)
            case "refine_progress":
                self._reach(refine_step=event.refine_progress.step)
            case "warning":
                warning = cast(video_pb2.Warning, event.warning)  # which the stubs take for Python's own class
                self.warnings.append(warning)
                self._note_resume(warning.reason)
            case "completed":
                self.artifacts = list(event.completed.artifacts)
        self._reach()

    def _note_resume(self, reason: str) -> None:
        if reason == RESUMED:
            self.num_resumes += 1
            self.num_vain_resumes += not self.was_suspended
        self.was_suspended = reason == SUSPENDED

    def _reach(self, *, chunk_index: int = -1, refine_step: int = 0) -> None:
        """Notes how far the job is; what it has not reached before was worth being taken up for."""
        num_media = self.stream.num_media + self.refined.num_media
        reached = (chunk_index, num_media, refine_step)
        furthest = cast(tuple[int, int, int], tuple(map(max, self._reached, reached)))
        if furthest != self._reached:
            self._reached, self.num_vain_resumes = furthest, 0


def as_told(failure: BaseException, job_id: str) -> GenerationError:
    """What a failure is called where callers see it; the log has the rest."""
    if isinstance(failure, GenerationError):
        return failure
    log.error("job %s failed", job_id, exc_info=failure)
    return PhaseError(f"internal error ({type(failure).__name__}); see the server's log")


def _stopping(job_id: str) -> ServerStoppingError:
    return ServerStoppingError(STOPPING, job_id=job_id)


def _error_of(failure: records_pb2.JobFailure, job_id: str) -> GenerationError:
    """The error that ended a job, as it was; of a reason that this version does not know, a PhaseError."""
    error = _ERROR_OF.get(failure.reason, PhaseError)(
        failure.message, job_id=job_id, phase=failure.phase, chunk_index=failure.chunk_index
    )
    error.reason = failure.reason
    return error
