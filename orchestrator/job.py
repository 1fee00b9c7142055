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
from h3stream.errors import GenerationError, JobCancelledError, PhaseError
from h3stream.request import ClipSpec
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job_log import JobLog
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
    """State of one job. Only the scheduler moves it."""

    def __init__(
        self,
        job_id: str,
        prompt: str,
        clip: ClipSpec,
        plan: video_pb2.Plan,
        directory: Path,
        *,
        source: RefineSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """directory: exists and is the job's own.  source: what it refines; None: it makes a clip.

        Raises PhaseError if the log cannot be made there.
        """
        self.job_id = job_id
        self.prompt = prompt
        self.clip = clip
        self.plan = plan
        self.directory = directory
        self.source = source
        self.log = JobLog(directory / "events.log")
        self.state = video_pb2.JOB_STATE_QUEUED
        self.error: GenerationError | None = None
        self.created_s = wall_clock()
        self.ended_s: float | None = None
        self.request: video_pb2.GenerateRequest | video_pb2.RefineHeader | None = None
        """The request as it came, for the record."""
        self.timeline = Timeline()
        self.warnings: list[video_pb2.Warning] = []
        self.artifacts: list[types_pb2.Artifact] = []
        """Files that are whole, whatever becomes of the job."""
        self.removed_artifacts: list[video_pb2.RemovedArtifact] = []
        self.num_frames_emitted = 0
        self.phase = Phase.QUEUED
        self.last_event_s = clock()
        self.ended = asyncio.Event()
        self._clock = clock
        self._wall_clock = wall_clock
        self._progress = video_pb2.Progress(
            phase=PHASE_TO_PROTO[Phase.QUEUED],
            chunk_index=-1,
            num_chunks=len(plan.chunks),
            num_steps=clip.steps,
        )

    def emit(self, payload: Payload, *, is_refined: bool = False) -> None:
        """Numbers an event, writes it to the log and lets the readers have it. Raises PhaseError if it cannot.

        is_refined: the payload is media of the refined rendition, which moves no media time.
        """
        if isinstance(payload, types_pb2.Fragment) and not is_refined:
            self.num_frames_emitted += payload.num_frames
        event = video_pb2.Event(
            seq=len(self.log),
            job_id=self.job_id,
            media_time_ticks=self.num_frames_emitted * TICKS_PER_FRAME,
        )
        field = _FIELD_OF[payload.DESCRIPTOR.full_name]
        getattr(event, REFINED + field if is_refined else field).CopyFrom(payload)
        self.log.append(event)
        self.last_event_s = self._clock()
        self.timeline.note(event, self.last_event_s)
        if isinstance(payload, video_pb2.Warning):
            self.warnings.append(payload)

    def enter(self, phase: Phase, chunk_index: int = -1) -> None:
        """Announces the next phase."""
        assert phase in MOVES[self.phase], f"{self.phase} -> {phase} is no allowed move"
        self.phase = phase
        self._progress.phase = PHASE_TO_PROTO[phase]
        self._progress.chunk_index = chunk_index
        self._progress.step = 0
        self._progress.num_steps = self.plan.refine_audio.steps if phase is Phase.REFINE else self.clip.steps
        self._progress.queue_position = 0
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

    def wait_behind(self, num_ahead: int) -> None:
        """Announces how many jobs are ahead in the queue, if that has changed."""
        if num_ahead != self._progress.queue_position:
            self._progress.queue_position = num_ahead
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

    def end(self, error: GenerationError | None) -> None:
        """Makes the job's end known; everything it held has been freed."""
        self.error = error
        self.ended_s = self._wall_clock()
        if error is None:
            self.state = video_pb2.JOB_STATE_SUCCEEDED
        elif isinstance(error, JobCancelledError):
            self.state = video_pb2.JOB_STATE_CANCELLED
        else:
            self.state = video_pb2.JOB_STATE_FAILED
        self.log.close(error)
        self.ended.set()

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


def as_told(failure: BaseException, job_id: str) -> GenerationError:
    """What a failure is called where callers see it; the log has the rest."""
    if isinstance(failure, GenerationError):
        return failure
    log.error("job %s failed", job_id, exc_info=failure)
    return PhaseError(f"internal error ({type(failure).__name__}); see the server's log")
