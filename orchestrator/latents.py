"""Latents in files: what their headers must say, and their bytes on the way to a worker.

A tensor is never in memory as a whole here, and nothing here looks inside one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from core.geometry import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    MAX_CANVAS_PIXELS,
    MAX_FRAMES,
    SPATIAL_COMPRESSION,
    VIDEO_LATENT_CHANNELS,
    Chunk,
    num_audio_latents,
    num_video_latents,
)
from core.latents_file import FLOAT_BYTES, FORMAT, SHIFTS, TIME_AXES, latent_shapes
from core.request import MAX_SEED, MAX_SHIFT, MIN_SHIFT, clip_violations
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.errors import CheckpointError, PhaseError
from h3stream.request import ClipSpec
from h3stream.v1 import types_pb2
from services.checkpoints.header import Header, read_header

PART_BYTES = MAX_MESSAGE_BYTES * 3 // 4
"""Bytes of a part of a tensor: with room for the envelope."""
MAX_HEADER_BYTES = 64 * 1024
"""Largest header of a file of latents, whose two tensors and few strings take some hundred bytes."""
LENGTH_BYTES = 8
"""At the start of a safetensors file: the length of its header, little-endian."""
MAX_FILE_BYTES = (
    LENGTH_BYTES
    + MAX_HEADER_BYTES
    + VIDEO_LATENT_CHANNELS * num_video_latents(MAX_FRAMES) * MAX_CANVAS_PIXELS // SPATIAL_COMPRESSION**2 * FLOAT_BYTES
    + AUDIO_LATENT_CHANNELS * AUDIO_CHANNELS * num_audio_latents(MAX_FRAMES) * FLOAT_BYTES
)
"""Largest file of latents that a clip can have."""
DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?")
"""How a shift is written."""

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class StoredTensor:
    """A float32 tensor in a file."""

    path: Path
    """The file."""
    start: int
    """Position of its first byte."""
    shape: tuple[int, ...]
    """Row-major."""

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * FLOAT_BYTES

    async def parts(self, name: str) -> AsyncIterator[types_pb2.TensorPart]:
        """The tensor on the wire under a name. Raises PhaseError if it cannot be read."""
        for offset in range(0, self.num_bytes, PART_BYTES):
            length = min(PART_BYTES, self.num_bytes - offset)
            data = await asyncio.to_thread(_read, self.path, [(self.start + offset, length)])
            yield _part(name, self.shape, offset, data)

    async def time_slice(self, name: str, start: int, stop: int) -> list[types_pb2.TensorPart]:
        """The latents `[start, stop)` of "video" or "audio" on the wire. Raises PhaseError if they cannot be read."""
        axis = TIME_AXES[name]
        step = math.prod(self.shape[axis + 1 :]) * FLOAT_BYTES
        rows = math.prod(self.shape[:axis])
        runs = [(self.start + (row * self.shape[axis] + start) * step, (stop - start) * step) for row in range(rows)]
        data = await asyncio.to_thread(_read, self.path, runs)
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return [
            _part(name, shape, offset, data[offset : offset + PART_BYTES]) for offset in range(0, len(data), PART_BYTES)
        ]

    async def sha256(self) -> str:
        """SHA-256 of its bytes. Raises PhaseError if they cannot be read."""
        return await asyncio.to_thread(self._sha256)

    def _sha256(self) -> str:
        digest = hashlib.sha256()
        for offset in range(0, self.num_bytes, PART_BYTES):
            length = min(PART_BYTES, self.num_bytes - offset)
            digest.update(_read(self.path, [(self.start + offset, length)]))
        return digest.hexdigest()


@dataclass(frozen=True)
class Latents:
    """The latents of a whole clip."""

    video: StoredTensor
    """`[1, 24, T, H, W]`."""
    audio: StoredTensor
    """`[1, 32, 2, A]`."""

    async def chunk(self, chunk: Chunk) -> tuple[types_pb2.TensorPart, ...]:
        """Those of one chunk on the wire, video before audio. Raises PhaseError if they cannot be read."""
        return (
            *await self.video.time_slice("video", chunk.video_start, chunk.video_stop),
            *await self.audio.time_slice("audio", chunk.audio_start, chunk.audio_stop),
        )


@dataclass(frozen=True)
class LatentsFile:
    """What the header of a file of latents says, checked."""

    latents: Latents
    """Its tensors."""
    clip: ClipSpec
    """Whose they are: size, seed and shifts as the file tells them, all else as in its likeness."""


def read_latents(path: Path, likeness: ClipSpec) -> LatentsFile:
    """Checks the header of a file of latents; their values are for the DiT worker to check.

    likeness: a valid clip, for what the file does not tell.
    Raises ValueError that says what is wrong, and goes on from a name for the file.
    """
    _check_length(path)
    try:
        header = read_header(path)
    except CheckpointError as error:
        raise ValueError(str(error).removeprefix(str(path)).lstrip(": ")) from error
    about = header.metadata
    if about.get("format") != FORMAT:
        raise ValueError(f"says {about.get('format')!r:.80} as its format; it must be {FORMAT!r}, as jobs write it")
    num_frames, width, height = (_number(about, name) for name in ("num_frames", "width", "height"))
    seed = _number(about, "seed") if "seed" in about else likeness.seed
    if seed > MAX_SEED:
        raise ValueError(f"says {seed} as its seed; it must be at most {MAX_SEED}")
    video_shift, audio_shift = (_shift(about, name) if name in about else getattr(likeness, name) for name in SHIFTS)
    clip = dataclasses.replace(
        likeness,
        num_frames=num_frames,
        width=width,
        height=height,
        video_shift=video_shift,
        audio_shift=audio_shift,
        seed=seed,
    )
    if violations := clip_violations(clip):
        raise ValueError("is of no valid clip: " + "; ".join(violation.description for violation in violations))
    return LatentsFile(_tensors(header, clip), clip)


class TensorWriter:
    """Takes the tensors of a worker's answer, part by part, into files."""

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """directory: for one hidden file a tensor.  shapes: of those that must come, by their names."""
        self._directory = directory
        self._shapes = shapes
        self._done = dict.fromkeys(shapes, 0)

    def add(self, part: types_pb2.TensorPart) -> None:
        """Takes the next part of a tensor. Raises PhaseError for anything else, and if it cannot be written."""
        name, done = part.name, self._done.get(part.name)
        if done is None or part.offset_bytes != done or (not done and tuple(part.shape) != self._shapes[name]):
            raise PhaseError(f"a worker sent byte {part.offset_bytes} of {name!r} {list(part.shape)}, expected {done}")
        try:
            with self._path(name).open("r+b" if done else "wb") as file:
                file.seek(done)
                file.write(part.data)
        except OSError as error:
            raise PhaseError(f"refined latents cannot be written: {error.strerror}") from error
        self._done[name] = done + len(part.data)

    def finish(self) -> dict[str, StoredTensor]:
        """The tensors, by their names. Raises PhaseError if one is not whole."""
        tensors = {name: StoredTensor(self._path(name), 0, shape) for name, shape in self._shapes.items()}
        for name, tensor in tensors.items():
            if self._done[name] != tensor.num_bytes:
                raise PhaseError(f"a worker sent {self._done[name]} bytes of {name!r}, expected {tensor.num_bytes}")
        return tensors

    def _path(self, name: str) -> Path:
        return self._directory / f".{name}.f32"


