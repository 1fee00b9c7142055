"""The file that an artifact is downloaded to: it has its name only once it is whole and its checksum is right."""

from __future__ import annotations

import hashlib
import os
from types import TracebackType
from typing import Self

from h3stream.codec import artifact_from_proto
from h3stream.errors import BrokenStreamError
from h3stream.events import Artifact
from h3stream.v1 import video_pb2

_BLOCK_BYTES = 1 << 20


class ArtifactFile:
    """Takes the pieces of an artifact in `PATH.part`, which a download that broke off leaves for the next to go on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens what an earlier download left, if there is any. Raises OSError."""
        self._path = os.fspath(path)
        self._part = self._path + ".part"
        self._file = open(self._part, "ab+")  # noqa: SIM115 - close() closes it
        self._artifact: Artifact | None = None
        self._is_resumed = self.num_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are there: where to go on."""
        return os.fstat(self._file.fileno()).st_size

    def take(self, response: video_pb2.DownloadArtifactResponse) -> None:
        """Takes the next message of a download. Raises OSError."""
        if response.HasField("artifact"):
            self._artifact = artifact_from_proto(response.artifact)
        else:
            self._file.write(response.data)
            self._file.flush()

    def start_anew(self) -> bool:
        """Drops what an earlier download left; returns whether there was any."""
        was_resumed, self._is_resumed = self._is_resumed, False
        if was_resumed:
            self._file.truncate(0)
        return was_resumed

    def keep(self) -> Artifact | None:
        """Gives the file its name if it is whole; None if what an earlier download left is not of this artifact.

        Raises BrokenStreamError, with nothing left, if it is wrong although it was downloaded as a whole.
        """
        artifact = self._artifact
        if artifact is not None and (self.num_bytes, self._sha256()) == (artifact.size_bytes, artifact.sha256):
            os.fsync(self._file.fileno())
            os.replace(self._part, self._path)
            return artifact
        if self.start_anew():
            return None
        os.unlink(self._part)
        raise BrokenStreamError(f"what arrived for {self._path} is not what the server has: its checksum is another")

    def close(self) -> None:
        """Closes the file; what has arrived stays."""
        self._file.close()
        if os.path.exists(self._part) and os.path.getsize(self._part) == 0:
            os.unlink(self._part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sha256(self) -> str:
        digest = hashlib.sha256()
        self._file.seek(0)
        while block := self._file.read(_BLOCK_BYTES):
            digest.update(block)
        return digest.hexdigest()
