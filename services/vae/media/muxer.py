"""Packets to fragments: which packets leave together, and when.

A fragment starts at an IDR picture and holds its pictures and the sound that begins before their end, so the stream
plays at every prefix and neither track runs ahead. A fragment that would outgrow a message is cut between pictures.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from core.clock import TICKS_PER_FRAME, TICKS_PER_SAMPLE
from h3stream.errors import MuxError
from services.vae.media.boxes import (
    AUDIO_TRACK_ID,
    VIDEO_TRACK_ID,
    AudioTrack,
    Packet,
    Run,
    VideoTrack,
    fragment,
    init_segment,
)

MAX_PAYLOAD_BYTES = 900_000
"""Most media bytes of a fragment: with its headers and the message around it, below 1 MiB."""


@dataclass(frozen=True)
class MediaFragment:
    """One piece of the stream."""

    data: bytes
    """`moof` and `mdat`."""
    fragment_index: int
    """From 0."""
    first_frame: int
    """First frame, counted from 0."""
    num_frames: int
    """Number of frames."""
    num_samples_total: int
    """True samples per channel from the start of the stream to the end of this fragment."""
    is_keyframe: bool
    """Whether decoding can start here."""
    start_ticks: int
    """Time of the first frame, or of the first true sample where there are no pictures."""
    duration_ticks: int
    """Duration of the frames, or of the true samples."""


def mime_type(video: VideoTrack, audio: AudioTrack) -> str:
    """The media type with the codecs string, read from the decoder configurations (RFC 6381)."""
    return f'video/mp4; codecs="avc1.{video.decoder_configuration[1:4].hex()},{_sound_codec(audio)}"'


def sound_mime_type(audio: AudioTrack) -> str:
    """The media type of a stream without pictures."""
    return f'audio/mp4; codecs="{_sound_codec(audio)}"'


def _sound_codec(audio: AudioTrack) -> str:
    return f"mp4a.40.{audio.decoder_configuration[0] >> 3}"


def takes_sound(frame: int, media_time: int, priming_samples: int) -> bool:
    """Whether an audio packet at `media_time` (samples, priming included) begins before the end of a frame."""
    return (media_time - priming_samples) * TICKS_PER_SAMPLE < (frame + 1) * TICKS_PER_FRAME


class FragmentMuxer:
    """The fragmented stream of one clip."""

    def __init__(self, video: VideoTrack, audio: AudioTrack) -> None:
        self._video, self._audio = video, audio
        self._video_queue: deque[Packet] = deque()
        self._audio_queue: deque[Packet] = deque()
        self._next_frame = 0
        self._audio_time = 0
        self._num_fragments = 0

    def init_segment(self) -> bytes:
        """The start of the stream."""
        return init_segment(self._video, self._audio)

    def add(self, video: list[Packet], audio: list[Packet]) -> None:
        """Takes the next packets of both tracks."""
        self._video_queue.extend(video)
        self._audio_queue.extend(audio)

    def take(self, stop_frame: int, *, is_final: bool = False) -> list[MediaFragment]:
        """The fragments up to `stop_frame`, whose packets have been added; the last call takes all sound that is left.

        Raises MuxError if a single picture is too large for a fragment, or if the clip ends with something missing.
        """
        fragments = []
        pictures: list[Packet] = []
        sounds: list[Packet] = []
        num_bytes = 0
        while self._next_frame + len(pictures) < stop_frame:
            frame = self._next_frame + len(pictures)
            picture = self._video_queue.popleft()
            sound = self._take_sound(frame, everything=is_final and frame + 1 == stop_frame, ahead=sounds)
            added = len(picture.data) + sum(len(packet.data) for packet in sound)
            if added > MAX_PAYLOAD_BYTES:
                raise MuxError(f"frame {frame} has {added} bytes; a fragment holds at most {MAX_PAYLOAD_BYTES}")
            if pictures and (picture.is_sync or num_bytes + added > MAX_PAYLOAD_BYTES):
                fragments.append(self._close(pictures, sounds))
                pictures, sounds, num_bytes = [], [], 0
            pictures.append(picture)
            sounds += sound
            num_bytes += added
        if pictures:
            fragments.append(self._close(pictures, sounds))
        if is_final and (self._next_frame, self._audio_time) != (self._video.num_frames, self._audio.media_samples):
            raise MuxError(
                f"the stream ends with {self._next_frame} frames and {self._audio_time} samples, "
                f"expected {self._video.num_frames} and {self._audio.media_samples}"
            )
        return fragments

    def _take_sound(self, frame: int, *, everything: bool, ahead: list[Packet]) -> list[Packet]:
        """Sound packets that leave with a frame; `ahead` are those taken for this fragment before."""
        time = self._audio_time + sum(packet.duration for packet in ahead)
        taken = []
        while self._audio_queue and (everything or takes_sound(frame, time, self._audio.priming_samples)):
            taken.append(self._audio_queue.popleft())
            time += taken[-1].duration
        return taken

    def _close(self, pictures: list[Packet], sounds: list[Packet]) -> MediaFragment:
        runs = [Run(VIDEO_TRACK_ID, self._next_frame * TICKS_PER_FRAME, pictures)]
        if sounds:
            runs.append(Run(AUDIO_TRACK_ID, self._audio_time, sounds))
        self._audio_time += sum(packet.duration for packet in sounds)
        made = MediaFragment(
            data=fragment(self._num_fragments + 1, runs),
            fragment_index=self._num_fragments,
            first_frame=self._next_frame,
            num_frames=len(pictures),
            num_samples_total=max(0, self._audio_time - self._audio.priming_samples),
            is_keyframe=pictures[0].is_sync,
            start_ticks=self._next_frame * TICKS_PER_FRAME,
            duration_ticks=len(pictures) * TICKS_PER_FRAME,
        )
        self._next_frame += len(pictures)
        self._num_fragments += 1
        return made