async def to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function beside the event loop; a cancellation is passed on once it has returned, so that nothing is
    written behind the back of whoever cancels."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _check_length(path: Path) -> None:
    """Raises ValueError for a header that is too long to be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if MAX_HEADER_BYTES < length <= size - LENGTH_BYTES:
        raise ValueError(f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are accepted")


def _number(about: Mapping[str, str], name: str) -> int:
    text = about.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError(f"says {text!r:.80} as its {name}; it must be a number")
    return int(text)


def _shift(about: Mapping[str, str], name: str) -> float:
    """A number that need not be a valid shift: infinite where it has more digits than a float."""
    text = about[name]
    if not DECIMAL.fullmatch(text):
        rule = f"it must be a decimal number from {MIN_SHIFT:g} to {MAX_SHIFT:g}"
        raise ValueError(f"says {text!r:.80} as its {name}; {rule}")
    return float(text)


def _tensors(header: Header, clip: ClipSpec) -> Latents:
    expected = latent_shapes(clip)
    found = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
    wanted = {name: ("F32", shape) for name, shape in expected.items()}
    if found != wanted:
        told = ", ".join(f"{name[:40]!r} {dtype} {list(shape)}" for name, (dtype, shape) in [*found.items()][:4])
        must = ", ".join(f"{name!r} F32 {list(shape)}" for name, shape in expected.items())
        size = f"{clip.num_frames} frames of {clip.width}x{clip.height}"
        raise ValueError(f"holds {len(found)} tensors ({told or 'none'}); for {size} it must hold {must}")
    stored = {name: StoredTensor(header.path, info.start, info.shape) for name, info in header.tensors.items()}
    return Latents(stored["video"], stored["audio"])


def _part(name: str, shape: tuple[int, ...], offset: int, data: bytes) -> types_pb2.TensorPart:
    part = types_pb2.TensorPart(name=name, offset_bytes=offset, data=data)
    if offset == 0:
        part.data_type = types_pb2.DATA_TYPE_FLOAT32
        part.shape.extend(shape)
    return part


def _read(path: Path, runs: list[tuple[int, int]]) -> bytes:
    """Bytes of a file, each run given by position and length."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = b"".join(os.pread(fd, length, start) for start, length in runs)
        finally:
            os.close(fd)
    except OSError as error:
        raise PhaseError(f"the clip's latents cannot be read: {error.strerror}") from error
    if len(data) != sum(length for _, length in runs):
        raise PhaseError("the clip's latents cannot be read: their file has become shorter")
    return data
