"""One clip from latents to media: decode, encode, mux, in the order in which things become final.

Frames and samples live here for the length of one call and never leave the worker. What a session is and when its calls
are allowed is left to `worker.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from core.budget import AAC_BIT_RATE
from core.clock import decoded_frames, muxable_frames
from core.geometry import Chunk, num_audio_latents, num_samples
from h3stream.errors import DeviceMemoryError
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, VerbCancelled
from services.vae.artifacts import ArtifactFile, FinalFile
from services.vae.audio_stream import AudioStream
from services.vae.media.boxes import AudioTrack, VideoTrack
from services.vae.media.encoders import AacEncoder, open_h264_encoder
from services.vae.media.muxer import FragmentMuxer, MediaFragment, mime_type
from services.vae.output import to_pcm, to_rgb8
from services.vae.video_stream import VideoStream
from services.vae.weights import VaeModels


@dataclass(frozen=True)
class StreamStart:
    """The init segment and what a player is told with it."""

    data: bytes
    """`ftyp` and `moov`."""
    mime_type: str
    """With the codecs string."""
    video_encoder: str
    """Name of the H.264 encoder in use."""
    audio_encoder: str
    """Name of the AAC encoder in use."""


@dataclass(frozen=True)
class SoundReport:
    """Measurements of the whole soundtrack before any normalisation."""

    std: float
    """Standard deviation over channels and samples."""
    peak: float
    """Largest magnitude."""
    dc_offset: float
    """Mean of all samples."""
    num_clipped_samples: int
    """Samples at full scale."""
    normalisation_divisor: float
    """What `final.mp4` divides the waveform by."""


class ClipDecoder:
    """The VAE side of one clip."""

    def __init__(
        self,
        models: VaeModels,
        device: torch.device,
        clip: ClipSpec,
        artifact_directory: Path | None,
        *,
        video_bit_rate: int,
        video_encoder: str | None,
    ) -> None:
        """Opens the encoders and, if there is a directory, the artifacts. Raises MuxError or PhaseError."""
        self._clip = clip
        self._video = VideoStream(models.video, models.video_statistics, device)
        self._audio = AudioStream(models.audio, models.audio_statistics, device, num_audio_latents(clip.num_frames))
        self._h264 = open_h264_encoder(clip.width, clip.height, video_bit_rate, video_encoder)
        self._aac = AacEncoder()
        self._num_samples = 0
        self._video_track = VideoTrack(
            width=clip.width,
            height=clip.height,
            decoder_configuration=self._h264.decoder_configuration,
            num_frames=clip.num_frames,
        )
        audio_track = AudioTrack(
            decoder_configuration=self._aac.decoder_configuration,
            bit_rate=AAC_BIT_RATE,
            priming_samples=self._aac.priming_samples,
            num_samples=num_samples(clip.num_frames),
        )
        self._muxer = FragmentMuxer(self._video_track, audio_track)
        self.start = StreamStart(
            data=self._muxer.init_segment(),
            mime_type=mime_type(self._video_track, audio_track),
            video_encoder=self._h264.name,
            audio_encoder=self._aac.name,
        )
        self._final_file = FinalFile(artifact_directory) if artifact_directory is not None else None

    def decode(
        self,
        chunk: Chunk,
        video: torch.Tensor,
        audio: torch.Tensor,
        emit: Callable[[MediaFragment], None],
        cancelled: Cancelled,
    ) -> None:
        """Decodes the next chunk and emits every fragment that has become final; the tail chunk completes the stream.

        video: `[1, 24, t, H, W]` float32.  audio: `[1, 32, 2, a]` float32.
        Raises DeviceMemoryError, MuxError, PhaseError, and VerbCancelled within one decode of the caller's leaving.
        """
        try:
            pictures = [to_rgb8(frames) for frames in self._video.push(video)]
            if chunk.is_tail:
                pictures.append(to_rgb8(self._video.flush()))
            _poll(cancelled)
            pcm = to_pcm(self._audio.push(audio))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise DeviceMemoryError(
                f"chunk {chunk.index} of a {self._clip.width}x{self._clip.height} clip does not fit in memory: {error}"
            ) from error
        self._encode_sound(pcm, is_last=chunk.is_tail)
        for frame in itertools.chain.from_iterable(pictures):
            _poll(cancelled)
            self._encode_picture(frame)
        frames = muxable_frames(decoded_frames(chunk), self._num_samples, is_final=chunk.is_tail)
        for made in self._muxer.take(frames, is_final=chunk.is_tail):
            emit(made)

    def finish(self) -> list[ArtifactFile]:
        """Completes the artifacts of a clip whose chunks have all been decoded."""
        if self._final_file is None:
            return []
        return [self._final_file.finish(self._video_track, self._num_samples, self._audio.statistics.divisor)]

    def sound_report(self) -> SoundReport:
        """What was measured on the soundtrack."""
        measured = self._audio.statistics
        return SoundReport(
            std=measured.std,
            peak=measured.peak,
            dc_offset=measured.mean,
            num_clipped_samples=measured.num_clipped,
            normalisation_divisor=measured.divisor,
        )

    def close(self) -> None:
        """Removes artifacts that are not complete."""
        if self._final_file is not None:
            self._final_file.discard()

    def _encode_sound(self, pcm: npt.NDArray[np.float32], *, is_last: bool) -> None:
        packets = self._aac.encode(pcm)
        if is_last:
            packets += self._aac.flush()
        self._muxer.add([], packets)
        self._num_samples += pcm.shape[1]
        if self._final_file is not None:
            self._final_file.add_sound(pcm)

    def _encode_picture(self, rgb: npt.NDArray[np.uint8]) -> None:
        packet = self._h264.encode(rgb)
        self._muxer.add([packet], [])
        if self._final_file is not None:
            self._final_file.add_picture(packet)


def _poll(cancelled: Cancelled) -> None:
    if cancelled():
        raise VerbCancelled
