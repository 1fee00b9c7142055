"""What leaves a session: phases, steps, stills, media, and what is counted and warned of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from core.artifacts import FINAL
from core.phases import HOLDER, Phase
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.provenance import given_up
from orchestrator.worker_clients import StepDone, TensorParts

SILENCE_PEAK = 1e-4
"""Below -80 dB of full scale a soundtrack is called silent."""


async def enter(job: Job, lane: Lane, phase: Phase, chunk_index: int = -1) -> None:
    """Announces a phase and gives the device to the worker that it needs."""
    job.enter(phase, chunk_index)
    await lane.device.grant(HOLDER[phase])


class Output:
    """What a session sends of a clip: the stream, or its refined rendition."""

    def __init__(self, job: Job, lane: Lane, clock: Callable[[], float], *, is_refined: bool = False) -> None:
        self.num_fragments = 0
        self.num_bytes = 0
        self.latents_hash = hashlib.sha256()
        self.is_shown = False
        """Whether the forward told last has its still; of the last one of all it is always due."""
        self._job = job
        self._lane = lane
        self._clock = clock
        self._is_refined = is_refined
        self._started_s = clock()
        self._first_fragment_s = 0.0
        self._sampling_s = 0.0
        self._num_frames_before_sampling_end = 0

    def sampled(self, result: StepDone | types_pb2.Preview) -> None:
        """Tells that a noise forward is done, or shows it."""
        self.is_shown = not isinstance(result, StepDone)
        if isinstance(result, StepDone):
            self._job.step(result.step)
        else:
            self._job.emit(result)

    def sampling_ended(self) -> None:
        """Notes that the last noise forward is done."""
        self._sampling_s = self._elapsed_s()
        self._num_frames_before_sampling_end = self._job.num_frames_emitted

    def hash_latents(self, latents: TensorParts) -> None:
        """Takes the next chunk's latents into the digest of all."""
        for part in latents:
            self.latents_hash.update(part.data)

    async def decode(self, chunk_index: int, latents: TensorParts) -> None:
        """Decodes the next chunk and emits the media that it completes."""
        self.hash_latents(latents)
        await enter(self._job, self._lane, Phase.DECODE, chunk_index)
        async for media in self._lane.vae.decode_chunk(self._job.job_id, chunk_index, latents):
            if isinstance(media, str):
                self.stream_failed(media)
            else:
                self.emit(media)

    def emit(self, media: types_pb2.InitSegment | types_pb2.Fragment) -> None:
        """Sends the next piece of the media."""
        if isinstance(media, types_pb2.Fragment):
            if self.num_fragments == 0:
                self._first_fragment_s = self._elapsed_s()
            self.num_fragments += 1
        self.num_bytes += len(media.data)
        self._job.emit(media, is_refined=self._is_refined)

    def stream_failed(self, reason: str) -> None:
        """Tells that the media end before the clip."""
        stream = "refined rendition" if self._is_refined else "media stream"
        message = f"the {stream} ended early; the clip itself is being completed: {reason}"
        self._job.emit(video_pb2.Warning(reason="STREAM_FAILED", message=message))

    def timings(self) -> video_pb2.Timings:
        """How long things took, until now."""
        return video_pb2.Timings(
            first_fragment_s=self._first_fragment_s,
            sampling_s=self._sampling_s,
            total_s=self._elapsed_s(),
            num_frames_before_sampling_end=self._num_frames_before_sampling_end,
        )

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s


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
