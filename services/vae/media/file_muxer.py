"""Packets to one whole file: a header that players find first, then both tracks interleaved chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.geometry import FRAMES_PER_CHUNK
from services.vae.media.boxes import AudioTrack, Packet, SampleTable, VideoTrack, file_header, mdat_header
from services.vae.media.muxer import takes_sound


@dataclass
class PacketIndex:
    """Sizes, durations and sync flags of the packets of one track, whose bytes lie elsewhere in the same order."""

    sizes: list[int] = field(default_factory=list)
    """Bytes."""
    durations: list[int] = field(default_factory=list)
    """In units of the track."""
    syncs: list[bool] = field(default_factory=list)
    """Whether decoding can start there."""

    def add(self, packet: Packet) -> None:
        """Notes the next packet."""
        self.sizes.append(len(packet.data))
        self.durations.append(packet.duration)
        self.syncs.append(packet.is_sync)


@dataclass(frozen=True)
class FileLayout:
    """What a whole file consists of."""

    header: bytes
    """Everything before the media."""
    pieces: Sequence[tuple[int, int]]
    """(bytes of pictures, bytes of sound) of each interleaved piece, pictures first."""


def lay_out(video: VideoTrack, audio: AudioTrack, video_index: PacketIndex, audio_index: PacketIndex) -> FileLayout:
    """Where everything goes in a file of these packets."""
    groups = list(_interleave(video_index, audio_index, audio.priming_samples))
    pieces = []
    frame, sound = 0, 0
    for num_frames, num_sounds in groups:
        pieces.append(
            (
                sum(video_index.sizes[frame : frame + num_frames]),
                sum(audio_index.sizes[sound : sound + num_sounds]),
            )
        )
        frame, sound = frame + num_frames, sound + num_sounds
    media_bytes = sum(map(sum, pieces))

    def header(first_byte: int) -> bytes:
        ends = list(itertools.accumulate((size for piece in pieces for size in piece), initial=first_byte))
        return file_header(
            video,
            audio,
            SampleTable(
                sizes=video_index.sizes,
                durations=video_index.durations,
                sync_samples=[number for number, is_sync in enumerate(video_index.syncs, 1) if is_sync],
                chunk_offsets=ends[0:-1:2],
                chunk_lengths=[num_frames for num_frames, _ in groups],
            ),
            SampleTable(
                sizes=audio_index.sizes,
                durations=audio_index.durations,
                sync_samples=None,
                chunk_offsets=ends[1:-1:2],
                chunk_lengths=[num_sounds for _, num_sounds in groups],
            ),
        ) + mdat_header(media_bytes)

    # The length of the header does not depend on the offsets in it, so it is built twice.
    return FileLayout(header=header(len(header(0))), pieces=pieces)


def _interleave(video: PacketIndex, audio: PacketIndex, priming_samples: int) -> Iterator[tuple[int, int]]:
    """(pictures, sound packets) of each piece: a chunk's pictures and the sound that begins before their end."""
    sound, time = 0, 0
    for start in range(0, len(video.sizes), FRAMES_PER_CHUNK):
        stop = min(start + FRAMES_PER_CHUNK, len(video.sizes))
        first = sound
        while sound < len(audio.sizes) and (stop == len(video.sizes) or takes_sound(stop - 1, time, priming_samples)):
            time += audio.durations[sound]
            sound += 1
        yield stop - start, sound - first
