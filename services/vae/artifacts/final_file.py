"""`final.mp4`: the very pictures of the stream, and a soundtrack encoded anew.

The whole clip's normalisation is known only at its end. Until then packets and samples lie in hidden spool files, so
memory does not grow with the clip.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from core.artifacts import FINAL
from core.budget import AAC_BIT_RATE
from core.geometry import AUDIO_CHANNELS, num_samples
from services.common.files import remove
from services.vae.artifacts.base import Artifact, disk_errors
from services.vae.media.boxes import AudioTrack, Packet, VideoTrack
from services.vae.media.encoders import AacEncoder
from services.vae.media.file_muxer import PacketIndex, lay_out

_PCM_BLOCK_SAMPLES = 32_000


class FinalFile(Artifact):
    """`final.mp4` of one clip, or `refined.mp4`, in the making."""

    def __init__(self, directory: Path, video: VideoTrack, name: str = FINAL) -> None:
        """Opens the spools."""
        super().__init__(directory, name)
        self._track = video
        self._video_index = PacketIndex()
        self._open_files: list[BinaryIO] = []
        self._spools = [directory / f".{name}.{kind}" for kind in ("video", "pcm", "audio")]
        with disk_errors(self.name):
            self._video, self._pcm, self._audio = map(self._open, self._spools)

    def add_packet(self, packet: Packet) -> None:
        """Spools the next picture."""
        with disk_errors(self.name):
            self._video.write(packet.data)
        self._video_index.add(packet)

    def add_sound(self, pcm: npt.NDArray[np.float32]) -> None:
        """Spools the next samples."""
        with disk_errors(self.name):
            self._pcm.write(np.ascontiguousarray(pcm.T).tobytes())

    def discard(self) -> None:
        """Removes the spools and whatever is not complete. A complete file stays."""
        super().discard()
        for path in self._spools:
            remove(path)

    def _complete(self, divisor: float) -> None:
        """Encodes the sound, divided by `divisor`, and writes the file. Raises MuxError if the sound fails."""
        encoder = AacEncoder()
        audio_index = PacketIndex()
        for block in self._pcm_blocks():
            self._spool_sound(encoder.encode(block / np.float32(divisor)), audio_index)
        self._spool_sound(encoder.flush(), audio_index)
        samples = num_samples(self._track.num_frames)
        audio = AudioTrack(encoder.decoder_configuration, AAC_BIT_RATE, encoder.priming_samples, samples)
        layout = lay_out(self._track, audio, self._video_index, audio_index)
        part = self._open(self._part)
        part.write(layout.header)
        for data in self._media(layout.pieces):
            part.write(data)
        part.close()

    def _close(self) -> None:
        for file in self._open_files:
            with contextlib.suppress(OSError):  # a full disk also fails the flush of a close
                file.close()

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
