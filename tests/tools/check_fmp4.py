"""Judges a fragmented MP4 (init segment and fragments, joined) against the media rules.

    python tests/tools/check_fmp4.py FILE [--frames N] [--samples N]

prints one line per violation and a summary; the exit status is 1 if there is any. Tests call `violations`. The boxes
are read here from scratch, not with the code that wrote them.
"""

from __future__ import annotations

import argparse
import io
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av

FPS = 24
GOP_FRAMES = 17
SAMPLE_RATE = 32_000
AAC_FRAME_SAMPLES = 1024


@dataclass
class Track:
    """What the boxes say about one track."""

    kind: str
    """"vide" or "soun"."""
    timescale: int
    """Units per second."""
    codec: str = ""
    """RFC 6381 name, as the decoder configuration spells it."""
    edits: list[tuple[int, int]] = field(default_factory=list)
    """(duration in movie units, media time) of each edit."""
    decode_times: list[int] = field(default_factory=list)
    """`tfdt` of each fragment with this track."""
    durations: list[int] = field(default_factory=list)
    """Of each sample."""
    sync_samples: list[int] = field(default_factory=list)
    """Indices of the samples at which decoding can start."""
    composition_offsets: set[int] = field(default_factory=set)
    """All that occur."""


@dataclass
class Movie:
    """What the boxes say."""

    top: list[str]
    """Kinds of the top-level boxes."""
    timescale: int = 0
    """Movie units per second."""
    tracks: dict[int, Track] = field(default_factory=dict)
    """By track id."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the structure itself."""


class Reader:
    """Big-endian numbers out of a box."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def u(self, size: int) -> int:
        """The next unsigned number of `size` bytes."""
        value = int.from_bytes(self._data[self._at : self._at + size])
        self._at += size
        return value

    def i(self, size: int) -> int:
        """The next signed number of `size` bytes."""
        value = int.from_bytes(self._data[self._at : self._at + size], signed=True)
        self._at += size
        return value

    def skip(self, size: int) -> None:
        """Passes over `size` bytes."""
        self._at += size


def boxes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(kind, payload) of the boxes in a row. Raises ValueError at one that is cut off."""
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            raise ValueError(f"{len(data) - at} stray bytes at {at}")
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        header = 8
        if size == 1:
            size, header = int.from_bytes(data[at + 8 : at + 16]), 16
        elif size == 0:
            size = len(data) - at
        if size < header or at + size > len(data):
            raise ValueError(f"box {kind!r} at {at} is cut off")
        yield kind.decode("latin1"), data[at + header : at + size]
        at += size


def child(data: bytes, *path: str) -> bytes | None:
    """Payload of the first box on a path below `data`."""
    for kind in path:
        found = next((payload for name, payload in boxes(data) if name == kind), None)
        if found is None:
            return None
        data = found
    return data


def descriptor(data: bytes, tag: int) -> bytes:
    """Payload of the MPEG-4 descriptor at the start of `data`, which must have that tag."""
    assert data[0] == tag, f"descriptor {data[0]}, expected {tag}"
    size, at = 0, 1
    while True:
        size = size << 7 | data[at] & 0x7F
        at += 1
        if not data[at - 1] & 0x80:
            return data[at : at + size]


def read_movie(data: bytes) -> Movie:
    """Reads the structure of init segment and fragments."""
    try:
        top = list(boxes(data))
    except ValueError as error:
        return Movie(top=[], problems=[str(error)])
    movie = Movie(top=[kind for kind, _ in top])
    defaults: dict[int, tuple[int, int]] = {}
    for kind, payload in top:
        if kind == "moov":
            _read_moov(payload, movie, defaults)
        elif kind == "moof":
            _read_moof(payload, movie, defaults)
    return movie


def _time_header(payload: bytes) -> Reader:
    """A reader behind the creation times of `mvhd`, `tkhd` or `mdhd`."""
    reader = Reader(payload)
    version = reader.u(1)
    reader.skip(3 + (16 if version else 8))
    return reader


