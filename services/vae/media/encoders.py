"""Frames to H.264 packets, samples to AAC packets, through PyAV's codecs and without its containers.

The streams are made for joining at chunks: one closed GOP per 17 frames, no B-frames, and a picture leaves the encoder
in the call that brought it. One thread and fixed settings, so the same input gives the same bytes.
Source: docs/reference/raven-streaming.md §13.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any, cast

import av
import numpy as np
import numpy.typing as npt
from av.codec.codec import UnknownCodecError
from av.codec.context import Flags
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from core.budget import AAC_BIT_RATE
from core.clock import TICKS_PER_FRAME, TICKS_PER_SECOND
from core.geometry import AUDIO_CHANNELS, FPS, FRAMES_PER_CHUNK, SAMPLE_RATE
from h3stream.errors import MuxError
from services.vae.media.boxes import Packet
from services.vae.media.h264 import NAL_IDR, decoder_configuration, length_prefixed, nal_type, split_nal_units

log = logging.getLogger(__name__)

H264_ENCODERS: dict[str, dict[str, str]] = {
    "h264_nvenc": {
        "preset": "p1",
        "tune": "ull",
        "rc": "cbr",
        "profile": "high",
        "zerolatency": "1",
        "delay": "0",
        "forced-idr": "1",
        "strict_gop": "1",
    },
    "libx264": {
        "preset": "veryfast",
        "tune": "zerolatency",
        "forced-idr": "1",
        "x264-params": "scenecut=0:open-gop=0",
    },
    "libopenh264": {"allow_skip_frames": "0", "rc_mode": "bitrate"},
}
"""Encoders in order of preference, with the options that make them stream."""

_told: set[str] = set()
"""Encoders of which this process has said why they are not the first choice: the same is true of every clip."""

MAX_BUFFER_BITS = 5_000_000
"""Most bits of the encoder's rate buffer. No picture can be larger than the buffer: 625 kB, well under a message."""

AAC_ENCODER = "aac"
AAC_FRAME_SAMPLES = 1024

_BT709 = 1
_LIMITED_RANGE = 1
_RGB_TO_YUV = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP


class H264Encoder:
    """One H.264 stream: BT.709, limited range, 4:2:0; an IDR picture on every frame index divisible by 17."""

    def __init__(self, name: str, width: int, height: int, bit_rate: int) -> None:
        """Opens the encoder of that name. Raises MuxError if it cannot be opened here."""
        self.name = name
        self._num_frames = 0
        self._reformatter = VideoReformatter()
        try:
            context: Any = av.CodecContext.create(name, "w")
            context.width, context.height, context.pix_fmt = width, height, "yuv420p"
            context.time_base = Fraction(1, TICKS_PER_SECOND)
            context.framerate = Fraction(FPS)
            context.bit_rate = bit_rate
            context.gop_size = FRAMES_PER_CHUNK
            context.max_b_frames = 0
            context.thread_count = 1  # slices and rate control depend on the number of threads
            context.color_primaries = context.color_trc = context.colorspace = _BT709
            context.color_range = _LIMITED_RANGE
            context.flags |= Flags.global_header | Flags.closed_gop
            context.options = {
                **H264_ENCODERS[name],
                "maxrate": str(bit_rate),
                "bufsize": str(min(bit_rate, MAX_BUFFER_BITS)),
            }
            context.open()
            self._context = context
            self.decoder_configuration = decoder_configuration(bytes(context.extradata or b""))
        except (av.FFmpegError, ValueError) as error:
            raise MuxError(f"the encoder {name} cannot be opened for {width}x{height}: {_cause(error)}") from error

    def encode(self, rgb: npt.NDArray[np.uint8]) -> Packet:
        """The packet of the next frame, `[height, width, 3]`.

        Raises MuxError if the encoder fails, keeps the picture back or makes it something other than it was told.
        """
        is_idr = self._num_frames % FRAMES_PER_CHUNK == 0
        stream = self.encode_as(rgb, is_idr)
        units = split_nal_units(stream)
        if any(nal_type(unit) == NAL_IDR for unit in units) != is_idr:
            raise MuxError(f"{self.name} made frame {self._num_frames - 1} {'no' if is_idr else 'an'} IDR picture")
        return Packet(data=length_prefixed(units), duration=TICKS_PER_FRAME, is_sync=is_idr)

    def encode_as(self, rgb: npt.NDArray[np.uint8], is_idr: bool) -> bytes:
        """The encoder's own bytes for the next frame, asked to be an IDR picture or not."""
        frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
        picture = self._reformatter.reformat(
            frame,
            format="yuv420p",
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
            dst_colorspace=Colorspace.ITU709,
            interpolation=_RGB_TO_YUV,
            threads=1,
        )
        picture.pts = self._num_frames * TICKS_PER_FRAME
        picture.time_base = self._context.time_base
        picture.pict_type = PictureType.I if is_idr else PictureType.NONE
        try:
            packets = self._context.encode(picture)
        except av.FFmpegError as error:
            raise MuxError(f"{self.name} failed at frame {self._num_frames}: {_cause(error)}") from error
        if len(packets) != 1 or packets[0].pts != picture.pts:
            raise MuxError(f"{self.name} did not give frame {self._num_frames} at once")
        self._num_frames += 1
        return bytes(packets[0])


