"""The pictures of a finished MP4 file as they were encoded, for another file to take over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av

from core.clock import TICKS_PER_FRAME, TICKS_PER_SECOND
from h3stream.errors import MuxError
from h3stream.request import ClipSpec
from services.vae.media.boxes import Packet, VideoTrack


class VideoFile:
    """A file that holds exactly the pictures of a clip."""

    def __init__(self, path: Path, clip: ClipSpec) -> None:
        """Opens nothing yet: a file that is not there is told by the calls that need it."""
        self._path, self._clip = path, clip

    def track(self) -> VideoTrack:
        """What a decoder must know of the pictures. Raises MuxError if they are not the clip's, or cannot be read."""
        with self._open() as (_, stream):
            context = stream.codec_context
            found = context.name, context.width, context.height, stream.time_base.denominator
            expected = "h264", self._clip.width, self._clip.height, TICKS_PER_SECOND
            if found != expected or not context.extradata:
                raise MuxError(f"{self._path.name} has other pictures than the clip: {found}, expected {expected}")
            return VideoTrack(context.width, context.height, bytes(context.extradata), self._clip.num_frames)

    def packets(self) -> Iterator[Packet]:
        """Every picture in order, bit for bit. Raises MuxError if one is not where the clip has it, or missing."""
        num_frames = 0
        with self._open() as (container, stream):
            for packet in container.demux(stream):
                if not packet.size:
                    continue  # the demuxer's mark of the end
                found = packet.pts, packet.dts, packet.duration
                time = num_frames * TICKS_PER_FRAME
                if found != (time, time, TICKS_PER_FRAME):
                    raise MuxError(f"picture {num_frames} of {self._path.name} is at {found}, expected {time} ticks")
                yield Packet(bytes(packet), packet.duration, packet.is_keyframe)
                num_frames += 1
        if num_frames != self._clip.num_frames:
            raise MuxError(f"{self._path.name} has {num_frames} pictures, the clip {self._clip.num_frames}")

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        """The file and its track of pictures."""
        try:
            with av.open(str(self._path)) as container:
                if not container.streams.video:
                    raise MuxError(f"{self._path.name} has no pictures")
                yield container, container.streams.video[0]
        except (OSError, av.FFmpegError) as error:
            raise MuxError(f"{self._path.name} cannot be read: {error.strerror or type(error).__name__}") from error
