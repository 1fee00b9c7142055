"""`stream.mp4`: the media stream as it was sent, byte for byte."""

from __future__ import annotations

import contextlib
from pathlib import Path

from core.artifacts import STREAM
from services.vae.artifacts.base import Artifact, disk_errors


class StreamFile(Artifact):
    """`stream.mp4` of one clip, in the making."""

    def __init__(self, directory: Path) -> None:
        """Opens the file."""
        super().__init__(directory, STREAM)
        with disk_errors(STREAM):
            self._file = self._part.open("wb")

    def add_media(self, data: bytes) -> None:
        """Appends the init segment or a fragment."""
        with disk_errors(STREAM):
            self._file.write(data)

    def _complete(self, divisor: float) -> None:
        self._file.close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk also fails the flush of a close
            self._file.close()
