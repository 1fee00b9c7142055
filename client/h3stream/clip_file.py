"""The file that a stream is saved to, playable after every event."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self

from h3stream.errors import MuxError
from h3stream.events import Accepted, Completed, Event, JobWarning, StreamComplete


class ClipFile:
    """Appends the media of events to a file, which is made or overwritten when the job is accepted.

    So a request that is refused leaves an older file as it was, a job that fails later leaves what had arrived, and
    what is there when it ends is never another clip.
    """

    def __init__(self, path: str | os.PathLike[str] | int) -> None:
        """path: may also be an open file descriptor, which the file then owns."""
        self._path = path
        self._file: BinaryIO | None = None
        self._num_bytes = 0
        self._is_whole = False
        self._failure = ""

    def write(self, event: Event) -> None:
        """Appends the media of an event, if it has any. Raises OSError."""
        match event:
            case StreamComplete():
                self._is_whole = True
            case JobWarning(reason="STREAM_FAILED"):
                self._failure = f": {event.message}"
        if self._file is None and (event.media or isinstance(event, Accepted)):
            self._file = open(self._path, "wb")  # noqa: SIM115 - close() closes it
        if self._file is not None and event.media:
            self._file.write(event.media)
            self._file.flush()
            self._num_bytes += len(event.media)

    def check(self, completed: Completed) -> None:
        """Raises MuxError if the job has ended well and its stream has not."""
        if self._is_whole:
            return
        kept = f"the file keeps the {self._num_bytes} bytes that came" if self._num_bytes else "there is no file"
        names = ", ".join(artifact.name for artifact in completed.artifacts) or "nothing"
        raise MuxError(
            f"the stream of the clip is not whole{self._failure}; {kept}; the server has of the job: {names}",
            job_id=completed.job_id,
        )

    def close(self) -> None:
        """Closes the file; one that nothing came for is removed."""
        if self._file is None:
            return
        self._file.close()
        if not self._num_bytes and not isinstance(self._path, int) and _is_plain_file(self._path):
            with suppress(OSError):  # an empty file is no other clip either
                os.unlink(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_plain_file(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)
