"""The latents of a job's finished chunks, one file each: what the job goes on from when a process was lost.

A file is on the disk before its chunk is decoded or committed. Nothing here looks inside a latent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, workers_pb2
from orchestrator.sealed import read_sealed, write_sealed
from orchestrator.worker_clients import TensorParts
from services.common.files import fsync_directory

CHUNKS_NAME = ".chunks"
"""The folder in a job's directory."""
OPENED_NAME = "opened.binpb"
"""What the DiT worker said of the session, beside the chunks."""
_LENGTH_BYTES = 4


class ChunkStore:
    """Finished chunks by their index. A file is sealed and holds the parts, each behind its length (four bytes,
    little-endian)."""

    def __init__(self, job_directory: Path) -> None:
        """job_directory: exists; the folder in it is made with the first chunk."""
        self.directory = job_directory / CHUNKS_NAME
        """The folder."""

    def put(self, index: int, parts: Iterable[types_pb2.TensorPart]) -> None:
        """Writes the latents of a chunk and synchronises them. Raises PhaseError if they cannot be written."""
        records = [part.SerializeToString() for part in parts]
        body = b"".join(len(record).to_bytes(_LENGTH_BYTES, "little") + record for record in records)
        self._write(self.path(index), body)

    def get(self, index: int) -> TensorParts | None:
        """The latents of a chunk; None if they are not there, or not as they were written."""
        body = read_sealed(self.path(index))
        return None if body is None else tuple(_parts(body))

    def path(self, index: int) -> Path:
        """The file of a chunk."""
        return self.directory / f"{index:04d}.latents"

    @property
    def num_finished(self) -> int:
        """Chunks from the first on whose files are there, whole or not."""
        count = 0
        while self.path(count).exists():
            count += 1
        return count

    def note_opened(self, opened: workers_pb2.DitServiceOpenSessionResponse) -> None:
        """Writes down what the DiT worker said when the session was opened. Raises PhaseError if it cannot."""
        self._write(self.directory / OPENED_NAME, opened.SerializeToString())

    def opened(self) -> workers_pb2.DitServiceOpenSessionResponse:
        """What was written down; empty if nothing was."""
        body = read_sealed(self.directory / OPENED_NAME)
        return workers_pb2.DitServiceOpenSessionResponse.FromString(body or b"")

    def _write(self, path: Path, body: bytes) -> None:
        try:
            if not self.directory.exists():
                self.directory.parent.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
                self.directory.mkdir(mode=0o700)
                fsync_directory(self.directory.parent)
            write_sealed(path, body)
        except OSError as error:
            raise PhaseError(f"the latents of finished chunks cannot be stored: {error.strerror}") from error


def _parts(body: bytes) -> Iterator[types_pb2.TensorPart]:
    start = 0
    while start < len(body):
        stop = start + _LENGTH_BYTES + int.from_bytes(body[start : start + _LENGTH_BYTES], "little")
        yield types_pb2.TensorPart.FromString(body[start + _LENGTH_BYTES : stop])
        start = stop
