"""The log of one job as it is written: every event, on disk before anyone is told of it.

`orchestrator/replay.py` reads it, in another process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from h3stream.errors import GenerationError, PhaseError
from h3stream.v1 import video_pb2


class JobLog:
    """Events of one job, numbered from 0, in a file of AttachResponse messages: what is sent is what is stored."""

    _fd = -1

    def __init__(self, path: Path) -> None:
        """Raises PhaseError if the file cannot be made."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(error) from error
        self.path = path
        """The file."""
        self._num_events = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self._error: GenerationError | None = None

    def __len__(self) -> int:
        return self._num_events

    def append(self, event: video_pb2.Event) -> None:
        """Writes an event and tells the followers. Raises PhaseError if the file takes no more; the log stays whole."""
        assert not self._is_closed, "event after the end of the job"
        assert event.seq == self._num_events, f"event {event.seq} appended as number {self._num_events}"
        data = video_pb2.AttachResponse(event=event).SerializeToString()
        view = memoryview(data)
        try:
            while view:
                view = view[os.pwrite(self._fd, view, self._num_bytes + len(data) - len(view)) :]
        except OSError as error:
            raise _unwritable(error) from error
        self._num_bytes += len(data)
        self._num_events += 1
        self._tell()

    def close(self, error: GenerationError | None) -> None:
        """Marks the job's end; followers that reach it stop, or raise `error`."""
        self._is_closed = True
        self._error = error
        self._tell()

    async def follow(self) -> AsyncIterator[int]:
        """Yields the number of events, now and whenever it has grown, until the job ends; raises its error, if any."""
        told = -1
        while True:
            if told < self._num_events:
                told = self._num_events
                yield told
            elif not self._is_closed:
                await self._changed.wait()
            elif self._error is not None:
                raise self._error.with_traceback(None)  # one error, many followers
            else:
                return

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _unwritable(error: OSError) -> PhaseError:
    return PhaseError(f"the job's events cannot be written: {error.strerror}")
