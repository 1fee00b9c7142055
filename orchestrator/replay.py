"""The log of one job: every event, on disk before anyone sees it, read by any number of readers at their own pace.

A reader holds one event in memory and never slows the writer; one that stalls or goes away costs nothing. Memory holds
a few numbers of each event, the disk the rest.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from h3stream.errors import GenerationError, PhaseError
from h3stream.v1 import video_pb2

WAKE_AT_ONCE = 8
"""Readers told of an event in one turn of the event loop: a job waits for no more of its viewers than these."""


class JobLog:
    """Events of one job, numbered from 0."""

    _fd = -1

    def __init__(self, path: Path) -> None:
        """Raises PhaseError if the file cannot be made."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(error) from error
        self._ends = array("Q")  # end offset of each event in the file
        self._init_seq: int | None = None
        self._keyframe_seqs = array("Q")  # fragments that decoding can start at
        self._keyframe_chunks = array("q")  # and the chunks they belong to, never falling
        self._media_end_seq: int | None = None  # the first event after all media
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False
        self._error: GenerationError | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, event: video_pb2.Event) -> None:
        """Writes an event and tells the readers. Raises PhaseError if the file takes no more; the log stays whole."""
        assert not self._is_closed, "event after the end of the job"
        assert event.seq == len(self._ends), f"event {event.seq} appended as number {len(self._ends)}"
        data = event.SerializeToString()
        start = self._ends[-1] if self._ends else 0
        view = memoryview(data)
        try:
            while view:
                view = view[os.pwrite(self._fd, view, start + len(data) - len(view)) :]
        except OSError as error:
            raise _unwritable(error) from error
        self._ends.append(start + len(data))
        self._note(event)
        self._wake()

    def close(self, error: GenerationError | None) -> None:
        """Marks the job's end; readers that reach it stop, or raise `error`."""
        self._is_closed = True
        self._error = error
        self._wake()

    async def read(self, from_seq: int = 0) -> AsyncIterator[video_pb2.Event]:
        """Yields the events from `from_seq` on, waiting for more until the job ends; raises the job's error, if any."""
        seq = from_seq
        while True:
            while seq < len(self._ends):
                yield self._event(seq)
                seq += 1
            if self._is_closed:
                if self._error is not None:
                    raise self._error.with_traceback(None)  # one error, many readers
                return
            await self._growth()

    async def join(self, from_chunk: int | None = None) -> AsyncIterator[video_pb2.Event]:
        """Yields what a player needs that was not there from the start: event 0, the init segment as soon as there is
        one, then everything from a keyframe on. Ends as `read` does.

        from_chunk: wait for the first keyframe of this chunk or a later one, as the first chunk completes no frame;
        None takes the latest keyframe there is, or waits for one. Where the media end before that, what follows them
        is yielded.
        """
        latest = max(len(self._keyframe_seqs) - 1, 0)
        yield self._event(0)
        told_init = False
        while True:
            if self._init_seq is not None and not told_init:
                yield self._event(self._init_seq)
                told_init = True
            place = latest if from_chunk is None else bisect_left(self._keyframe_chunks, from_chunk)
            start = self._keyframe_seqs[place] if place < len(self._keyframe_seqs) else self._media_end_seq
            if start is not None or self._is_closed:
                break
            await self._growth()
        async for event in self.read(len(self) if start is None else start):
            yield event

    def _event(self, seq: int) -> video_pb2.Event:
        start = self._ends[seq - 1] if seq else 0
        return video_pb2.Event.FromString(os.pread(self._fd, self._ends[seq] - start, start))

    def _note(self, event: video_pb2.Event) -> None:
        """Remembers where players can start: a few numbers for each keyframe."""
        match event.WhichOneof("payload"):
            case "init_segment":
                self._init_seq = event.seq
            case "fragment" if event.fragment.is_keyframe:
                self._keyframe_seqs.append(event.seq)
                self._keyframe_chunks.append(event.fragment.chunk_index)
            case "stream_complete" | "completed" if self._media_end_seq is None:
                self._media_end_seq = event.seq

    def _growth(self) -> asyncio.Future[None]:
        """Done once there is more, or the end. To be awaited at once, so that nothing comes in between."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        _wake_some(waiting)

    def __del__(self) -> None:
        # The last reader or the job's removal, whichever is later, closes the file.
        if self._fd >= 0:
            os.close(self._fd)


def _wake_some(waiting: deque[asyncio.Future[None]]) -> None:
    """Wakes a few readers, those that wait longest, and the rest later: the job itself runs on the same event loop."""
    for _ in range(min(WAKE_AT_ONCE, len(waiting))):
        future = waiting.popleft()
        if not future.done():  # else its reader has gone
            future.set_result(None)
    if waiting:
        asyncio.get_running_loop().call_soon(_wake_some, waiting)


def _unwritable(error: OSError) -> PhaseError:
    return PhaseError(f"the job's events cannot be written: {error.strerror}")
