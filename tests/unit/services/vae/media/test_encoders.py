from __future__ import annotations

import re
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from av.video.frame import PictureType

from h3stream.errors import MuxError
from services.vae.media import encoders
from services.vae.media.boxes import AudioTrack, VideoTrack
from services.vae.media.encoders import MAX_BUFFER_BITS, AacEncoder, H264Encoder, open_h264_encoder
from services.vae.media.muxer import mime_type

BIT_RATE = 6_000_000


def noise(rng: np.random.Generator, width: int, height: int) -> npt.NDArray[np.uint8]:
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def decode_h264(encoder: H264Encoder, packets: list[Any]) -> list[av.VideoFrame]:
    decoder: Any = av.CodecContext.create("h264", "r")
    decoder.extradata = encoder.decoder_configuration
    frames = [frame for packet in packets for frame in decoder.decode(av.Packet(packet.data))]
    return [*frames, *decoder.decode(None)]


def test_every_17th_picture_is_an_idr_and_no_other_is() -> None:
    encoder = open_h264_encoder(64, 64, BIT_RATE)
    rng = np.random.default_rng(0)
    packets = [encoder.encode(noise(rng, 64, 64)) for _ in range(36)]  # noise: every picture is a scene cut
    assert [i for i, packet in enumerate(packets) if packet.is_sync] == [0, 17, 34]
    assert {packet.duration for packet in packets} == {4000}
    frames = decode_h264(encoder, packets)
    assert [i for i, frame in enumerate(frames) if frame.key_frame] == [0, 17, 34]
    assert {PictureType(frame.pict_type) for frame in frames} == {PictureType.I, PictureType.P}


def test_each_gop_decodes_alone() -> None:
    encoder = open_h264_encoder(64, 32, BIT_RATE)
    rng = np.random.default_rng(1)
    packets = [encoder.encode(noise(rng, 64, 32)) for _ in range(34)]
    whole = [frame.to_ndarray() for frame in decode_h264(encoder, packets)]
    alone = [frame.to_ndarray() for frame in decode_h264(encoder, packets[17:])]
    np.testing.assert_array_equal(np.stack(alone), np.stack(whole[17:]))


def test_the_same_frames_give_the_same_bytes() -> None:
    runs = []
    for _ in range(2):
        encoder = open_h264_encoder(96, 64, BIT_RATE)
        rng = np.random.default_rng(2)
        runs.append([encoder.encode(noise(rng, 96, 64)) for _ in range(20)])
    assert runs[0] == runs[1]


def test_no_picture_is_larger_than_the_rate_buffer() -> None:
    encoder = open_h264_encoder(1376, 768, BIT_RATE)
    rng = np.random.default_rng(3)
    sizes = [len(encoder.encode(noise(rng, 1376, 768)).data) for _ in range(3)]
    assert max(sizes) <= MAX_BUFFER_BITS // 8


@pytest.mark.parametrize(
    ("rgb", "yuv"),
    [
        ((255, 255, 255), (235, 128, 128)),
        ((0, 0, 0), (16, 128, 128)),
        # BT.709, limited range: Y = 16 + 219 (0.2126 R + 0.7152 G + 0.0722 B) and so on.
        ((255, 0, 0), (63, 102, 240)),
        ((0, 255, 0), (173, 42, 26)),
        ((0, 0, 255), (32, 240, 118)),
        ((200, 100, 50), (117, 96, 174)),
    ],
)
def test_colours_are_bt709_and_say_so(rgb: tuple[int, int, int], yuv: tuple[int, int, int]) -> None:
    encoder = open_h264_encoder(64, 64, BIT_RATE)
    frame = decode_h264(encoder, [encoder.encode(np.full((64, 64, 3), rgb, np.uint8))])[0]
    tags = (frame.color_primaries, frame.color_trc, frame.colorspace, frame.color_range)
    assert tags == (1, 1, 1, 1)  # BT.709 three times, limited range
    planes = frame.to_ndarray()
    middle = planes[32, 32], planes[64 + 8, 16], planes[64 + 16 + 8, 16]
    assert np.abs(np.array(middle, int) - np.array(yuv)).max() <= 2


def test_an_encoder_that_holds_pictures_back_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(encoders.H264_ENCODERS, "libx264", {"preset": "veryfast", "forced-idr": "1"})
    with pytest.raises(MuxError, match="did not give frame 0 at once"):
        open_h264_encoder(64, 64, BIT_RATE, "libx264")


class StubbornEncoder(H264Encoder):
    """Makes an IDR picture of the first frame only, whatever it is asked for."""

    def encode_as(self, rgb: npt.NDArray[np.uint8], is_idr: bool) -> bytes:
        return super().encode_as(rgb, is_idr and self._num_frames == 0)


def test_an_encoder_that_ignores_a_forced_idr_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "H264Encoder", StubbornEncoder)
    with pytest.raises(MuxError, match="does not obey a forced IDR picture"):
        open_h264_encoder(64, 64, BIT_RATE, "libx264")


class MisdeclaringEncoder(H264Encoder):
    """Declares the configuration of an encoder for another canvas, as one would that changes it with each IDR."""

    def __init__(self, name: str, width: int, height: int, bit_rate: int) -> None:
        super().__init__(name, width, height, bit_rate)
        self.decoder_configuration = H264Encoder(name, 2 * width, height, bit_rate).decoder_configuration


def test_an_encoder_that_declares_something_else_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "H264Encoder", MisdeclaringEncoder)
    with pytest.raises(MuxError, match="do not decode with the configuration that it declares"):
        open_h264_encoder(64, 64, BIT_RATE, "libx264")