def open_h264_encoder(width: int, height: int, bit_rate: int, pinned: str | None = None) -> H264Encoder:
    """The first encoder that works for this canvas; `pinned` allows only that one. Why others do not is logged, once.

    An encoder works if it gives every picture at once, honours a forced IDR picture and decodes from each of them with
    the configuration it declares: options are silently ignored by encoders that do not know them, so what counts is
    what comes out. Raises MuxError if none works, saying why.
    """
    if pinned is not None and pinned not in H264_ENCODERS:
        raise MuxError(f"the H.264 encoder {pinned!r} is not known; known are {', '.join(H264_ENCODERS)}")
    reasons = []
    for name in H264_ENCODERS if pinned is None else (pinned,):
        try:
            _probe(H264Encoder(name, width, height, bit_rate), width, height)
            encoder = H264Encoder(name, width, height, bit_rate)
        except MuxError as error:
            reasons.append(str(error))
            continue
        if reasons and name not in _told:
            _told.add(name)
            log.info("pictures of %dx%d are encoded by %s: %s", width, height, name, "; ".join(reasons))
        return encoder
    raise MuxError(f"no H.264 encoder works for {width}x{height}: {'; '.join(reasons)}")


def _probe(encoder: H264Encoder, width: int, height: int) -> None:
    """Encodes three frames, the first and the last forced to be IDR pictures, and decodes them from either.

    Raises MuxError if the pictures are not what was asked for, or not what the encoder declares.
    """
    frame = np.full((height, width, 3), 128, np.uint8)
    pictures = []
    for is_idr in (True, False, True):
        units = split_nal_units(encoder.encode_as(frame, is_idr))
        if any(nal_type(unit) == NAL_IDR for unit in units) != is_idr:
            raise MuxError(f"{encoder.name} does not obey a forced IDR picture")
        pictures.append(length_prefixed(units))
    for start in (0, 2):
        if _decoded_sizes(encoder.decoder_configuration, pictures[start:]) != [(width, height)] * (3 - start):
            raise MuxError(f"the pictures of {encoder.name} do not decode with the configuration that it declares")


def _decoded_sizes(configuration: bytes, pictures: list[bytes]) -> list[tuple[int, int]]:
    """(width, height) of each picture that a decoder yields; none if it fails."""
    decoder: Any = av.CodecContext.create("h264", "r")
    decoder.extradata = configuration
    decoder.thread_count = 1
    try:
        frames = [frame for picture in pictures for frame in decoder.decode(av.Packet(picture))]
        frames += decoder.decode(None)
    except av.FFmpegError:
        return []
    return [(frame.width, frame.height) for frame in frames]


class AacEncoder:
    """One AAC-LC stream, 32 kHz stereo."""

    def __init__(self) -> None:
        """Raises MuxError if the encoder cannot be opened here or gives no packets."""
        self.name = AAC_ENCODER
        # Only a running encoder tells how many samples come before the first true one, so one is run for it.
        probe = _open_aac()
        silence = np.zeros((AUDIO_CHANNELS, AAC_FRAME_SAMPLES), np.float32)
        packets = [
            *_encode_aac(probe, silence, 0),
            *_encode_aac(probe, silence, AAC_FRAME_SAMPLES),
            *_encode_aac(probe),
        ]
        if not packets or packets[0].pts is None or packets[0].pts > 0:
            raise MuxError(f"the encoder {AAC_ENCODER} does not tell its priming")
        self.priming_samples = -packets[0].pts
        self._context = _open_aac()
        self.decoder_configuration = bytes(self._context.extradata)
        self._pending = np.empty((AUDIO_CHANNELS, 0), np.float32)
        self._num_fed = 0

    def encode(self, pcm: npt.NDArray[np.float32]) -> list[Packet]:
        """The packets that come out when these samples, `[2, S]`, go in. Raises MuxError if the encoder fails."""
        self._pending = np.concatenate([self._pending, pcm], axis=1)
        packets = []
        while self._pending.shape[1] >= AAC_FRAME_SAMPLES:
            packets += self._feed(self._pending[:, :AAC_FRAME_SAMPLES])
            self._pending = self._pending[:, AAC_FRAME_SAMPLES:]
        return packets

    def flush(self) -> list[Packet]:
        """The last packets. Their durations add up, with all before, to the priming plus the samples that went in."""
        packets = self._feed(self._pending) if self._pending.shape[1] else []
        self._pending = self._pending[:, :0]
        return packets + [_as_packet(packet) for packet in _encode_aac(self._context)]

    def _feed(self, samples: npt.NDArray[np.float32]) -> list[Packet]:
        packets = _encode_aac(self._context, samples, self._num_fed)
        self._num_fed += samples.shape[1]
        return [_as_packet(packet) for packet in packets]


def _open_aac() -> Any:
    try:
        context: Any = av.CodecContext.create(AAC_ENCODER, "w")
        context.sample_rate, context.layout, context.format = SAMPLE_RATE, "stereo", "fltp"
        context.bit_rate = AAC_BIT_RATE
        context.time_base = Fraction(1, SAMPLE_RATE)
        context.flags |= Flags.global_header
        context.open()
    except (av.FFmpegError, ValueError) as error:
        raise MuxError(f"the encoder {AAC_ENCODER} cannot be opened: {_cause(error)}") from error
    return context


def _encode_aac(context: Any, samples: npt.NDArray[np.float32] | None = None, first: int = 0) -> list[Any]:
    """Packets for at most one AAC frame of samples; without samples the encoder is flushed."""
    frame = None
    if samples is not None:
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, first, context.time_base
    try:
        return cast("list[Any]", context.encode(frame))
    except av.FFmpegError as error:
        raise MuxError(f"{AAC_ENCODER} failed: {_cause(error)}") from error


def _as_packet(packet: Any) -> Packet:
    return Packet(data=bytes(packet), duration=packet.duration, is_sync=True)


def _cause(error: av.FFmpegError | ValueError) -> str:
    """What is wrong, without the call and the options in which it went wrong."""
    if isinstance(error, UnknownCodecError):
        return "this build of FFmpeg does not have it"
    return (error.strerror if isinstance(error, av.FFmpegError) else None) or str(error)
