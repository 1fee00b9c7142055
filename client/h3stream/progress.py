"""What a user sees of a generation: what the events add up to, as one line, as a live bar, as a summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TextIO

from h3stream.events import (
    Accepted,
    AudioDistance,
    Completed,
    Event,
    Fragment,
    JobWarning,
    PhaseChange,
    Plan,
    Progress,
    RefinedAudio,
    RefineFailed,
    RefineProgress,
    RefineStarted,
    StreamComplete,
)

WARNING = "warning: "
BOLD_YELLOW, PLAIN = "\x1b[1;33m", "\x1b[0m"
MIN_BAR_COLUMNS = 6
"""A shorter bar says nothing; the line then goes without."""


class Tally:
    """What the events of a job add up to so far."""

    def __init__(self, *, has_clip: bool = True) -> None:
        """has_clip: whether the job makes a clip; otherwise it refines the sound of one."""
        self._has_clip = has_clip
        self.phase = "waiting"
        self.chunk_index = -1
        self.num_chunks = 0
        self.step = 0
        self.num_steps = 0
        """Noise forwards of a chunk, or of a dense clip."""
        self.num_forwards = 0
        """Noise forwards done, of all chunks; decoding an earlier chunk later takes none of them back."""
        self.num_forwards_planned = 0
        """Noise forwards of the whole clip."""
        self.queue_position = 0
        self.num_frames = 0
        """Frames of the whole clip."""
        self.num_frames_emitted = 0
        """Frames up to the end of the last fragment."""
        self.num_frames_received = 0
        """Fewer where the stream was joined at a later chunk."""
        self.num_fragments_received = 0
        """Fragments that have come."""
        self.num_bytes_received = 0
        """Bytes of the media stream that have come."""
        self.first_fragment_s: float | None = None
        """Seconds from the start of the call to the first fragment's arrival."""
        self.elapsed_s = 0.0
        """Seconds from the start of the call to the last event's arrival."""
        self.warnings: list[str] = []
        """Messages of the plan's warnings and the job's, each once."""
        self.notes: list[str] = []
        """What deserves a line of its own, in order: what the job makes, and the warnings."""
        self.stream: StreamComplete | None = None
        self.completed: Completed | None = None
        self.refine_steps: list[RefineProgress] = []
        """Steps of the refinement that are done."""
        self.num_refine_steps = 0
        """Steps of the refinement; 0 where there is none."""
        self.refined: RefinedAudio | None = None
        self.refine_failure: RefineFailed | None = None

    def add(self, event: Event, elapsed_s: float) -> None:
        """Takes the next event, which arrived `elapsed_s` seconds after the start of the call."""
        self.elapsed_s = elapsed_s
        self.num_bytes_received += len(event.media)
        match event:
            case Accepted():
                self._accept(event.job_id, event.plan)
            case PhaseChange():
                self._move(event.phase, event.chunk_index, 0)
                self.queue_position = 0
            case Progress():
                self._move(event.phase, event.chunk_index, event.step)
                self.queue_position = event.queue_position
            case Fragment():
                self.num_frames_emitted = event.first_frame + event.num_frames
                self.num_frames_received += event.num_frames
                self.num_fragments_received += 1
                if self.first_fragment_s is None:
                    self.first_fragment_s = elapsed_s
            case JobWarning():
                self._warn(event.message)
            case StreamComplete():
                self.stream = event
            case RefineStarted():
                self.notes.append(_where(event))
            case RefineProgress():
                self.refine_steps.append(event)
            case RefinedAudio():
                self.refined = event
            case RefineFailed():
                self.refine_failure = event
            case Completed():
                self.completed = event

    @property
    def fraction(self) -> float:
        """How much of the work is done, from 0 to 1, counted in forwards."""
        if self.completed is not None:
            return 1.0
        num_sampled = self.num_forwards if self.stream is None else self.num_forwards_planned
        num_planned = self.num_forwards_planned + self.num_refine_steps
        return (num_sampled + len(self.refine_steps)) / num_planned if num_planned else 0.0

    def describe(self) -> str:
        """Where the job is, in a few words."""
        parts = [self.phase]
        if self.queue_position:
            parts.append(f"behind {self.queue_position} job{'s' if self.queue_position > 1 else ''}")
        if self.chunk_index >= 0:
            parts.append(f"chunk {self.chunk_index} of 0-{self.num_chunks - 1}")
        if self.phase == "denoise":
            parts.append(f"step {self.step}/{self.num_steps}")
        if self.phase == "refine" and self.refine_steps:
            last = self.refine_steps[-1]
            parts.append(f"step {last.step}/{last.num_steps} {last.mode}")
        if self.num_frames:
            parts.append(f"{self.num_frames_emitted}/{self.num_frames} frames")
        if self.first_fragment_s is not None:
            parts.append(f"first at {self.first_fragment_s:.1f} s")
        return "  ".join(parts)

    def summary(self) -> list[str]:
        """What a user wants to know of a finished job, in lines; empty if it is not finished."""
        if self.completed is None:
            return []
        lines = [*self._clip_summary(self.completed), *self._refine_summary()]
        return [*lines, *(WARNING + message for message in self.warnings)] if lines else []

    def _clip_summary(self, completed: Completed) -> list[str]:
        if self.stream is None or self.first_fragment_s is None:
            return []
        early = completed.timings.num_frames_before_sampling_end
        if num_missed := self.stream.num_frames - self.num_frames_received:
            told, samples = f"joined at frame {num_missed}: the clip begins there", ""
        else:
            told = f"{early} of {self.num_frames} frames were out before sampling ended"
            samples = f"{self.stream.num_samples} samples, "
        return [
            f"first fragment after {self.first_fragment_s:.1f} s; {told}",
            f"{self.num_frames_received} frames, {samples}{self.num_bytes_received} bytes in "
            f"{self.num_fragments_received} fragments; {self.elapsed_s:.1f} s in all",
        ]

    def _refine_summary(self) -> list[str]:
        refined = self.refined
        if refined is None:
            return []
        modes = [step.mode for step in self.refine_steps]
        counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in dict.fromkeys(modes))
        warm = ", with the cache of an earlier refinement" if refined.is_warm else ""
        lines = [
            f"sound refined in {refined.sampling_s:.1f} s, steps: {counts}{warm}",
            f"against the sound before: {_apart(refined.change)}",
        ]
        if refined.against_exact is not None:
            speed = f"{refined.speed_ratio:.2f} times as fast"
            lines.append(f"against exact: {_apart(refined.against_exact)}; {speed}")
        return lines

    def _accept(self, job_id: str, plan: Plan) -> None:
        clip = plan.clip
        self.num_chunks, self.num_steps = len(plan.chunks), clip.steps
        size = f"{clip.num_frames} frames of {clip.width}x{clip.height}"
        self.num_refine_steps = 0 if plan.refine_audio is None else plan.refine_audio.steps
        if self._has_clip:
            self.num_forwards_planned = plan.num_noise_forwards
            self.num_frames = clip.num_frames
            how = "sampled at once" if clip.mode == "dense" else f"in {self.num_chunks} chunks"
            self.notes.append(f"job {job_id}: {size} {how}, seed {clip.seed}")
        else:
            self.notes.append(f"job {job_id}: the sound of {size} refined in {self.num_refine_steps} steps")
        for warning in plan.warnings:
            self._warn(warning.message)

    def _move(self, phase: str, chunk_index: int, step: int) -> None:
        self.phase, self.chunk_index, self.step = phase, chunk_index, step
        if phase == "denoise":
            self.num_forwards = max(chunk_index, 0) * self.num_steps + step  # a dense clip has no chunk then

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)
            self.notes.append(WARNING + message)


