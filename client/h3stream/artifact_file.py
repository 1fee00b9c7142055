"""What an artifact is downloaded to: a file that has its name only once it is whole and right, or a pipe."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from h3stream.codec import artifact_from_proto
from h3stream.errors import BrokenStreamError
from h3stream.events import Artifact
from h3stream.v1 import video_pb2

_BLOCK_BYTES = 1 << 20
_DESCRIPTORS = {"/dev/stdout": 1, "/dev/stderr": 2}


class ArtifactSink(Protocol):
    """Where the pieces of an artifact go."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are there: where to go on."""

    def take(self, response: video_pb2.DownloadArtifactResponse) -> None:
        """Takes the next message of a download. Raises OSError."""

    def start_anew(self) -> bool:
        """Drops what an earlier download left; returns whether there was any."""

    def keep(self) -> Artifact | None:
        """Ends a download; None if what an earlier one left is not of this artifact, which is to be started anew.

        Raises BrokenStreamError if what came is wrong although it was downloaded as a whole.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_sink(path: str | os.PathLike[str]) -> ArtifactSink:
    """What takes an artifact that is downloaded to `path`.

    A regular file, or one that is not there yet, appears whole; of a symbolic link, its target does. Anything else,
    such as a pipe or a device, is written into. Raises OSError.
    """
    if is_written_into(path):
        return ArtifactPipe(path)
    return ArtifactFile(path)


def is_written_into(path: str | os.PathLike[str]) -> bool:
    """Whether a path is something that no file can take the place of."""
    if _descriptor(path) is not None:
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


class ArtifactFile:
    """Takes the pieces of an artifact in `PATH.part`, which a download that broke off leaves for the next to go on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens what an earlier download left, if there is any. Raises OSError, also if another one writes it."""
        self._path = os.path.realpath(path)
        self._part = self._path + ".part"
        self._file = _open_locked(self._part)
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
        raise _wrong(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the file; what has arrived stays."""
        with self._file:  # the lock goes last: nobody else may have begun to fill what is removed
            if self.num_bytes == 0 and _is_named(self._file.fileno(), self._part):
                os.unlink(self._part)

    def _sha256(self) -> str:
        digest = hashlib.sha256()
        self._file.seek(0)
        while block := self._file.read(_BLOCK_BYTES):
            digest.update(block)
        return digest.hexdigest()


class ArtifactPipe:
    """Hands the pieces of an artifact on as they come; nothing can be taken back, so nothing is resumed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: what there is already, or an open descriptor's name such as /dev/stdout. Raises OSError."""
        self._path = os.fspath(path)
        descriptor = _descriptor(path)
        # Not opened anew where it is open already: a file behind it goes on where it is, as for any other program.
        target = os.open(path, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
        self._file = open(target, "wb", buffering=0)  # noqa: SIM115 - __exit__ closes it
        self._artifact: Artifact | None = None
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that have been handed on."""
        return self._num_bytes

    def take(self, response: video_pb2.DownloadArtifactResponse) -> None:
        """Takes the next message of a download. Raises OSError."""
        if response.HasField("artifact"):
            self._artifact = artifact_from_proto(response.artifact)
            return
        left = memoryview(response.data)
        while left:
            left = left[self._file.write(left) :]
        self._digest.update(response.data)
        self._num_bytes += len(response.data)

    def start_anew(self) -> bool:
        """Nothing is dropped."""
        return False

    def keep(self) -> Artifact | None:
        """Raises BrokenStreamError if what came is not the artifact."""
        artifact = self._artifact
        if artifact is None or (self._num_bytes, self._digest.hexdigest()) != (artifact.size_bytes, artifact.sha256):
            raise _wrong(self._path)
        return artifact

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _open_locked(part: str) -> BinaryIO:
    """Opens the file for what has arrived, for this download alone."""
    import fcntl  # not on Windows, where the rest of the SDK works

    while True:
        descriptor = _open_part(part)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _in_the_way(part)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(error.errno, f"another download is writing {part}", part) from error
            if _is_named(descriptor, part):
                return open(descriptor, "ab+")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the download that had it has just ended; its file is no part any more


def _open_part(part: str) -> int:
    # Never waits for the reader of a pipe, and never follows a link that somebody has put there.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(part, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise _in_the_way(part) from error
        raise


def _is_named(descriptor: int, path: str) -> bool:
    """Whether a path is still that of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _in_the_way(part: str) -> OSError:
    return OSError(errno.EEXIST, f"{part}, where what arrives is kept, is no regular file", part)


def _wrong(path: str) -> BrokenStreamError:
    return BrokenStreamError(f"what arrived for {path} is not what the server has: its checksum is another")


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """The open descriptor that a path stands for; None for any other path."""
    text = os.fspath(path)
    if found := re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", text):
        return int(found[1])
    return _DESCRIPTORS.get(text)
