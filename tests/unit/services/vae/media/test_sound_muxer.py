"""The stream of a clip's sound alone: where it is cut, and where its sound lands."""

from __future__ import annotations

import numpy as np
import pytest

from core.clock import TICKS_PER_FRAME, TICKS_PER_SAMPLE
from core.geometry import SAMPLE_RATE, num_samples, valid_frame_counts
from h3stream.errors import MuxError
from services.vae.media.boxes import AudioTrack, Packet
from services.vae.media.muxer import MediaFragment
from services.vae.media.sound_muxer import SoundMuxer
from tests.tools.check_fmp4 import read_movie, violations
from tests.unit.services.vae.harness import decode_sound, mux_sound

IMPULSES = (160, 976, 16_000, 22_660, 30_000, 45_333, 51_500)
"""Samples: near the start and the end, inside, and beside the ends of chunks."""


def mux_silence(num_frames: int, num_packets_at_once: int = 1) -> list[MediaFragment]:
    """The fragments of packets that hold nothing."""
    samples = num_samples(num_frames)
    muxer = SoundMuxer(AudioTrack(bytes((0x12, 0x90)), 128_000, 1024, samples))
    durations = [1024] * ((1024 + samples) // 1024)
    if rest := 1024 + samples - sum(durations):
        durations.append(rest)
    packets = [Packet(b"x", duration, True) for duration in durations]
    made = []
    for start in range(0, len(packets), num_packets_at_once):
        made += muxer.add(packets[start : start + num_packets_at_once])
    return made + muxer.finish()


@pytest.mark.parametrize("num_frames", valid_frame_counts())
def test_fragments_end_where_those_with_pictures_do(num_frames: int) -> None:
    fragments = mux_silence(num_frames)
    assert [made.fragment_index for made in fragments] == list(range((num_frames - 5) // 17 + 1))
    time = 0
    for made in fragments:
        assert (made.num_frames, made.first_frame, made.is_keyframe) == (0, 0, True)
        assert made.start_ticks == time
        time += made.duration_ticks
        assert made.num_samples_total * TICKS_PER_SAMPLE == time
        if made is not fragments[-1]:  # a chunk's pictures, and less than one AAC frame more
            assert 0 <= time - (made.fragment_index + 1) * 17 * TICKS_PER_FRAME < 1024 * TICKS_PER_SAMPLE
    assert time == num_samples(num_frames) * TICKS_PER_SAMPLE
    assert mux_silence(num_frames, num_packets_at_once=1000) == fragments


def test_a_clip_of_another_length_than_announced_is_told() -> None:
    muxer = SoundMuxer(AudioTrack(bytes((0x12, 0x90)), 128_000, 1024, 29_600))
    muxer.add([Packet(b"x", 1024, True)] * 5)
    with pytest.raises(MuxError, match="the stream ends with 5120 samples, expected 30624"):
        muxer.finish()


def test_the_mime_type_is_that_of_the_boxes() -> None:
    clip = mux_sound(22, np.zeros((2, num_samples(22)), np.float32))
    (track,) = read_movie(clip.stream).tracks.values()
    assert clip.mime_type == f'audio/mp4; codecs="{track.codec}"' == 'audio/mp4; codecs="mp4a.40.2"'


def test_an_impulse_comes_back_within_a_millisecond_and_every_prefix_plays() -> None:
    pcm = np.zeros((2, num_samples(39)), np.float32)
    pcm[:, IMPULSES] = 0.9
    clip = mux_sound(39, pcm)
    sound = np.abs(decode_sound(clip.stream)).max(axis=0)
    for impulse in IMPULSES:
        start = max(0, impulse - 400)
        found = start + int(sound[start : impulse + 400].argmax())
        assert abs(found - impulse) <= SAMPLE_RATE // 1000, f"impulse at {impulse} came back at {found}"
        assert sound[found] > 0.1
    assert violations(clip.stream, frames=0, samples=num_samples(39)) == []
    assert len(clip.fragments) == 3
    for count in range(1, 3):
        assert violations(clip.init_segment + b"".join(clip.fragments[:count]), frames=0) == []


def test_a_late_viewer_can_start_at_any_fragment() -> None:
    # Tones: what sounds like noise is made up anew by each decoder, and there is a little of it in everything.
    times = np.arange(num_samples(39), dtype=np.float32) / SAMPLE_RATE
    pcm = sum(0.1 * np.sin(2 * np.pi * hertz * times)[None].repeat(2, 0) for hertz in (220, 1000, 3500))
    clip = mux_sound(39, pcm)
    whole = decode_sound(clip.stream)
    late = decode_sound(clip.init_segment + b"".join(clip.fragments[1:]))
    assert late.shape == whole.shape, "the sound keeps its times"
    start = 17 * TICKS_PER_FRAME // TICKS_PER_SAMPLE + 2 * 1024  # the decoder's overlap is not there at first
    np.testing.assert_allclose(late[:, start:], whole[:, start:], atol=3e-3)
