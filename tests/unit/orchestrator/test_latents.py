from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.geometry import MAX_FRAMES, chunk_table
from core.latents_file import FORMAT, latent_shapes
from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2
from orchestrator.latents import (
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    PART_BYTES,
    StoredTensor,
    TensorWriter,
    read_latents,
    to_its_end,
)
from tests.service.conftest import CLIP
from tests.service.fake_workers import latents_file

LARGE = dataclasses.replace(CLIP, num_frames=MAX_FRAMES, width=1376, height=768)


def stored(tmp_path: Path, values: np.ndarray) -> StoredTensor:
    path = tmp_path / "tensor"
    path.write_bytes(b"prefix" + values.tobytes())
    return StoredTensor(path, 6, values.shape)


def joined(parts: list[types_pb2.TensorPart], name: str) -> np.ndarray:
    assert {part.name for part in parts} == {name}
    assert [bool(part.shape) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [bool(part.data_type) for part in parts] == [True] + [False] * (len(parts) - 1)
    starts = np.cumsum([0, *(len(part.data) for part in parts)])
    assert [part.offset_bytes for part in parts] == list(starts[:-1])
    assert all(len(part.data) <= PART_BYTES for part in parts)
    return np.frombuffer(b"".join(part.data for part in parts), np.float32).reshape(tuple(parts[0].shape))


async def test_a_tensor_leaves_in_parts(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1, 24, 12, 30, 60)).astype(np.float32)
    parts = [part async for part in stored(tmp_path, values).parts("video")]
    assert len(parts) == 3
    np.testing.assert_array_equal(joined(parts, "video"), values)


@pytest.mark.parametrize(("name", "shape"), latent_shapes(CLIP).items())
async def test_the_slices_of_all_chunks_are_the_whole(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tensor = stored(tmp_path, values)
    slices = []
    for chunk in chunk_table(CLIP.num_frames):
        span = (chunk.video_start, chunk.video_stop) if name == "video" else (chunk.audio_start, chunk.audio_stop)
        slices.append(joined(await tensor.time_slice(name, *span), name))
    np.testing.assert_array_equal(np.concatenate(slices, 2 if name == "video" else 3), values)


async def test_a_file_that_has_become_shorter_is_no_latents(tmp_path: Path) -> None:
    tensor = stored(tmp_path, np.zeros((1, 24, 12, 4, 4), np.float32))
    tensor.path.write_bytes(b"short")
    for read in (tensor.sha256(), tensor.time_slice("video", 1, 2)):
        with pytest.raises(PhaseError, match="their file has become shorter"):
            await read
    tensor.path.unlink()
    with pytest.raises(PhaseError, match="cannot be read: No such file"):
        await tensor.sha256()


def test_the_largest_clip_fits_the_largest_file(tmp_path: Path) -> None:
    shapes = latent_shapes(LARGE)
    size = sum(int(np.prod(shape)) * 4 for shape in shapes.values())
    assert 8 + MAX_HEADER_BYTES + size == MAX_FILE_BYTES
    about = {"format": FORMAT, "num_frames": str(MAX_FRAMES), "width": "1376", "height": "768", "seed": "1"}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "large", about)
    assert (tmp_path / "large").stat().st_size <= MAX_FILE_BYTES
    file = read_latents(tmp_path / "large", CLIP)
    assert file.clip == dataclasses.replace(LARGE, seed=1)
    assert (file.latents.video.shape, file.latents.audio.shape) == (shapes["video"], shapes["audio"])


def test_a_header_says_what_the_file_is(tmp_path: Path) -> None:
    clip = dataclasses.replace(CLIP, video_shift=0.1 + 0.2, audio_shift=100.0)
    (tmp_path / "file").write_bytes(latents_file(clip, seed=2**64 - 1))
    file = read_latents(tmp_path / "file", LARGE)
    assert file.clip == dataclasses.replace(clip, seed=2**64 - 1)
    with pytest.raises(ValueError, match=r"^cannot be read: No such file"):
        read_latents(tmp_path / "none", CLIP)


def parts_of(name: str, values: np.ndarray, piece: int) -> list[types_pb2.TensorPart]:
    data = values.tobytes()
    made = [
        types_pb2.TensorPart(name=name, offset_bytes=start, data=data[start : start + piece])
        for start in range(0, len(data), piece)
    ]
    made[0].shape.extend(values.shape)
    return made


async def test_what_a_worker_sends_is_written_and_read_back(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1, 32, 2, 65)).astype(np.float32)
    writer = TensorWriter(tmp_path, {"audio": values.shape, "exact_audio": values.shape})
    for pair in zip(parts_of("audio", values, 1000), parts_of("exact_audio", -values, 1000), strict=True):
        for part in pair:
            writer.add(part)
    tensors = writer.finish()
    np.testing.assert_array_equal(joined([p async for p in tensors["audio"].parts("audio")], "audio"), values)
    np.testing.assert_array_equal(
        joined([p async for p in tensors["exact_audio"].parts("audio_before")], "audio_before"), -values
    )


def test_a_worker_that_sends_something_else_is_told(tmp_path: Path) -> None:
    values = np.zeros((1, 32, 2, 65), np.float32)
    first, second = parts_of("audio", values, 10_000)
    for wrong in (
        [second],
        [first, first],
        parts_of("video", values, 10**6),
        parts_of("audio", values[..., 1:], 10**6),
    ):
        writer = TensorWriter(tmp_path, {"audio": values.shape})
        with pytest.raises(PhaseError, match="a worker sent byte"):
            [writer.add(part) for part in wrong]
    writer = TensorWriter(tmp_path, {"audio": values.shape})
    writer.add(first)
    with pytest.raises(PhaseError, match="a worker sent 10000 bytes of 'audio', expected 16640"):
        writer.finish()
    with pytest.raises(PhaseError, match="refined latents cannot be written"):
        TensorWriter(tmp_path / "none", {"audio": values.shape}).add(first)


async def test_a_cancellation_waits_for_what_is_being_written() -> None:
    begun, may_end, done = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def write() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        done.append(True)

    writing = asyncio.create_task(to_its_end(write))
    await begun.wait()
    writing.cancel()
    await asyncio.sleep(0)
    assert not writing.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert done == [True]
