from __future__ import annotations

import pytest

from h3stream.errors import MuxError
from services.vae.media.boxes import AudioTrack, Packet, VideoTrack
from services.vae.media.muxer import MAX_PAYLOAD_BYTES, FragmentMuxer, mime_type

AVCC = bytes((1, 0x4D, 0x40, 0x1F, 0xFF, 0xE1))


def muxer(num_frames: int = 22, num_samples: int = 29_600) -> FragmentMuxer:
    video = VideoTrack(64, 64, AVCC, num_frames)
    return FragmentMuxer(video, AudioTrack(bytes((0x12, 0x90)), 128_000, 1024, num_samples))


def pictures(count: int, size: int = 100, first: int = 0) -> list[Packet]:
    return [Packet(bytes(size), 4000, i % 17 == 0) for i in range(first, first + count)]


def sounds(*durations: int) -> list[Packet]:
    return [Packet(bytes(10), duration, True) for duration in durations]


def test_the_mime_type_is_read_from_the_configurations() -> None:
    video = VideoTrack(64, 64, AVCC, 22)
    he_aac = AudioTrack(bytes((0x2B, 0x11)), 64_000, 1024, 29_600)
    assert mime_type(video, he_aac) == 'video/mp4; codecs="avc1.4d401f,mp4a.40.5"'


def test_a_fragment_takes_the_sound_that_begins_before_its_end() -> None:
    made = muxer()
    made.add(pictures(17), sounds(*[1024] * 29))
    (fragment,) = made.take(17)
    # 17 frames last 22666.7 samples: packets begin at -1024, 0, ... 22528, so the stream holds 23552.
    assert fragment.num_samples_total == 23_552
    assert (fragment.first_frame, fragment.num_frames, fragment.is_keyframe) == (0, 17, True)
    assert (fragment.start_ticks, fragment.duration_ticks) == (0, 68_000)


def test_missing_sound_holds_no_picture_back_and_comes_later() -> None:
    made = muxer()
    made.add(pictures(17), sounds(1024, 1024))
    (first,) = made.take(17)
    assert (first.num_frames, first.num_samples_total) == (17, 1024)
    made.add(pictures(5, first=17), sounds(*[1024] * 27, 928))
    (second,) = made.take(22, is_final=True)
    assert (second.num_frames, second.num_samples_total) == (5, 29_600)


def test_fragments_begin_at_idr_pictures() -> None:
    made = muxer()
    made.add(pictures(22), sounds(*[1024] * 29, 928))
    fragments = made.take(22, is_final=True)
    assert [(f.fragment_index, f.first_frame, f.num_frames, f.is_keyframe) for f in fragments] == [
        (0, 0, 17, True),
        (1, 17, 5, True),
    ]


def test_an_outgrown_fragment_is_cut_between_pictures() -> None:
    made = muxer()
    made.add(pictures(17, size=100_000), sounds(*[1024] * 29))
    fragments = made.take(17)
    assert [f.num_frames for f in fragments] == [8, 8, 1]
    assert [f.is_keyframe for f in fragments] == [True, False, False]
    assert all(len(f.data) < MAX_PAYLOAD_BYTES + 1000 for f in fragments)
    assert fragments[-1].num_samples_total == 23_552
    # Each piece carries its own sound.
    assert fragments[0].num_samples_total == 11_264


def test_a_picture_too_large_for_a_message_is_an_error() -> None:
    made = muxer()
    made.add(pictures(1, size=MAX_PAYLOAD_BYTES + 1), [])
    with pytest.raises(MuxError, match="frame 0 has 900001 bytes; a fragment holds at most 900000"):
        made.take(1)


def test_a_stream_that_ends_short_is_an_error() -> None:
    made = muxer()
    made.add(pictures(22), sounds(*[1024] * 29))
    with pytest.raises(MuxError, match="22 frames and 29696 samples, expected 22 and 30624"):
        made.take(22, is_final=True)