class StubbornGpuEncoder(H264Encoder):
    """A GPU's encoder that opens and then ignores forced IDR pictures; every other encoder is as it is."""

    def __init__(self, name: str, width: int, height: int, bit_rate: int) -> None:
        super().__init__(name if name != "h264_nvenc" else "libx264", width, height, bit_rate)
        self.name = name

    def encode_as(self, rgb: npt.NDArray[np.uint8], is_idr: bool) -> bytes:
        return super().encode_as(rgb, is_idr and (self.name != "h264_nvenc" or self._num_frames == 0))


def test_a_candidate_that_works_badly_is_passed_over_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "H264Encoder", StubbornGpuEncoder)
    monkeypatch.setattr(encoders, "_told", set())
    with caplog.at_level("INFO"):
        for width in (64, 64, 96):
            assert open_h264_encoder(width, 32, BIT_RATE).name == "libx264"
    assert caplog.messages == [
        "pictures of 64x32 are encoded by libx264: h264_nvenc does not obey a forced IDR picture"
    ]


def test_a_candidate_that_cannot_be_opened_is_passed_over_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "H264_ENCODERS", {"no_such_codec": {}, "libx264": encoders.H264_ENCODERS["libx264"]})
    monkeypatch.setattr(encoders, "_told", set())
    with caplog.at_level("INFO"):
        assert open_h264_encoder(64, 64, BIT_RATE).name == "libx264"
    (message,) = caplog.messages
    assert message == (
        "pictures of 64x64 are encoded by libx264: the encoder no_such_codec cannot be opened for 64x64: "
        "this build of FFmpeg does not have it"
    )


@pytest.mark.parametrize("name", encoders.H264_ENCODERS)
def test_every_encoder_of_the_chain_that_is_here_works(name: str) -> None:
    """A GPU's encoder does not open without one, and builds of FFmpeg differ."""
    try:
        H264Encoder(name, 256, 256, BIT_RATE)
    except MuxError as error:
        pytest.skip(str(error))
    encoder = open_h264_encoder(256, 256, BIT_RATE, name)
    rng = np.random.default_rng(5)
    packets = [encoder.encode(noise(rng, 256, 256)) for _ in range(36)]
    assert [i for i, packet in enumerate(packets) if packet.is_sync] == [0, 17, 34]
    assert len(decode_h264(encoder, packets[17:])) == 19


@pytest.mark.parametrize(
    ("profile", "codec"), [("baseline", "avc1.42c0"), ("main", "avc1.4d40"), ("high", "avc1.6400")]
)
@pytest.mark.parametrize(("width", "height"), [(32, 32), (96, 416), (1376, 768)])
def test_the_codec_announced_is_that_of_the_pictures(
    monkeypatch: pytest.MonkeyPatch, profile: str, codec: str, width: int, height: int
) -> None:
    """OpenH264 makes baseline or main, others high; the level follows the canvas."""
    monkeypatch.setitem(encoders.H264_ENCODERS["libx264"], "profile", profile)
    encoder = open_h264_encoder(width, height, BIT_RATE, "libx264")
    video = VideoTrack(width, height, encoder.decoder_configuration, 22)
    announced = mime_type(video, AudioTrack(bytes((0x12, 0x90)), 128_000, 1024, 29_600))
    assert announced.startswith(f'video/mp4; codecs="{codec}')
    # What a decoder finds in the parameter sets, without the record in between.
    (_, sps, *_) = re.split(rb"\x00\x00\x00?\x01", bytes(encoder._context.extradata))
    assert sps[0] & 0x1F == 7
    assert f"avc1.{sps[1:4].hex()}" in announced


def test_a_pinned_encoder_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "H264_ENCODERS", {"no_such_codec": {}, "libx264": encoders.H264_ENCODERS["libx264"]})
    with pytest.raises(MuxError, match=r"no H.264 encoder works for 64x64: the encoder no_such_codec cannot be opened"):
        open_h264_encoder(64, 64, BIT_RATE, "no_such_codec")


def test_an_unknown_pinned_encoder_is_named_with_the_known_ones() -> None:
    with pytest.raises(MuxError, match="'mpeg2video' is not known; known are h264_nvenc, libx264, libopenh264"):
        open_h264_encoder(64, 64, BIT_RATE, "mpeg2video")


@pytest.mark.parametrize("num_samples", [1, 1023, 1024, 1025, 29_600, 32_768])
def test_sound_packets_last_as_long_as_the_samples_and_the_priming(num_samples: int) -> None:
    encoder = AacEncoder()
    packets = [*encoder.encode(np.zeros((2, num_samples), np.float32)), *encoder.flush()]
    assert encoder.priming_samples == 1024
    assert sum(packet.duration for packet in packets) == encoder.priming_samples + num_samples


def test_the_cut_into_calls_does_not_change_the_sound() -> None:
    pcm = np.random.default_rng(4).normal(0, 0.1, (2, 9_000)).astype(np.float32)
    whole, pieces = AacEncoder(), AacEncoder()
    expected = [*whole.encode(pcm), *whole.flush()]
    found = [packet for start in range(0, 9_000, 700) for packet in pieces.encode(pcm[:, start : start + 700])]
    assert [*found, *pieces.flush()] == expected


def test_sound_is_held_back_by_two_frames_at_most() -> None:
    encoder = AacEncoder()
    packets = encoder.encode(np.zeros((2, 32_000), np.float32))
    true_samples = sum(packet.duration for packet in packets) - encoder.priming_samples
    assert 32_000 - true_samples <= 2 * 1024 + 1023  # 1023: the samples that do not fill a frame yet
