"""What all artifacts have in common: what they are given, their hidden file, and how it gets its name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from core.artifacts import REFINED_ARTIFACTS, WORKER_ARTIFACTS
from h3stream.errors import PhaseError
from services.common.files import part_path, publish, remove
from services.vae.media.boxes import Packet

log = logging.getLogger(__name__)

_MEDIA_TYPES = WORKER_ARTIFACTS | REFINED_ARTIFACTS


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


class Artifact:
    """One file in the making: takes of a clip what it needs and passes over the rest.

    Every method but `discard` raises PhaseError, with the cause, if the file cannot be written.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Makes the directory if need be."""
        self.name = name
        self._directory = directory
        self._part = part_path(directory / name)
        with disk_errors(name):
            directory.mkdir(parents=True, exist_ok=True)

    def add_media(self, data: bytes) -> None:
        """Takes the init segment or the next fragment."""

    def add_packet(self, packet: Packet) -> None:
        """Takes the next encoded picture."""

    def add_picture(self, rgb: npt.NDArray[np.uint8]) -> None:
        """Takes the next frame, `[height, width, 3]`."""

    def add_sound(self, pcm: npt.NDArray[np.float32]) -> None:
        """Takes the next samples, `[2, S]`."""

    def add_latents(self, video: npt.NDArray[np.float32], audio: npt.NDArray[np.float32]) -> None:
        """Takes the next latents, `[1, 24, t, H, W]` and `[1, 32, 2, a]`."""

    def add_spectrogram(self, title: str, levels: npt.NDArray[np.float32]) -> None:
        """Takes a whole sound's spectrogram: dB `[frames, bands]`, as `services/vae/spectrogram.py` makes it."""

    def finish(self, divisor: float) -> ArtifactFile:
        """Completes the file and gives it its name.

        divisor: what a normalised soundtrack is divided by.
        """
        with disk_errors(self.name):
            self._complete(divisor)
            size, sha256 = publish(self._directory / self.name)
        self.discard()
        return ArtifactFile(self.name, _MEDIA_TYPES[self.name], size, sha256)

    def discard(self) -> None:
        """Removes whatever is not complete, as far as it can be removed. A complete file stays. May be called again."""
        self._close()
        remove(self._part)

    def _complete(self, divisor: float) -> None:
        """Writes what is still to be written and closes the file."""
        raise NotImplementedError

    def _close(self) -> None:
        """Lets go of everything that is open, without raising."""
        raise NotImplementedError


@contextlib.contextmanager
def disk_errors(name: str) -> Iterator[None]:
    """Tells what stops a file from being written as a PhaseError."""
    try:
        yield
    except (OSError, av.FFmpegError) as error:
        # The caller learns what is wrong, the log where: paths of the server are no caller's business.
        log.warning("%s cannot be written: %s", name, error)
        raise PhaseError(f"{name} cannot be written: {error.strerror or type(error).__name__}") from error
