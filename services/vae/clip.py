"""One clip from latents to media: decode, encode, mux, in the order in which things become final.

Frames and samples live here for the length of one call and never leave the worker. What a session is and when its calls
are allowed is left to `worker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from core.artifacts import FINAL, FRAMES, LATENTS, REFINED, REFINED_LATENTS, REFINED_SOUND, SOUND, STREAM
from core.clock import decoded_frames, muxable_frames
from core.geometry import Chunk, num_audio_latents
from h3stream.errors import DeviceMemoryError, MuxError
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, poll
from services.vae.artifacts.artifact_set import ArtifactFailure, ArtifactSet, Maker
from services.vae.artifacts.base import Artifact, ArtifactFile
from services.vae.artifacts.final_file import FinalFile
from services.vae.artifacts.latents_file import LatentsFile
from services.vae.artifacts.lossless import FramesFile, SoundFile
from services.vae.artifacts.stream_file import StreamFile
from services.vae.audio_stream import AudioStream, SoundReport
from services.vae.media.muxer import MediaFragment
from services.vae.media_lane import MediaLane
from services.vae.output import to_array, to_pcm, to_rgb8
from services.vae.video_stream import VideoStream
from services.vae.weights import VaeModels

_OF_THE_STREAM = (STREAM, FINAL, REFINED)
"""Artifacts that hold the stream's pictures."""


class ClipDecoder:
    """The VAE side of one clip.

    What fails in the media stream or in an artifact ends that alone: decoding and the other artifacts go on.
    """

    def __init__(
        self,
        models: VaeModels,
        device: torch.device,
        clip: ClipSpec,
        artifact_directory: Path | None,
        artifacts: Collection[str],
        *,
        video_bit_rate: int,
        video_encoder: str | None,
    ) -> None:
        """Opens the encoders and, if there is a directory, the artifacts of these names."""
        self._clip = clip
        self._video = VideoStream(models.video, models.video_statistics, device)
        self._audio = AudioStream(models.audio, models.audio_statistics, device, num_audio_latents(clip.num_frames))
        self._num_samples = 0
        self.stream_failure = ""
        """Why the media stream ended before the clip; empty while it has not."""
        makers: dict[str, Maker] = {
            FRAMES: partial(FramesFile, width=clip.width, height=clip.height),
            **{name: partial(SoundFile, name=name) for name in (SOUND, REFINED_SOUND)},
            **{name: partial(LatentsFile, clip=clip, name=name) for name in (LATENTS, REFINED_LATENTS)},
        }
        self._lane: MediaLane | None = None
        try:
            self._lane = lane = MediaLane(clip, video_bit_rate, video_encoder)
            makers[STREAM] = StreamFile
            makers |= {name: partial(FinalFile, video=lane.video_track, name=name) for name in (FINAL, REFINED)}
        except MuxError as error:
            self.stream_failure = error.message
            makers |= dict.fromkeys(_OF_THE_STREAM, _without_stream(error.message))
        self.start = None if self._lane is None else self._lane.start
        """The start of the stream; None if there is no stream."""
        self._artifacts = ArtifactSet(
            artifact_directory, {name: make for name, make in makers.items() if name in artifacts}
        )
        if self.start is not None:
            self._artifacts.add_media(self.start.data)

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
        Raises DeviceMemoryError, PhaseError, and VerbCancelled within one decode of the caller's leaving.
        """
        try:
            pictures = [to_rgb8(frames) for frames in self._video.push(video)]
            if chunk.is_tail:
                pictures.append(to_rgb8(self._video.flush()))
            poll(cancelled)
            pcm = to_pcm(self._audio.push(audio))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise DeviceMemoryError(
                f"chunk {chunk.index} of a {self._clip.width}x{self._clip.height} clip does not fit in memory: {error}"
            ) from error
        self._num_samples += pcm.shape[1]
        self._stream(chunk, pictures, pcm, emit, cancelled)
        # What nobody is waiting for comes after what somebody is.
        self._artifacts.add_latents(to_array(video), to_array(audio))
        self._artifacts.add_sound(pcm)
        for frame in _each_frame(pictures):
            poll(cancelled)
            self._artifacts.add_picture(frame)

    def finish(self) -> list[ArtifactFile]:
        """Completes the artifacts of a clip whose chunks have all been decoded; returns those that are whole."""
        return self._artifacts.finish(self._audio.statistics.divisor)

    @property
    def failures(self) -> list[ArtifactFailure]:
        """Artifacts that were given up."""
        return self._artifacts.failures

    def sound_report(self) -> SoundReport:
        """What was measured on the soundtrack."""
        return self._audio.statistics.report()

    def close(self) -> None:
        """Removes artifacts that are not complete."""
        self._artifacts.discard()

    def _stream(
        self,
        chunk: Chunk,
        pictures: Sequence[npt.NDArray[np.uint8]],
        pcm: npt.NDArray[np.float32],
        emit: Callable[[MediaFragment], None],
        cancelled: Cancelled,
    ) -> None:
        """Encodes what was decoded and emits what can be played; ends the stream if an encoder fails."""
        if self._lane is None:
            return
        try:
            self._lane.add_sound(pcm, is_last=chunk.is_tail)
            for frame in _each_frame(pictures):
                poll(cancelled)
                self._artifacts.add_packet(self._lane.add_picture(frame))
            num_frames = muxable_frames(decoded_frames(chunk), self._num_samples, is_final=chunk.is_tail)
            made = self._lane.take(num_frames, is_final=chunk.is_tail)
        except MuxError as error:
            self._lane = None
            self.stream_failure = error.message
            for name in _OF_THE_STREAM:
                self._artifacts.give_up(name, _no_stream(error.message))
            return
        for fragment in made:
            emit(fragment)
            self._artifacts.add_media(fragment.data)


def _no_stream(reason: str) -> str:
    return f"there is no whole stream to make it of: {reason}"


def _without_stream(reason: str) -> Maker:
    """Starts nothing: an artifact of a stream that there is not."""

    def refuse(directory: Path) -> Artifact:
        raise MuxError(_no_stream(reason))

    return refuse


def _each_frame(pictures: Sequence[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    for frames in pictures:
        yield from frames
