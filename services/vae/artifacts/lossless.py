"""`frames.mkv` and `audio.flac`: what the VAEs decoded, before any lossy codec."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from core.artifacts import FRAMES, SOUND
from core.geometry import FPS, SAMPLE_RATE
from services.vae.artifacts.base import Artifact, disk_errors

_BIT_EXACT = {"fflags": "+bitexact"}
"""Leaves out what differs from run to run: the same clip gives the same file."""
_FULL_SCALE = 1 << 23
_MAX_LEVEL = _FULL_SCALE - 1


class _Track(Artifact):
    """A file of one track, written by libavformat."""

    def __init__(self, directory: Path, name: str, container: str) -> None:
        super().__init__(directory, name)
        self._container: Any = None
        with disk_errors(name):
            self._container = av.open(str(self._part), "w", format=container, container_options=_BIT_EXACT)

    def _encode(self, track: Any, frame: Any) -> None:
        with disk_errors(self.name):
            for packet in track.encode(frame):
                self._container.mux(packet)

    def _finish_track(self, track: Any) -> None:
        self._encode(track, None)
        container, self._container = self._container, None
        container.close()

    def _close(self) -> None:
        if self._container is not None:
            container, self._container = self._container, None
            with contextlib.suppress(OSError, av.FFmpegError):  # a full disk also fails the flush of a close
                container.close()


class FramesFile(_Track):
    """`frames.mkv` of one clip: FFV1 level 3 with checksums, every frame a keyframe, RGB bit for bit."""

    def __init__(self, directory: Path, width: int, height: int) -> None:
        """Opens the file and its encoder."""
        super().__init__(directory, FRAMES, "matroska")
        self._num_frames = 0
        with disk_errors(FRAMES):
            options = {"level": "3", "slicecrc": "1", "slices": "4", "coder": "1", "context": "0", "g": "1"}
            self._track: Any = self._container.add_stream("ffv1", rate=FPS, options=options)
            self._track.width, self._track.height = width, height
            self._track.pix_fmt = "bgr0"  # the one 8-bit RGB format that FFV1 has: nothing is converted to YUV
            self._track.time_base = Fraction(1, FPS)
            self._track.codec_context.time_base = Fraction(1, FPS)

    def add_picture(self, rgb: npt.NDArray[np.uint8]) -> None:
        """Encodes the next frame."""
        frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format="bgr0")
        frame.pts, frame.time_base = self._num_frames, Fraction(1, FPS)
        self._encode(self._track, frame)
        self._num_frames += 1

    def _complete(self, divisor: float) -> None:
        self._finish_track(self._track)


class SoundFile(_Track):
    """`audio.flac` of one clip, or `refined.flac`: 24 bits, as decoded, without the normalisation of `final.mp4`.

    A sample x becomes the nearest multiple of 2^-23 (ties to the even one), held to [-1, 1 - 2^-23].
    """

    def __init__(self, directory: Path, name: str = SOUND) -> None:
        """Opens the file and its encoder."""
        super().__init__(directory, name, "flac")
        self._num_samples = 0
        with disk_errors(name):
            options = {"bits_per_raw_sample": "24"}
            self._track: Any = self._container.add_stream("flac", rate=SAMPLE_RATE, options=options)
            self._track.codec_context.layout, self._track.codec_context.format = "stereo", "s32"

    def add_sound(self, pcm: npt.NDArray[np.float32]) -> None:
        """Encodes the next samples."""
        if pcm.shape[1] == 0:
            return
        levels = np.rint(pcm.astype(np.float64) * _FULL_SCALE).clip(-_FULL_SCALE, _MAX_LEVEL).astype(np.int32)
        interleaved = np.ascontiguousarray((levels << 8).T).reshape(1, -1)  # the upper 24 of 32 bits
        frame = av.AudioFrame.from_ndarray(interleaved, format="s32", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, self._num_samples, Fraction(1, SAMPLE_RATE)
        self._encode(self._track, frame)
        self._num_samples += pcm.shape[1]

    def _complete(self, divisor: float) -> None:
        self._finish_track(self._track)
