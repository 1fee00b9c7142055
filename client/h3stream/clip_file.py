"""The file that a stream is saved to, playable after every event."""

from __future__ import annotations

import os
from types import TracebackType
from typing import BinaryIO, Self

from h3stream.events import Event


class ClipFile:
    """Appends the media of events to a file, which is made or overwritten when the first of them comes.

    So a request that is refused leaves an older file as it was, and one that fails later leaves what had arrived.
    """

    def __init__(self, path: str | os.PathLike[str] | int) -> None:
        """path: may also be an open file descriptor, which the file then owns."""
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, event: Event) -> None:
        """Appends the media of an event, if it has any. Raises OSError."""
        if not event.media:
            return
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115 - close() closes it
        self._file.write(event.media)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
