"""Files that a finished clip leaves behind, written as the clip goes and shown only when they are complete.

`final.mp4` holds the very pictures of the stream and a soundtrack encoded anew: the whole clip's normalisation is known
only at its end. Until then packets and samples lie in hidden spool files, so memory does not grow with the clip.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from core.budget import AAC_BIT_RATE
from core.geometry import AUDIO_CHANNELS
from h3stream.errors import PhaseError
from services.vae.media.boxes import AudioTrack, Packet, VideoTrack
from services.vae.media.encoders import AacEncoder
from services.vae.media.file_muxer import PacketIndex, lay_out

log = logging.getLogger(__name__)

FINAL_NAME = "final.mp4"
_PCM_BLOCK_SAMPLES = 32_000


@dataclass(frozen=True)
class ArtifactFile:
    """A complete file."""

    name: str
    """Its name in the artifact directory."""
    media_type: str
    """Its media type."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Of its bytes, lower-case hexadecimal."""


class FinalFile:
    """`final.mp4` of one clip, in the making. Every method raises PhaseError, with the cause, if the disk fails."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory if need be and opens the spools in it."""
        self._directory = directory
        self._video_index = PacketIndex()
        self._open_files: list[BinaryIO] = []
        self._paths = [directory / f".{FINAL_NAME}.{kind}" for kind in ("video", "pcm", "audio", "part")]
        with _disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._video, self._pcm, self._audio = (self._open(path) for path in self._paths[:3])

    def add_picture(self, packet: Packet) -> None:
        """Spools the next picture."""
        with _disk_errors(self._directory):
            self._video.write(packet.data)
        self._video_index.add(packet)

    def add_sound(self, pcm: npt.NDArray[np.float32]) -> None:
        """Spools the next samples, `[2, S]`."""
        with _disk_errors(self._directory):
            self._pcm.write(np.ascontiguousarray(pcm.T).tobytes())

    def finish(self, video: VideoTrack, num_samples: int, divisor: float) -> ArtifactFile:
        """Encodes the sound, divided by `divisor`, writes the file and gives it its name.

        Raises MuxError if the sound cannot be encoded.
        """
        encoder = AacEncoder()
        audio_index = PacketIndex()
        with _disk_errors(self._directory):
            self._audio.seek(0)
            self._audio.truncate()  # what an attempt before this one left
            for block in self._pcm_blocks():
                self._spool_sound(encoder.encode(block / np.float32(divisor)), audio_index)
            self._spool_sound(encoder.flush(), audio_index)
            audio = AudioTrack(encoder.decoder_configuration, AAC_BIT_RATE, encoder.priming_samples, num_samples)
            layout = lay_out(video, audio, self._video_index, audio_index)
            part = self._open(self._paths[3])
            digest = hashlib.sha256()
            size = 0
            for data in (layout.header, *self._media(layout.pieces)):
                part.write(data)
                digest.update(data)
                size += len(data)
            part.flush()
            os.fsync(part.fileno())
            # The name appears only now, with everything behind it.
            os.replace(self._paths[3], self._directory / FINAL_NAME)
            self.discard()
        return ArtifactFile(FINAL_NAME, "video/mp4", size, digest.hexdigest())

    def discard(self) -> None:
        """Removes whatever is not complete. A complete file stays."""
        for file in self._open_files:
            with contextlib.suppress(OSError):  # a full disk also fails the flush of a close
                file.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _open(self, path: Path) -> BinaryIO:
        file = path.open("w+b")
        self._open_files.append(file)
        return file

    def _pcm_blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        self._pcm.seek(0)
        while data := self._pcm.read(_PCM_BLOCK_SAMPLES * AUDIO_CHANNELS * 4):
            yield np.frombuffer(data, np.float32).reshape(-1, AUDIO_CHANNELS).T

    def _spool_sound(self, packets: list[Packet], index: PacketIndex) -> None:
        for packet in packets:
            self._audio.write(packet.data)
            index.add(packet)

    def _media(self, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        self._video.seek(0)
        self._audio.seek(0)
        for video_bytes, audio_bytes in pieces:
            yield self._video.read(video_bytes)
            yield self._audio.read(audio_bytes)


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The caller learns what is wrong, the log where: paths of the server are no caller's business.
        log.warning("artifacts cannot be written to %s: %s", directory, error)
        raise PhaseError(f"the artifacts cannot be written: {error.strerror or type(error).__name__}") from error
