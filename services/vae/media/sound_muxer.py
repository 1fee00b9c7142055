"""Packets to the fragments of a stream without pictures: each as long as a chunk of the clip whose sound it is."""

from __future__ import annotations

from core.clock import TICKS_PER_SAMPLE
from core.geometry import FRAMES_PER_CHUNK
from h3stream.errors import MuxError
from services.vae.media.boxes import AUDIO_TRACK_ID, AudioTrack, Packet, Run, fragment, sound_init_segment
from services.vae.media.muxer import MediaFragment, takes_sound


class SoundMuxer:
    """The fragmented stream of one clip's sound. A fragment ends where the stream with pictures would end one."""

    def __init__(self, audio: AudioTrack) -> None:
        self._audio = audio
        self._packets: list[Packet] = []
        self._start = self._time = 0  # media time: priming included
        self._num_fragments = 0

    def init_segment(self) -> bytes:
        """The start of the stream."""
        return sound_init_segment(self._audio)

    def add(self, packets: list[Packet]) -> list[MediaFragment]:
        """Takes the next packets; the fragments that are complete with them."""
        fragments = []
        for packet in packets:
            self._packets.append(packet)
            self._time += packet.duration
            last_frame = (self._num_fragments + 1) * FRAMES_PER_CHUNK - 1
            if not takes_sound(last_frame, self._time, self._audio.priming_samples):
                fragments.append(self._close())
        return fragments

    def finish(self) -> list[MediaFragment]:
        """The rest. Raises MuxError if the clip has another length than was announced."""
        if self._time != self._audio.media_samples:
            raise MuxError(f"the stream ends with {self._time} samples, expected {self._audio.media_samples}")
        return [self._close()] if self._packets else []

    def _close(self) -> MediaFragment:
        first, total = (max(0, time - self._audio.priming_samples) for time in (self._start, self._time))
        made = MediaFragment(
            data=fragment(self._num_fragments + 1, [Run(AUDIO_TRACK_ID, self._start, self._packets)]),
            fragment_index=self._num_fragments,
            first_frame=0,
            num_frames=0,
            num_samples_total=total,
            is_keyframe=True,
            start_ticks=first * TICKS_PER_SAMPLE,
            duration_ticks=(total - first) * TICKS_PER_SAMPLE,
        )
        self._packets, self._start = [], self._time
        self._num_fragments += 1
        return made
