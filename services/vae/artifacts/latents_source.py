"""`latents.safetensors` of a finished job, read back in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from core.latents_file import FLOAT_BYTES, latent_shapes
from h3stream.errors import CheckpointError, PhaseError
from h3stream.request import ClipSpec
from services.checkpoints.header import read_header


class LatentsSource:
    """The latents of a clip in a file."""

    def __init__(self, path: Path, clip: ClipSpec) -> None:
        """Reads the header. Raises PhaseError if the file cannot be read or is not this clip's."""
        try:
            header = read_header(path)
        except CheckpointError as error:
            # Paths of the server are no caller's business.
            raise PhaseError(str(error).replace(str(path), path.name)) from error
        found = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
        expected = {name: ("F32", shape) for name, shape in latent_shapes(clip).items()}
        if found != expected:
            raise PhaseError(f"{path.name} holds {found}, expected {expected}")
        self.about = header.metadata
        """Metadata of the file."""
        self._path = path
        self._info = header.tensors["video"]

    def video(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Video latents `[start, stop)`, `[1, 24, t, H, W]`. Raises PhaseError if they cannot be read."""
        _, channels, total, height, width = self._info.shape
        cells = height * width
        rows = []
        try:
            for channel in range(channels):
                offset = self._info.start + (channel * total + start) * cells * FLOAT_BYTES
                rows.append(np.fromfile(self._path, "<f4", (stop - start) * cells, offset=offset))
        except OSError as error:
            raise PhaseError(f"{self._path.name} cannot be read: {error.strerror or error}") from error
        if any(row.size != (stop - start) * cells for row in rows):
            raise PhaseError(f"{self._path.name} has become shorter")
        return np.stack(rows).reshape(1, channels, stop - start, height, width)
