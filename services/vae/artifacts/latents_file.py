"""`latents.safetensors`: the latents that the DiT made, each chunk's written to its place as it comes.

The header is written first, since the shapes of a clip are known before it is sampled; so memory holds no more than a
chunk. Source of the format: https://github.com/huggingface/safetensors ("Format").
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from core.artifacts import LATENTS, REFINED_LATENTS
from core.geometry import num_audio_latents, num_video_latents
from core.latents_file import FLOAT_BYTES, FORMAT, SHIFTS, latent_shapes
from h3stream.request import ClipSpec
from services.vae.artifacts.base import Artifact, disk_errors


class LatentsFile(Artifact):
    """`latents.safetensors` of one clip, or `refined-latents.safetensors`, which says so, in the making."""

    def __init__(
        self, directory: Path, clip: ClipSpec, name: str = LATENTS, about: dict[str, str] | None = None
    ) -> None:
        """Opens the file and writes its header.  about: metadata of the file it derives from; None: the clip's own."""
        super().__init__(directory, name)
        self._num_video, self._num_audio = num_video_latents(clip.num_frames), num_audio_latents(clip.num_frames)
        shapes = latent_shapes(clip)
        about = _describe(clip) if about is None else about
        header = _header(shapes, about | ({"refined": "true"} if name == REFINED_LATENTS else {}))
        self._video_start = len(header)
        self._audio_start = self._video_start + int(np.prod(shapes["video"])) * FLOAT_BYTES
        self._video_done = self._audio_done = 0
        self._fd = -1
        with disk_errors(name):
            self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self._write(header, 0)

    def add_latents(self, video: npt.NDArray[np.float32], audio: npt.NDArray[np.float32]) -> None:
        """Writes the next latents to their places: a run in every channel's row of time."""
        with disk_errors(self.name):
            self._write_runs(video[0], self._video_start, self._video_done, self._num_video)
            self._write_runs(audio[0].reshape(-1, audio.shape[3]), self._audio_start, self._audio_done, self._num_audio)
        self._video_done += video.shape[2]
        self._audio_done += audio.shape[3]

    def _write_runs(self, rows: npt.NDArray[np.float32], start: int, done: int, total: int) -> None:
        """Writes rows `[channels, t, ...]` behind the `done` of `total` time steps that each channel already has."""
        step_bytes = rows[0, 0].size * FLOAT_BYTES
        for channel, row in enumerate(rows):
            self._write(row.astype("<f4", copy=False).tobytes(), start + (channel * total + done) * step_bytes)

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self._fd, view, offset + len(data) - len(view)) :]

    def _complete(self, divisor: float) -> None:
        assert (self._video_done, self._audio_done) == (self._num_video, self._num_audio), "latents are missing"
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


def _describe(clip: ClipSpec) -> dict[str, str]:
    return {
        "format": FORMAT,
        "num_frames": str(clip.num_frames),
        "width": str(clip.width),
        "height": str(clip.height),
        "seed": str(clip.seed),
        **{name: repr(float(getattr(clip, name))) for name in SHIFTS},
    }


def _header(shapes: Mapping[str, tuple[int, ...]], about: Mapping[str, str]) -> bytes:
    """The length, then the JSON, padded with spaces to a multiple of 8 bytes so that the tensors are aligned."""
    content: dict[str, object] = {"__metadata__": about}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + int(np.prod(shape)) * FLOAT_BYTES
        content[name] = {"dtype": "F32", "shape": shape, "data_offsets": (offset, stop)}
        offset = stop
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
