"""ISO base media (MP4) boxes: packets in, bytes out.

Two shapes of file are written with the same track description: a stream (`init_segment`, then `fragment`s) and a whole
file (`file_header`, then the media). Only what one H.264 and one AAC track need, or in a stream the AAC track alone.
Times are exact integers: the movie and the video track count 96000 ticks a second, the audio track counts samples.
Source: ISO/IEC 14496-12 (boxes), 14496-14 (mp4a, esds), 14496-15 (avc1, avcC).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from core.clock import TICKS_PER_FRAME, TICKS_PER_SAMPLE, TICKS_PER_SECOND
from core.geometry import AUDIO_CHANNELS, SAMPLE_RATE

VIDEO_TRACK_ID = 1
AUDIO_TRACK_ID = 2

_SYNC_FLAGS = 0x02000000
"""Sample flags of a picture that depends on no other, and of every audio packet."""
_DEPENDENT_FLAGS = 0x01010000
"""Sample flags of a picture that depends on others."""
_UNITY_MATRIX = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
_LANGUAGE_UNDETERMINED = 0x55C4
_BT709 = 1
"""Code point of BT.709 primaries, transfer and matrix alike (ISO/IEC 23091-2)."""


@dataclass(frozen=True)
class Packet:
    """One encoded unit in the form MP4 stores it."""

    data: bytes
    """Length-prefixed NAL units of one picture, or one raw AAC frame."""
    duration: int
    """In units of its track: ticks of a picture, samples of an AAC frame."""
    is_sync: bool
    """Whether decoding can start here."""


@dataclass(frozen=True)
class VideoTrack:
    """What a decoder must know before the first picture."""

    width: int
    """Pixels."""
    height: int
    """Pixels."""
    decoder_configuration: bytes
    """AVCDecoderConfigurationRecord: the content of `avcC`."""
    num_frames: int
    """Frames of the whole clip."""

    @property
    def duration_ticks(self) -> int:
        """Ticks the track plays for."""
        return self.num_frames * TICKS_PER_FRAME


@dataclass(frozen=True)
class AudioTrack:
    """What a decoder must know before the first sound."""

    decoder_configuration: bytes
    """AudioSpecificConfig."""
    bit_rate: int
    """Bits per second."""
    priming_samples: int
    """Samples that the decoder yields before the first true one; the edit list hides them."""
    num_samples: int
    """True samples of the whole clip, per channel."""

    @property
    def media_samples(self) -> int:
        """Samples of all packets, priming included."""
        return self.priming_samples + self.num_samples

    @property
    def duration_ticks(self) -> int:
        """Ticks the track plays for."""
        return self.num_samples * TICKS_PER_SAMPLE


@dataclass(frozen=True)
class Run:
    """Consecutive packets of one track in a fragment."""

    track_id: int
    """Which track."""
    decode_time: int
    """Time of the first packet in units of its track, from the first packet of the track."""
    packets: Sequence[Packet]
    """At least one."""


@dataclass(frozen=True)
class SampleTable:
    """Where the packets of a track lie in a whole file."""

    sizes: Sequence[int]
    """Bytes of each packet."""
    durations: Sequence[int]
    """Duration of each packet in units of its track."""
    sync_samples: Sequence[int] | None
    """Numbers, from 1, of the packets at which decoding can start; None: all of them."""
    chunk_offsets: Sequence[int]
    """File position of each chunk of consecutive packets."""
    chunk_lengths: Sequence[int]
    """Packets in each chunk."""


_EMPTY_TABLE = SampleTable(sizes=(), durations=(), sync_samples=None, chunk_offsets=(), chunk_lengths=())


def init_segment(video: VideoTrack, audio: AudioTrack) -> bytes:
    """`ftyp` and `moov` of a stream: both tracks, no packets; `mehd` states how long the whole clip will be."""
    moov = _box(
        "moov",
        # Durations here count what `moov` itself holds: nothing.
        _mvhd(0),
        _video_trak(video, 0, _EMPTY_TABLE),
        _audio_trak(audio, 0, 0, _EMPTY_TABLE),
        _mvex(_movie_duration(video, audio), VIDEO_TRACK_ID, AUDIO_TRACK_ID),
    )
    return _ftyp("iso6", "iso6", "mp41", "avc1") + moov


def sound_init_segment(audio: AudioTrack) -> bytes:
    """`ftyp` and `moov` of a stream without pictures."""
    moov = _box("moov", _mvhd(0), _audio_trak(audio, 0, 0, _EMPTY_TABLE), _mvex(audio.duration_ticks, AUDIO_TRACK_ID))
    return _ftyp("iso6", "iso6", "mp41") + moov


def fragment(sequence_number: int, runs: Sequence[Run]) -> bytes:
    """One `moof` with its `mdat`; data offsets count from the `moof`, so fragments can be joined and moved freely.

    sequence_number: from 1, rising.
    """
    # The size of `moof` does not depend on the offsets in it, so it is built twice.
    offset = len(_moof(sequence_number, runs, 0)) + 8
    moof = _moof(sequence_number, runs, offset)
    return moof + _box("mdat", *(packet.data for run in runs for packet in run.packets))


def file_header(video: VideoTrack, audio: AudioTrack, video_table: SampleTable, audio_table: SampleTable) -> bytes:
    """`ftyp` and `moov` of a whole file; its length depends on the number of packets and chunks, not on the offsets."""
    moov = _box(
        "moov",
        _mvhd(_movie_duration(video, audio)),
        _video_trak(video, video.duration_ticks, video_table),
        _audio_trak(audio, audio.duration_ticks, audio.media_samples, audio_table),
    )
    return _ftyp("isom", "isom", "iso2", "mp41", "avc1") + moov


def mdat_header(num_bytes: int) -> bytes:
    """What comes before `num_bytes` of media in a whole file."""
    return struct.pack(">I4s", 8 + num_bytes, b"mdat")


def _box(kind: str, *payload: bytes) -> bytes:
    body = b"".join(payload)
    return struct.pack(">I4s", 8 + len(body), kind.encode()) + body


def _full_box(kind: str, version: int, flags: int, *payload: bytes) -> bytes:
    return _box(kind, struct.pack(">I", version << 24 | flags), *payload)


def _ftyp(major: str, *compatible: str) -> bytes:
    return _box("ftyp", major.encode(), struct.pack(">I", 0x200), *(brand.encode() for brand in compatible))


def _movie_duration(video: VideoTrack, audio: AudioTrack) -> int:
    return max(video.duration_ticks, audio.duration_ticks)


def _mvex(duration: int, *track_ids: int) -> bytes:
    return _box(
        "mvex",
        _full_box("mehd", 0, 0, struct.pack(">I", duration)),
        # No defaults: every run states durations, sizes and flags of its packets.
        *(_full_box("trex", 0, 0, struct.pack(">5I", track_id, 1, 0, 0, 0)) for track_id in track_ids),
    )


def _mvhd(duration: int) -> bytes:
    return _full_box(
        "mvhd",
        0,
        0,
        struct.pack(">IIII", 0, 0, TICKS_PER_SECOND, duration),
        struct.pack(">IH10x", 0x10000, 0x100),  # normal rate, full volume
        _UNITY_MATRIX,
        struct.pack(">24xI", AUDIO_TRACK_ID + 1),
    )


def _video_trak(track: VideoTrack, duration: int, table: SampleTable) -> bytes:
    visual_entry = struct.pack(
        ">6xH16xHHIIIH32sHh", 1, track.width, track.height, 0x480000, 0x480000, 0, 1, b"", 0x18, -1
    )
    colour = struct.pack(">4sHHHB", b"nclx", _BT709, _BT709, _BT709, 0)  # limited range, as the encoder is told
    entry = _box("avc1", visual_entry, _box("avcC", track.decoder_configuration), _box("colr", colour))
    return _box(
        "trak",
        _tkhd(VIDEO_TRACK_ID, duration, 0, track.width, track.height),
        _mdia(
            "vide",
            "VideoHandler",
            TICKS_PER_SECOND,
            duration,
            _full_box("vmhd", 0, 1, struct.pack(">4H", 0, 0, 0, 0)),
            _stbl(entry, table),
        ),
    )


def _audio_trak(track: AudioTrack, duration: int, media_duration: int, table: SampleTable) -> bytes:
    audio_entry = struct.pack(">6xH8xHHHHI", 1, AUDIO_CHANNELS, 16, 0, 0, SAMPLE_RATE << 16)
    entry = _box("mp4a", audio_entry, _full_box("esds", 0, 0, _es_descriptor(track)))
    # One edit: play everything after the priming, for exactly as long as there is true sound.
    edit = struct.pack(">IIiHH", 1, track.duration_ticks, track.priming_samples, 1, 0)
    return _box(
        "trak",
        _tkhd(AUDIO_TRACK_ID, duration, 0x100, 0, 0),
        _box("edts", _full_box("elst", 0, 0, edit)),
        _mdia(
            "soun",
            "SoundHandler",
            SAMPLE_RATE,
            media_duration,
            _full_box("smhd", 0, 0, bytes(4)),
            _stbl(entry, table),
        ),
    )


def _tkhd(track_id: int, duration: int, volume: int, width: int, height: int) -> bytes:
    return _full_box(
        "tkhd",
        0,
        3,  # enabled, in the movie
        struct.pack(">IIIII", 0, 0, track_id, 0, duration),
        struct.pack(">8xHHHH", 0, 0, volume, 0),
        _UNITY_MATRIX,
        struct.pack(">II", width << 16, height << 16),
    )


def _mdia(handler: str, name: str, timescale: int, duration: int, media_header: bytes, stbl: bytes) -> bytes:
    dref = _full_box("dref", 0, 0, struct.pack(">I", 1), _full_box("url ", 0, 1))  # the media is in this file
    return _box(
        "mdia",
        _full_box("mdhd", 0, 0, struct.pack(">IIIIHH", 0, 0, timescale, duration, _LANGUAGE_UNDETERMINED, 0)),
        _full_box("hdlr", 0, 0, struct.pack(">I4s12x", 0, handler.encode()), name.encode() + b"\0"),
        _box("minf", media_header, _box("dinf", dref), stbl),
    )


def _stbl(sample_entry: bytes, table: SampleTable) -> bytes:
    times = _runs_of_equal(table.durations)
    chunks, first_chunk = [], 1
    for count, length in _runs_of_equal(table.chunk_lengths):
        chunks.append((first_chunk, length))
        first_chunk += count
    return _box(
        "stbl",
        _full_box("stsd", 0, 0, struct.pack(">I", 1), sample_entry),
        _full_box("stts", 0, 0, struct.pack(">I", len(times)), *(struct.pack(">II", *time) for time in times)),
        _full_box("stsc", 0, 0, struct.pack(">I", len(chunks)), *(struct.pack(">III", *chunk, 1) for chunk in chunks)),
        _full_box("stsz", 0, 0, struct.pack(">II", 0, len(table.sizes)), _words(table.sizes)),
        _full_box("stco", 0, 0, struct.pack(">I", len(table.chunk_offsets)), _words(table.chunk_offsets)),
        b""
        if table.sync_samples is None
        else _full_box("stss", 0, 0, struct.pack(">I", len(table.sync_samples)), _words(table.sync_samples)),
    )


def _es_descriptor(track: AudioTrack) -> bytes:
    """The elementary stream descriptor: MPEG-4 audio, its rate and its decoder configuration."""
    specific = _descriptor(0x05, track.decoder_configuration)
    decoder = struct.pack(">BBBHII", 0x40, 0x15, 0, 0, track.bit_rate, track.bit_rate) + specific
    return _descriptor(
        0x03, struct.pack(">HB", AUDIO_TRACK_ID, 0) + _descriptor(0x04, decoder) + _descriptor(0x06, b"\2")
    )


def _descriptor(tag: int, payload: bytes) -> bytes:
    assert len(payload) < 0x80, f"a descriptor of {len(payload)} bytes needs a longer length field"
    return bytes((tag, len(payload))) + payload


def _moof(sequence_number: int, runs: Sequence[Run], data_offset: int) -> bytes:
    trafs = []
    for run in runs:
        samples = b"".join(
            struct.pack(">III", packet.duration, len(packet.data), _SYNC_FLAGS if packet.is_sync else _DEPENDENT_FLAGS)
            for packet in run.packets
        )
        trafs.append(
            _box(
                "traf",
                _full_box("tfhd", 0, 0x020000, struct.pack(">I", run.track_id)),  # default-base-is-moof
                _full_box("tfdt", 1, 0, struct.pack(">Q", run.decode_time)),
                # Data offset; duration, size and flags of every packet.
                _full_box("trun", 0, 0x000701, struct.pack(">II", len(run.packets), data_offset), samples),
            )
        )
        data_offset += sum(len(packet.data) for packet in run.packets)
    return _box("moof", _full_box("mfhd", 0, 0, struct.pack(">I", sequence_number)), *trafs)


def _runs_of_equal(values: Sequence[int]) -> list[tuple[int, int]]:
    """(count, value) of each run of equal values."""
    return [(len(list(run)), value) for value, run in groupby(values)]


def _words(values: Sequence[int]) -> bytes:
    return struct.pack(f">{len(values)}I", *values)
