from __future__ import annotations

import struct

from services.vae.media.boxes import AudioTrack, Packet, Run, VideoTrack, fragment, init_segment, sound_init_segment
from services.vae.media.file_muxer import PacketIndex, lay_out
from tests.tools.check_fmp4 import boxes, child, read_movie

VIDEO = VideoTrack(96, 64, bytes((1, 100, 0, 30, 255, 225)), 22)
AUDIO = AudioTrack(bytes((0x12, 0x90)), 128_000, 1024, 29_600)
RUNS = [
    Run(1, 68_000, [Packet(b"first", 4000, True), Packet(b"second!", 4000, False)]),
    Run(2, 23_552, [Packet(b"sound", 1024, True)]),
]


def test_the_init_segment_lists_both_tracks_and_states_the_length() -> None:
    movie = read_movie(init_segment(VIDEO, AUDIO))
    assert movie.top == ["ftyp", "moov"]
    assert [(t.kind, t.timescale, t.codec) for t in movie.tracks.values()] == [
        ("vide", 96_000, "avc1.64001e"),
        ("soun", 32_000, "mp4a.40.2"),
    ]
    moov = dict(boxes(init_segment(VIDEO, AUDIO)))["moov"]
    assert child(moov, "mvex", "mehd") == struct.pack(">II", 0, 88_800)  # the sound is longer than the pictures
    assert movie.tracks[2].edits == [(88_800, 1024)]  # 29600 samples of 3 ticks, behind the priming


def test_an_init_segment_of_sound_alone_lists_one_track_and_states_the_length() -> None:
    data = sound_init_segment(AUDIO)
    (track,) = read_movie(data).tracks.values()
    assert (track.kind, track.timescale, track.codec, track.edits) == ("soun", 32_000, "mp4a.40.2", [(88_800, 1024)])
    assert child(dict(boxes(data))["moov"], "mvex", "mehd") == struct.pack(">II", 0, 88_800)


def test_a_fragment_points_at_the_bytes_of_each_run() -> None:
    data = fragment(7, RUNS)
    (moof_kind, moof), (mdat_kind, mdat) = boxes(data)
    assert (moof_kind, mdat_kind, mdat) == ("moof", "mdat", b"firstsecond!sound")
    assert child(moof, "mfhd") == struct.pack(">II", 0, 7)
    trafs = [payload for kind, payload in boxes(moof) if kind == "traf"]
    for traf, content in zip(trafs, (b"firstsecond!", b"sound"), strict=True):
        run = child(traf, "trun") or b""
        offset = struct.unpack(">I", run[8:12])[0]
        assert data[offset : offset + len(content)] == content


def test_fragments_can_be_moved_behind_anything() -> None:
    first, second = fragment(1, RUNS), fragment(2, RUNS)
    assert len(first) == len(second)
    assert second.replace(struct.pack(">II", 0, 2), struct.pack(">II", 0, 1), 1) == first


def test_a_whole_file_says_where_every_packet_is() -> None:
    video, audio = PacketIndex(), PacketIndex()
    pictures = [Packet(bytes([i]) * (i + 1), 4000, i % 17 == 0) for i in range(22)]
    sounds = [Packet(bytes([100 + i]) * 9, 1024 if i < 29 else 928, True) for i in range(30)]
    for packet in pictures:
        video.add(packet)
    for packet in sounds:
        audio.add(packet)
    layout = lay_out(VIDEO, AUDIO, video, audio)
    queues = [b"".join(p.data for p in packets) for packets in (pictures, sounds)]
    media = b""
    for piece in layout.pieces:
        for i, size in enumerate(piece):
            media, queues[i] = media + queues[i][:size], queues[i][size:]
    assert queues == [b"", b""]
    data = layout.header + media
    moov = dict(boxes(data))["moov"]
    traks = [payload for kind, payload in boxes(moov) if kind == "trak"]
    for trak, packets in zip(traks, (pictures, sounds), strict=True):
        assert read_packets(data, child(trak, "mdia", "minf", "stbl") or b"") == [p.data for p in packets]


def read_packets(data: bytes, stbl: bytes) -> list[bytes]:
    """The packets of a track, found by its sample tables."""
    tables = dict(boxes(stbl))
    words = {
        kind: struct.unpack(f">{len(payload) // 4}I", payload) for kind, payload in tables.items() if kind != "stsd"
    }
    sizes = list(words["stsz"][3:])
    offsets = words["stco"][2:]
    spans = [words["stsc"][2 + 3 * i : 5 + 3 * i] for i in range(words["stsc"][1])]
    packets = []
    for chunk, offset in enumerate(offsets, 1):
        length = next(per_chunk for first, per_chunk, _ in reversed(spans) if first <= chunk)
        for _ in range(length):
            size = sizes.pop(0)
            packets.append(data[offset : offset + size])
            offset += size
    assert not sizes
    return packets