class Display(Protocol):
    """Shows a generation while it runs."""

    def show(self, tally: Tally, event: Event, elapsed_s: float) -> None:
        """Shows the state after an event."""
        ...

    def note(self, text: str) -> None:
        """Tells, at once and in a line of its own, what no event does."""
        ...

    def close(self) -> None:
        """Leaves the stream at the start of a line."""
        ...


class LiveBar:
    """One line of a terminal, drawn anew at every event; notes stay above it."""

    def __init__(self, stream: TextIO, columns: Callable[[], int]) -> None:
        """columns: the terminal's present width."""
        self._stream = stream
        self._columns = columns
        self._num_notes = 0

    def show(self, tally: Tally, event: Event, elapsed_s: float) -> None:
        """Draws the line."""
        for note in tally.notes[self._num_notes :]:
            is_warning = note.startswith(WARNING)
            self._stream.write(f"\r\x1b[K{BOLD_YELLOW if is_warning else ''}{note}{PLAIN if is_warning else ''}\n")
        self._num_notes = len(tally.notes)
        # The last column stays free: a full line would wrap.
        self._stream.write(f"\r{bar_line(tally, self._columns() - 1)}\x1b[K")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Writes the line in the place of the bar, which comes back with the next event."""
        self._stream.write(f"\r\x1b[K{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Keeps what the line says and goes to the next."""
        self._stream.write("\n")
        self._stream.flush()


class Lines:
    """A line for every phase, place in the queue, step of a refinement and note, for streams that are no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_notes = 0
        self._queue_position = 0

    def show(self, tally: Tally, event: Event, elapsed_s: float) -> None:
        """Writes what is new."""
        for note in tally.notes[self._num_notes :]:
            self._stream.write(f"{note}\n")
        self._num_notes = len(tally.notes)
        has_moved_up = tally.queue_position not in (0, self._queue_position)
        self._queue_position = tally.queue_position
        if has_moved_up or isinstance(event, PhaseChange | RefineProgress):
            self._stream.write(f"{elapsed_s:7.1f} s  {tally.describe()}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Writes the line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Every line is whole already."""


def bar_line(tally: Tally, columns: int) -> str:
    """The tally as a bar and words, at most `columns` wide."""
    words = tally.describe()
    percent = f"{tally.fraction:4.0%}"
    bar_columns = columns - len(words) - len(percent) - len("[] ") - len("  ")
    if bar_columns < MIN_BAR_COLUMNS:
        return f"{percent}  {words}"[:columns]
    filled = int(bar_columns * tally.fraction)
    return f"[{'#' * filled}{'.' * (bar_columns - filled)}] {percent}  {words}"


def _where(started: RefineStarted) -> str:
    """Whether a refinement has a cache, and where, in words."""
    if not started.has_cache:
        return f"no cache: {started.reason}"
    cache = started.spec.cache
    return f"cache of {cache.contents} in {cache.precision} in {started.backend}: {started.reason}"


def _apart(distance: AudioDistance) -> str:
    """How far two sounds lie apart, in words."""
    return (
        f"latents {distance.latents:.3g} (relative L2), log-mel {distance.log_mel_db:.2f} dB, "
        f"RMS ratio {distance.rms_ratio:.3f}"
    )
