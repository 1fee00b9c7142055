"""The lossy lane of one clip: pictures and sound to the packets and fragments of its media stream, or sound alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.budget import AAC_BIT_RATE
from core.geometry import num_samples
from h3stream.request import ClipSpec
from services.vae.media.boxes import AudioTrack, Packet, VideoTrack
from services.vae.media.encoders import AacEncoder, open_h264_encoder
from services.vae.media.muxer import FragmentMuxer, MediaFragment, mime_type, sound_mime_type
from services.vae.media.sound_muxer import SoundMuxer


@dataclass(frozen=True)
class StreamStart:
    """The init segment and what a player is told with it."""

    data: bytes
    """`ftyp` and `moov`."""
    mime_type: str
    """With the codecs string."""
    video_encoder: str
    """Name of the H.264 encoder in use; empty without pictures."""
    audio_encoder: str
    """Name of the AAC encoder in use."""


class MediaLane:
    """Encoders and muxer of one clip. Every method raises MuxError if one of them fails; then the lane is of no use."""

    def __init__(self, clip: ClipSpec, video_bit_rate: int, video_encoder: str | None) -> None:
        """video_encoder: the only H.264 encoder to use; None takes the first that works."""
        self._h264 = open_h264_encoder(clip.width, clip.height, video_bit_rate, video_encoder)
        self._aac = AacEncoder()
        self.video_track = VideoTrack(
            width=clip.width,
            height=clip.height,
            decoder_configuration=self._h264.decoder_configuration,
            num_frames=clip.num_frames,
        )
        """What a decoder must know of the pictures."""
        audio_track = _audio_track(self._aac, clip)
        self._muxer = FragmentMuxer(self.video_track, audio_track)
        self.start = StreamStart(
            data=self._muxer.init_segment(),
            mime_type=mime_type(self.video_track, audio_track),
            video_encoder=self._h264.name,
            audio_encoder=self._aac.name,
        )
        """The start of the stream."""

    def add_sound(self, pcm: npt.NDArray[np.float32], *, is_last: bool) -> None:
        """Encodes the next samples, `[2, S]`."""
        packets = self._aac.encode(pcm)
        if is_last:
            packets += self._aac.flush()
        self._muxer.add([], packets)

    def add_picture(self, rgb: npt.NDArray[np.uint8]) -> Packet:
        """Encodes the next frame, `[height, width, 3]`, and returns its packet."""
        packet = self._h264.encode(rgb)
        self._muxer.add([packet], [])
        return packet

    def take(self, num_frames: int, *, is_final: bool) -> list[MediaFragment]:
        """The fragments that can be played once `num_frames` frames of the clip may leave."""
        return list(self._muxer.take(num_frames, is_final=is_final))


class SoundLane:
    """Encoder and muxer of one clip's sound alone. Its methods raise MuxError as those of a MediaLane do."""

    def __init__(self, clip: ClipSpec) -> None:
        self._aac = AacEncoder()
        track = _audio_track(self._aac, clip)
        self._muxer = SoundMuxer(track)
        self.start = StreamStart(
            data=self._muxer.init_segment(),
            mime_type=sound_mime_type(track),
            video_encoder="",
            audio_encoder=self._aac.name,
        )
        """The start of the stream."""

    def add(self, pcm: npt.NDArray[np.float32], *, is_last: bool) -> list[MediaFragment]:
        """Encodes the next samples, `[2, S]`; the fragments that are complete with them."""
        made = self._muxer.add(self._aac.encode(pcm))
        if is_last:
            made += [*self._muxer.add(self._aac.flush()), *self._muxer.finish()]
        return made


def _audio_track(encoder: AacEncoder, clip: ClipSpec) -> AudioTrack:
    return AudioTrack(
        decoder_configuration=encoder.decoder_configuration,
        bit_rate=AAC_BIT_RATE,
        priming_samples=encoder.priming_samples,
        num_samples=num_samples(clip.num_frames),
    )