def _read_moov(moov: bytes, movie: Movie, defaults: dict[int, tuple[int, int]]) -> None:
    movie.timescale = _time_header(child(moov, "mvhd") or b"").u(4)
    for kind, payload in boxes(moov):
        if kind == "trak":
            track_id = _time_header(child(payload, "tkhd") or b"").u(4)
            timescale = _time_header(child(payload, "mdia", "mdhd") or b"").u(4)
            handler = (child(payload, "mdia", "hdlr") or b"")[8:12].decode()
            track = Track(kind=handler, timescale=timescale)
            edits = child(payload, "edts", "elst")
            if edits is not None:
                reader = Reader(edits)
                version = reader.u(1)
                reader.skip(3)
                for _ in range(reader.u(4)):
                    size = 8 if version else 4
                    track.edits.append((reader.u(size), reader.i(size)))
                    reader.skip(4)
            descriptions = child(payload, "mdia", "minf", "stbl", "stsd") or b""
            entries = dict(boxes(descriptions[8:]))
            if "avc1" in entries:
                track.codec = f"avc1.{(child(entries['avc1'][78:], 'avcC') or b'')[1:4].hex()}"
            elif "mp4a" in entries:
                esds = child(entries["mp4a"][28:], "esds") or b""
                decoder = descriptor(descriptor(esds[4:], 0x03)[3:], 0x04)
                track.codec = f"mp4a.{decoder[0]:x}.{descriptor(decoder[13:], 0x05)[0] >> 3}"
            movie.tracks[track_id] = track
    for kind, payload in boxes(child(moov, "mvex") or b""):
        if kind == "trex":
            reader = Reader(payload)
            reader.skip(4)
            track_id, _, duration, _, flags = (reader.u(4) for _ in range(5))
            defaults[track_id] = (duration, flags)
    if not defaults:
        movie.problems.append("no mvex")


def _read_moof(moof: bytes, movie: Movie, defaults: dict[int, tuple[int, int]]) -> None:
    number = movie.top[: movie.top.index("moof") + 1].count("moof")
    for kind, payload in boxes(moof):
        if kind != "traf":
            continue
        header = Reader(child(payload, "tfhd") or b"")
        flags = header.u(4) & 0xFFFFFF
        track = movie.tracks[track_id := header.u(4)]
        if not flags & 0x020000:
            movie.problems.append(f"track {track_id}, fragment {number}: default-base-is-moof is not set")
        duration, sample_flags = defaults[track_id]
        header.skip(8 * bool(flags & 0x1) + 4 * bool(flags & 0x2))
        duration = header.u(4) if flags & 0x8 else duration
        header.skip(4 * bool(flags & 0x10))
        sample_flags = header.u(4) if flags & 0x20 else sample_flags
        times = Reader(child(payload, "tfdt") or b"")
        version = times.u(1)
        times.skip(3)
        start = times.u(8 if version else 4)
        if start != sum(track.durations):
            movie.problems.append(f"track {track_id}: tfdt {start}, expected {sum(track.durations)}")
        track.decode_times.append(start)
        for run in (run for name, run in boxes(payload) if name == "trun"):
            _read_run(run, track, duration, sample_flags)


def _read_run(run: bytes, track: Track, default_duration: int, default_flags: int) -> None:
    reader = Reader(run)
    version_flags = reader.u(4)
    count = reader.u(4)
    reader.skip(4 * bool(version_flags & 0x1))
    first_flags = reader.u(4) if version_flags & 0x4 else None
    for i in range(count):
        duration = reader.u(4) if version_flags & 0x100 else default_duration
        reader.skip(4 * bool(version_flags & 0x200))
        flags = default_flags if i or first_flags is None else first_flags
        flags = reader.u(4) if version_flags & 0x400 else flags
        offset = reader.i(4) if version_flags & 0x800 else 0
        if not flags & 0x10000:
            track.sync_samples.append(len(track.durations))
        track.durations.append(duration)
        track.composition_offsets.add(offset)


