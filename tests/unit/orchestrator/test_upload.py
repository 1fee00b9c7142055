from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

from h3stream.v1 import video_pb2
from orchestrator.latents import MAX_FILE_BYTES, StoredTensor
from orchestrator.upload import receive

PIECE_BYTES = 512 * 1024
NUM_PIECES = MAX_FILE_BYTES // PIECE_BYTES
MOST_BYTES = 6 * PIECE_BYTES
"""What a large file may take of memory on its way, each way."""


async def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    size = NUM_PIECES * PIECE_BYTES

    async def messages() -> AsyncIterator[video_pb2.RefineAudioRequest]:
        for number in range(NUM_PIECES):
            yield video_pb2.RefineAudioRequest(data=bytes([number]) * PIECE_BYTES)

    tracemalloc.start()
    try:
        await receive(messages(), video_pb2.LatentsUpload(size_bytes=size), tmp_path / "file")
        received = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        num_bytes = 0
        async for part in StoredTensor(tmp_path / "file", 0, (size // 4,)).parts("video"):
            num_bytes += len(part.data)
        sent = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "file").stat().st_size == num_bytes == size > 10 * MOST_BYTES
    print(f"{size / 2**20:.0f} MiB took {received / 2**20:.1f} in, {sent / 2**20:.1f} out")
    assert received < MOST_BYTES
    assert sent < MOST_BYTES
