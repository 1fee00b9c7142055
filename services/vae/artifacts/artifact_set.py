"""All artifacts of one clip. One that fails is given up by itself: neither the clip nor the others suffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h3stream.errors import PhaseError
from services.common.files import remove
from services.vae.artifacts.base import Artifact, ArtifactFile
from services.vae.media.boxes import Packet

Maker = Callable[[Path], Artifact]
"""Starts an artifact in a directory."""


@dataclass(frozen=True)
class ArtifactFailure:
    """An artifact that could not be written."""

    name: str
    """Its name."""
    message: str
    """Why, in a sentence."""


class ArtifactSet:
    """The artifacts of one clip, in the making. Its methods raise nothing: `failures` tells what went wrong."""

    def __init__(self, directory: Path | None, makers: Mapping[str, Maker]) -> None:
        """directory: None writes nothing.  makers: by the names of the artifacts wanted."""
        self.failures: list[ArtifactFailure] = []
        """What has been given up, in order."""
        self._directory = directory
        self._open: dict[str, Artifact] = {}
        for name, make in makers.items() if directory is not None else ():
            assert directory is not None
            try:
                self._open[name] = make(directory)
            except PhaseError as error:
                for path in directory.glob(f".{name}.*"):  # what it had opened by then
                    remove(path)
                self.failures.append(ArtifactFailure(name, error.message))

    def wants(self, name: str) -> bool:
        """Whether an artifact of that name is in the making."""
        return name in self._open

    def add_media(self, data: bytes) -> None:
        """Takes the init segment or the next fragment."""
        self._each(lambda artifact: artifact.add_media(data))

    def add_packet(self, packet: Packet) -> None:
        """Takes the next encoded picture."""
        self._each(lambda artifact: artifact.add_packet(packet))

    def add_picture(self, rgb: npt.NDArray[np.uint8]) -> None:
        """Takes the next frame, `[height, width, 3]`."""
        self._each(lambda artifact: artifact.add_picture(rgb))

    def add_sound(self, pcm: npt.NDArray[np.float32]) -> None:
        """Takes the next samples, `[2, S]`."""
        self._each(lambda artifact: artifact.add_sound(pcm))

    def add_latents(self, video: npt.NDArray[np.float32], audio: npt.NDArray[np.float32]) -> None:
        """Takes the next latents, `[1, 24, t, H, W]` and `[1, 32, 2, a]`."""
        self._each(lambda artifact: artifact.add_latents(video, audio))

    def add_spectrogram(self, title: str, levels: npt.NDArray[np.float32]) -> None:
        """Takes a whole sound's spectrogram, dB `[frames, bands]`."""
        self._each(lambda artifact: artifact.add_spectrogram(title, levels))

    def give_up(self, name: str, message: str) -> None:
        """Discards an artifact that can no longer be completed; changes nothing if there is none of that name."""
        if (artifact := self._open.pop(name, None)) is not None:
            artifact.discard()
            self.failures.append(ArtifactFailure(name, message))

    def finish(self, divisor: float) -> list[ArtifactFile]:
        """Completes the artifacts; returns those that are whole."""
        files: list[ArtifactFile] = []
        self._each(lambda artifact: files.append(artifact.finish(divisor)))
        self._open.clear()
        return files

    def remove(self, files: Iterable[ArtifactFile]) -> None:
        """Takes complete files back, for a caller that nobody waits for any more."""
        for file in files:
            assert self._directory is not None
            remove(self._directory / file.name)

    def discard(self) -> None:
        """Removes what is not complete."""
        for artifact in self._open.values():
            artifact.discard()

    def _each(self, action: Callable[[Artifact], object]) -> None:
        for name, artifact in list(self._open.items()):
            try:
                action(artifact)
            except PhaseError as error:
                self.give_up(name, error.message)
