"""What leaves a session: phases, steps, stills, media, and what is counted and warned of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from core.artifacts import FINAL
from core.phases import HOLDER, Phase
from h3stream.errors import PhaseError, ResumeError
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.provenance import given_up
from orchestrator.worker_clients import StepDone, TensorParts

STREAM_FAILED = "STREAM_FAILED"
SILENCE_PEAK = 1e-4
"""Below -80 dB of full scale a soundtrack is called silent."""


async def enter(job: Job, lane: Lane, phase: Phase, chunk_index: int = -1) -> None:
    """Announces a phase and gives the device to the worker that it needs."""
    job.enter(phase, chunk_index)
    await lane.device.grant(HOLDER[phase])


class Output:
    """What a session sends of a clip: the stream, or its refined rendition. What callers had before the job was taken
    up again is compared and not sent twice."""

    def __init__(self, job: Job, lane: Lane, *, is_refined: bool = False) -> None:
        self.latents_hash = hashlib.sha256()
        self.is_shown = False
        """Whether the forward told last has its still; of the last one of all it is always due."""
        self._job = job
        self._lane = lane
        self._is_refined = is_refined
        self._delivered = job.refined if is_refined else job.stream
        self._what = "refined rendition" if is_refined else "media stream"
        self._num_decoded = 0
        self._sampling_s = 0.0
        self._num_frames_before_sampling_end = 0

    async def open(self, artifacts: Sequence[str]) -> None:
        """Opens the session at the VAE worker, or finds it open.

        artifacts: names of those to write.
        """
        job = self._job
        opened = await self._lane.vae.open_session(job.job_id, job.clip, str(job.directory), artifacts)
        self._num_decoded = opened.num_decoded_chunks
        if opened.stream_failure:
            self.stream_failed(opened.stream_failure)

    def sampled(self, result: StepDone | types_pb2.Preview) -> None:
        """Tells that a noise forward is done, or shows it."""
        self.is_shown = not isinstance(result, StepDone)
        if isinstance(result, StepDone):
            self._job.step(result.step)
        else:
            self._job.emit(result)

    def sampling_ended(self) -> None:
        """Notes that the last noise forward is done."""
        self._sampling_s = running_s(self._job)
        # More may have been emitted where the job was taken up again behind the last forward.
        most = 0 if self._job.clip.mode == "dense" else self._job.plan.chunks[-2].num_frames_emitted
        self._num_frames_before_sampling_end = min(self._job.num_frames_emitted, most)

    def hash_latents(self, latents: TensorParts) -> None:
        """Takes the next chunk's latents into the digest of all."""
        for part in latents:
            self.latents_hash.update(part.data)

    async def decode(self, chunk_index: int, latents: TensorParts) -> None:
        """Decodes the next chunk and emits the media that it completes; nothing if the worker has decoded it."""
        self.hash_latents(latents)
        if chunk_index < self._num_decoded:
            return
        await enter(self._job, self._lane, Phase.DECODE, chunk_index)
        async for media in self._lane.vae.decode_chunk(self._job.job_id, chunk_index, latents):
            if isinstance(media, str):
                self.stream_failed(media)
            else:
                self.emit(media)

    def emit(self, media: types_pb2.InitSegment | types_pb2.Fragment) -> None:
        """Sends the next piece of the media, unless it was sent. Raises ResumeError if another one was."""
        number = media.fragment_index + 1 if isinstance(media, types_pb2.Fragment) else 0
        if number < self._delivered.num_media:
            if not self._delivered.matches(number, media):
                raise ResumeError(f"piece {number} of the {self._what} was made again, but not as it was delivered")
        elif self._has_failed():
            return
        elif number > self._delivered.num_media:
            raise PhaseError(f"piece {number} of the {self._what} came before piece {self._delivered.num_media}")
        else:
            self._job.emit(media, is_refined=self._is_refined)

    def stream_failed(self, reason: str) -> None:
        """Tells that the media end before the clip."""
        if not self._has_failed():
            message = f"{self._failure}; the clip itself is being completed: {reason}"
            self._job.warn(STREAM_FAILED, message)

    def timings(self) -> video_pb2.Timings:
        """How long things took, until now."""
        first_fragment_s = self._delivered.first_fragment_s
        return video_pb2.Timings(
            first_fragment_s=0.0 if first_fragment_s is None else first_fragment_s - started_s(self._job),
            sampling_s=self._sampling_s,
            total_s=running_s(self._job),
            num_frames_before_sampling_end=self._num_frames_before_sampling_end,
        )

    @property
    def _failure(self) -> str:
        return f"the {self._what} ended early"

    def _has_failed(self) -> bool:
        """Whether the media were said to have ended: then none may follow, though they could now be made."""
        return any(w.reason == STREAM_FAILED and w.message.startswith(self._failure) for w in self._job.warnings)


def started_s(job: Job) -> float:
    """When the job first ran, in seconds after it was accepted."""
    phases = job.timeline.summary()["phases"]
    return float(phases[0]["time_s"]) if phases else job.elapsed_s


def running_s(job: Job) -> float:
    """Seconds since the job first ran, those while it was interrupted included."""
    return job.elapsed_s - started_s(job)


def delivery_warnings(
    finished: workers_pb2.FinishResponse | workers_pb2.DecodeAudioFinished,
) -> list[video_pb2.Warning]:
    """What of a clip that has been made could not be written."""
    return [given_up(failure.name, failure.message) for failure in finished.failures]


def audio_warnings(health: types_pb2.AudioHealth, which: str = "", file_name: str = FINAL) -> list[video_pb2.Warning]:
    """What a listener should know of a soundtrack.

    which: "" or "refined ".  file_name: of the file that holds it normalised.
    """
    warnings = []
    if health.peak < SILENCE_PEAK:
        message = f"the {which}sound is silent (peak {health.peak:.1e})"
        warnings.append(video_pb2.Warning(reason="AUDIO_SILENT", message=message))
    if health.num_clipped_samples:
        message = f"{health.num_clipped_samples} {which}audio samples are at full scale"
        warnings.append(video_pb2.Warning(reason="AUDIO_CLIPPED", message=message))
    if health.normalisation_divisor > 1:
        message = f"{file_name} is quieter than the stream by a factor of {health.normalisation_divisor:.3f}"
        warnings.append(video_pb2.Warning(reason="AUDIO_NORMALISED", message=message))
    return warnings
