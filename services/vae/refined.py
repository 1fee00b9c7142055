"""One refined sound from latents to media, artifacts and measurements, in one go.

The rendition comes first, since somebody may be waiting for it; then the sounds that it is compared with are decoded,
one after the other, so that no more than one decoder's state is on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from core.artifacts import COMPARISON, REFINED, REFINED_LATENTS, REFINED_SOUND
from core.geometry import SAMPLE_RATE, chunk_table, num_audio_latents, num_samples
from h3stream.errors import DeviceMemoryError, MuxError, PhaseError
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, VerbCancelled, poll
from services.vae.artifacts.artifact_set import ArtifactFailure, ArtifactSet, Maker
from services.vae.artifacts.base import Artifact, ArtifactFile
from services.vae.artifacts.comparison_file import ComparisonFile
from services.vae.artifacts.final_file import FinalFile
from services.vae.artifacts.latents_file import LatentsFile
from services.vae.artifacts.latents_source import LatentsSource
from services.vae.artifacts.lossless import SoundFile
from services.vae.audio_stream import AudioStream, SoundReport, SoundStatistics
from services.vae.media.muxer import MediaFragment
from services.vae.media.video_file import VideoFile
from services.vae.media_lane import SoundLane
from services.vae.output import to_array, to_pcm
from services.vae.spectrogram import Spectrogram, log_mel_distance
from services.vae.weights import VaeModels

_FLOOR_RMS = 1e-5
"""Below this a sound counts as silent: -100 dB, the floor of the spectrograms."""


@dataclass(frozen=True)
class RefinedSound:
    """A refined sound, what it is compared with, and what is to be made of it. Latents are `[1, 32, 2, A]` float32."""

    clip: ClipSpec
    """The clip whose sound it is."""
    artifact_directory: Path | None
    """Where artifacts go; None: none are written."""
    artifacts: frozenset[str]
    """Names of the artifacts to write."""
    video_file: Path | None
    """MP4 file whose pictures `refined.mp4` takes over."""
    latents_file: Path | None
    """File whose video latents `refined-latents.safetensors` takes over."""
    audio: torch.Tensor
    """The refined latents."""
    audio_before: torch.Tensor
    """Those before."""
    exact_audio: torch.Tensor | None
    """Those of the exact result; None if it is not known."""


@dataclass(frozen=True)
class SoundDistance:
    """How far two sounds lie apart."""

    log_mel_db: float
    """Mean absolute distance of their log-mel spectrograms, in dB."""
    rms_ratio: float
    """RMS of the one over that of the other, of which neither counts as less than the floor."""


@dataclass(frozen=True)
class DecodedSound:
    """What was made of a refined sound."""

    artifacts: list[ArtifactFile]
    """Complete files, in the artifact directory."""
    failures: list[ArtifactFailure]
    """Artifacts that could not be written."""
    stream_failure: str
    """Why the media stream ended before the clip; empty: it is whole."""
    sound: SoundReport
    """Measurements of the refined sound."""
    sound_before: SoundReport
    """Measurements of the sound before."""
    change: SoundDistance
    """The refined sound against the one before."""
    against_exact: SoundDistance | None
    """The refined sound against the exact result."""


@dataclass(frozen=True)
class _Measured:
    """A sound once it has been decoded."""

    statistics: SoundStatistics
    spectrogram: Spectrogram

    def distance_from(self, other: _Measured) -> SoundDistance:
        first, second = (max(sound.statistics.rms, _FLOOR_RMS) for sound in (self, other))
        return SoundDistance(log_mel_distance(self.spectrogram, other.spectrogram), first / second)


class RefinedDecoder:
    """The VAE side of one refinement.

    What fails in the media stream or in an artifact ends that alone: decoding and the other artifacts go on.
    """

    def __init__(self, models: VaeModels, device: torch.device, order: RefinedSound) -> None:
        """Opens the encoder and, if there is a directory, the artifacts that are ordered."""
        self._models, self._device, self._order = models, device, order
        self._latents_source: LatentsSource | None = None
        self._stream_failure = ""
        self._lane: SoundLane | None = None
        try:
            self._lane = SoundLane(order.clip)
        except MuxError as error:
            self._stream_failure = error.message
        self.start = None if self._lane is None else self._lane.start
        """The start of the stream; None if there is no stream."""
        makers: dict[str, Maker] = {
            REFINED: self._make_file,
            REFINED_SOUND: lambda directory: SoundFile(directory, REFINED_SOUND),
            REFINED_LATENTS: self._make_latents,
            COMPARISON: lambda directory: ComparisonFile(
                directory, num_samples(order.clip.num_frames) / SAMPLE_RATE, SAMPLE_RATE / 2 / 1000
            ),
        }
        self._artifacts = ArtifactSet(
            order.artifact_directory, {name: make for name, make in makers.items() if name in order.artifacts}
        )

    def decode(self, emit: Callable[[MediaFragment], None], cancelled: Cancelled) -> DecodedSound:
        """Emits every fragment as it becomes final, then completes the artifacts and returns what was measured.

        Raises DeviceMemoryError, PhaseError, and VerbCancelled within one decode of the caller's leaving; then no
        artifact remains once `close` has been called.
        """
        order = self._order
        refined = self._measure(order.audio, cancelled, lambda pcm, is_last: self._deliver(pcm, emit, is_last=is_last))
        before = self._measure(order.audio_before, cancelled)
        exact = None if order.exact_audio is None else self._measure(order.exact_audio, cancelled)
        self._take_pictures(cancelled)
        self._take_latents(cancelled)
        for title, sound in (("Before", before), ("Refined", refined), ("Exact", exact)):
            if sound is not None:
                self._artifacts.add_spectrogram(title, sound.spectrogram.drawn)
        change = refined.distance_from(before)
        against_exact = None if exact is None else refined.distance_from(exact)
        return DecodedSound(
            artifacts=self._finish(refined.statistics.divisor, cancelled),
            failures=self._artifacts.failures,
            stream_failure=self._stream_failure,
            sound=refined.statistics.report(),
            sound_before=before.statistics.report(),
            change=change,
            against_exact=against_exact,
        )

    def close(self) -> None:
        """Removes artifacts that are not complete."""
        self._artifacts.discard()

    def _measure(
        self,
        latents: torch.Tensor,
        cancelled: Cancelled,
        take: Callable[[npt.NDArray[np.float32], bool], None] = lambda pcm, is_last: None,
    ) -> _Measured:
        """Decodes a sound in the pieces in which a clip's chunks bring it.

        take: called with the samples `[2, S]` of each piece and whether it is the last.
        """
        clip, models = self._order.clip, self._models
        total = num_audio_latents(clip.num_frames)
        stream = AudioStream(models.audio, models.audio_statistics, self._device, total)
        spectrogram = Spectrogram()
        for chunk in chunk_table(clip.num_frames):
            poll(cancelled)
            try:
                pcm = to_pcm(stream.push(latents[..., chunk.audio_start : chunk.audio_stop]))
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise DeviceMemoryError(
                    f"the sound of a clip of {clip.num_frames} frames does not fit in memory: {error}"
                ) from error
            take(pcm, chunk.is_tail)
            spectrogram.add(pcm)
        spectrogram.finish()
        return _Measured(stream.statistics, spectrogram)

    def _deliver(self, pcm: npt.NDArray[np.float32], emit: Callable[[MediaFragment], None], *, is_last: bool) -> None:
        """Encodes and emits the next samples; ends the stream if the encoder fails."""
        if self._lane is not None:
            try:
                for fragment in self._lane.add(pcm, is_last=is_last):
                    emit(fragment)
            except MuxError as error:
                self._lane = None
                self._stream_failure = error.message
        self._artifacts.add_sound(pcm)

    def _make_file(self, directory: Path) -> Artifact:
        return FinalFile(directory, self._video_file().track(), REFINED)

    def _video_file(self) -> VideoFile:
        assert self._order.video_file is not None
        return VideoFile(self._order.video_file, self._order.clip)

    def _take_pictures(self, cancelled: Cancelled) -> None:
        if not self._artifacts.wants(REFINED):
            return
        try:
            for packet in self._video_file().packets():
                poll(cancelled)
                self._artifacts.add_packet(packet)
        except MuxError as error:
            self._artifacts.give_up(REFINED, error.message)

    def _make_latents(self, directory: Path) -> Artifact:
        assert self._order.latents_file is not None
        self._latents_source = LatentsSource(self._order.latents_file, self._order.clip)
        return LatentsFile(directory, self._order.clip, REFINED_LATENTS, self._latents_source.about)

    def _take_latents(self, cancelled: Cancelled) -> None:
        if not self._artifacts.wants(REFINED_LATENTS):
            return
        assert self._latents_source is not None
        try:
            for chunk in chunk_table(self._order.clip.num_frames):
                poll(cancelled)
                audio = to_array(self._order.audio[..., chunk.audio_start : chunk.audio_stop])
                video = self._latents_source.video(chunk.video_start, chunk.video_stop)
                self._artifacts.add_latents(video, audio)
        except PhaseError as error:
            self._artifacts.give_up(REFINED_LATENTS, error.message)

    def _finish(self, divisor: float, cancelled: Cancelled) -> list[ArtifactFile]:
        """Completes the artifacts; removes them again if the caller has left meanwhile."""
        poll(cancelled)
        files = self._artifacts.finish(divisor)
        if cancelled():
            self._artifacts.remove(files)
            raise VerbCancelled
        return files