def violations(data: bytes, *, frames: int | None = None, samples: int | None = None) -> list[str]:
    """What is wrong with a joined stream.

    frames and samples: what the whole clip must have, if it is whole; 0 frames are those of a stream of sound alone.
    """
    movie = read_movie(data)
    if not movie.top:
        return movie.problems
    bad = list(movie.problems)
    if movie.top[:2] != ["ftyp", "moov"] or set(movie.top[2:]) - {"moof", "mdat"}:
        bad.append(f"the top-level boxes are {movie.top[:4]}…")
    kinds = sorted(track.kind for track in movie.tracks.values())
    if kinds != (["soun"] if frames == 0 else ["soun", "vide"]):
        return [*bad, f"the tracks are {kinds}"]
    for track in movie.tracks.values():
        if track.kind == "vide":
            bad += _video_violations(data, track, frames)
        else:
            bad += _audio_violations(data, movie, track, samples)
    return bad


def _video_violations(data: bytes, video: Track, frames: int | None) -> list[str]:
    bad = []
    if video.composition_offsets - {0}:
        bad.append(f"composition offsets {sorted(video.composition_offsets)[:4]}: B-frames or a shift")
    wrong = [i for i, duration in enumerate(video.durations) if Fraction(duration, video.timescale) != Fraction(1, FPS)]
    if wrong:
        bad.append(f"{len(wrong)} frames do not last 1/{FPS} s, the first is {wrong[0]}")
    if video.sync_samples != list(range(0, len(video.durations), GOP_FRAMES)):
        bad.append(f"IDR pictures at {video.sync_samples[:5]}, expected every {GOP_FRAMES}")
    if video.decode_times[:1] != [0]:
        bad.append(f"the first video tfdt is {video.decode_times[:1]}, not 0")
    if frames is not None and len(video.durations) != frames:
        bad.append(f"{len(video.durations)} video samples, expected {frames}")
    with av.open(io.BytesIO(data)) as container:
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)]
    off = [i for i, time in enumerate(times) if time != Fraction(i, FPS)]
    if off:
        bad.append(f"{len(off)} decoded frames are off the grid, the first is {off[0]} at {float(times[off[0]]):.5f} s")
    if len(times) != len(video.durations):
        bad.append(f"{len(times)} of {len(video.durations)} frames decode")
    return bad


def _audio_violations(data: bytes, movie: Movie, audio: Track, samples: int | None) -> list[str]:
    bad = []
    if audio.timescale != SAMPLE_RATE:
        bad.append(f"the audio timescale is {audio.timescale}")
    if len(audio.edits) != 1:
        return [*bad, f"the audio edit list is {audio.edits}"]
    duration, priming = audio.edits[0]
    declared = sum(audio.durations) - priming
    if samples is not None:
        if declared != samples:
            bad.append(f"the audio packets declare {declared} samples behind the priming, expected {samples}")
        if Fraction(duration, movie.timescale) != Fraction(samples, SAMPLE_RATE):
            bad.append(f"the audio edit lasts {duration} of {movie.timescale}, expected {samples} of {SAMPLE_RATE}")
    if len(audio.sync_samples) != len(audio.durations):
        bad.append("an audio packet is not marked as a place to start")
    with av.open(io.BytesIO(data)) as container:
        decoded = list(container.decode(audio=0))
    if decoded and decoded[0].pts != 0:
        bad.append(f"the first sound is at {float(decoded[0].pts * decoded[0].time_base):.5f} s")
    declared = max(0, declared)  # a prefix may have none yet, or only a part of the priming
    surplus = sum(frame.samples for frame in decoded) - declared
    # The last AAC frame is padded to its full length; nothing else may be there.
    if not 0 <= surplus < AAC_FRAME_SAMPLES:
        bad.append(f"{declared + surplus} audio samples decode, {declared} are declared")
    return bad


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Judges a fragmented MP4 against the media rules.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--frames", type=int, help="frames of the whole clip")
    parser.add_argument("--samples", type=int, help="samples per channel of the whole clip")
    arguments = parser.parse_args()
    data = arguments.file.read_bytes()
    bad = violations(data, frames=arguments.frames, samples=arguments.samples)
    for message in bad:
        print("FAIL", message)
    movie = read_movie(data)
    tracks = (f"{track.kind} {track.codec}: {len(track.durations)} samples" for track in movie.tracks.values())
    print(f"{movie.top.count('moof')} fragments; {'; '.join(tracks)}; {len(bad)} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
