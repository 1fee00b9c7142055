"""The log of one job as it is read: by any number of readers at their own pace, over one open file and one index.

A reader holds one event in memory; one that stalls or goes away costs nothing. Memory holds a few numbers of each
event, the disk the rest. Events go from the file to the wire as they are.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator
from pathlib import Path

from core.clock import TICKS_PER_FRAME
from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2

_HEAD_BYTES = 11
"""A record's tag and its length, which take 1 and at most 10 bytes."""


class Replay:
    """Events of one job, numbered from 0: each a record, which is a GenerateResponse as much as an AttachResponse.

    Who reads before anything is known of the job waits for it.
    """

    path: Path | None = None
    """The file."""
    _fd = -1

    def __init__(self) -> None:
        self._ends = array("Q")  # end offset of each event in the file
        self._init_seq: int | None = None
        self._keyframe_seqs = array("Q")  # fragments that decoding can start at
        self._keyframe_chunks = array("q")  # and the chunks they belong to, never falling
        self._chunk_end_ticks: list[int] = []  # when the pictures of each chunk end
        self._media_end_seq: int | None = None  # the first event after all media
        self._grown = asyncio.Event()
        self._has_ended = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def num_chunks(self) -> int:
        """Chunks that the job makes."""
        return len(self._chunk_end_ticks)

    def advance(self, path: Path, num_events: int) -> None:
        """Takes note of the events up to this number, which are in the file, and tells the readers.

        path: written by `JobLog`; opened once.  Raises PhaseError if the events cannot be read.
        """
        if self.path is None:
            self._fd = _open(path)
            self.path = path
        while len(self._ends) < num_events:
            start = self._ends[-1] if self._ends else 0
            self._ends.append(start + _record_bytes(self._read(start, _HEAD_BYTES)))
            self._note(video_pb2.AttachResponse.FromString(self._record(len(self._ends) - 1)).event)
        self._tell()

    def end(self, error: Exception | None) -> None:
        """Marks the job's end; readers that reach it stop, or raise `error`."""
        self._has_ended = True
        self._error = error
        self._tell()

    def close(self) -> None:
        """Closes the file, when the last reader has gone."""
        if self._fd >= 0:
            os.close(self._fd)

    async def begun(self) -> None:
        """Returns once there is an event; raises why there will be none."""
        while not self._ends and not self._has_ended:
            await self._grown.wait()
        if not self._ends and self._error is not None:
            raise self._error.with_traceback(None)

    async def read(self, from_seq: int = 0) -> AsyncIterator[bytes]:
        """Yields the events from `from_seq` on, waiting for more until the job ends; raises the job's error, if any."""
        seq = from_seq
        while True:
            while seq < len(self._ends):
                yield self._record(seq)
                seq += 1
            if self._has_ended:
                if self._error is not None:
                    raise self._error.with_traceback(None)  # one error, many readers
                return
            await self._grown.wait()

    async def join(self, from_chunk: int | None = None) -> AsyncIterator[bytes]:
        """Yields what a player needs that was not there from the start: event 0, the init segment as soon as there is
        one, then everything from a keyframe on. Ends as `read` does.

        from_chunk: wait for the first keyframe of this chunk or a later one, as the first chunk completes no frame;
        None takes the latest keyframe there is, or waits for one. Where the media end before that, what follows them
        is yielded.
        """
        await self.begun()
        latest = max(len(self._keyframe_seqs) - 1, 0)
        yield self._record(0)
        told_init = False
        while True:
            if self._init_seq is not None and not told_init:
                yield self._record(self._init_seq)
                told_init = True
            place = latest if from_chunk is None else bisect_left(self._keyframe_chunks, from_chunk)
            start = self._keyframe_seqs[place] if place < len(self._keyframe_seqs) else self._media_end_seq
            if start is not None or self._has_ended:
                break
            await self._grown.wait()
        async for record in self.read(len(self) if start is None else start):
            yield record

    def _record(self, seq: int) -> bytes:
        start = self._ends[seq - 1] if seq else 0
        record = self._read(start, self._ends[seq] - start)
        if start + len(record) < self._ends[seq]:
            raise _shortened()
        return record

    def _read(self, start: int, num_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, num_bytes, start)
        except OSError as error:
            raise PhaseError(f"the job's events cannot be read: {error.strerror}") from error

    def _note(self, event: video_pb2.Event) -> None:
        """Remembers where callers can start: a few numbers for each keyframe.

        Of a job that refines, that is the refined rendition; behind a clip, the clip's own stream.
        """
        match event.WhichOneof("payload"):
            case "accepted":
                self._chunk_end_ticks = [
                    chunk.num_frames_emitted * TICKS_PER_FRAME for chunk in event.accepted.plan.chunks
                ]
            case "init_segment" | "refined_init_segment" if self._init_seq is None:
                self._init_seq = event.seq
            case "fragment" | "refined_fragment" as name if self._media_end_seq is None:
                fragment = getattr(event, name)
                if fragment.is_keyframe:
                    self._keyframe_seqs.append(event.seq)
                    self._keyframe_chunks.append(self._chunk_of(fragment))
            case "stream_complete" | "refined_audio" | "completed" if self._media_end_seq is None:
                self._media_end_seq = event.seq

    def _chunk_of(self, fragment: types_pb2.Fragment) -> int:
        """The chunk that completed its pictures; of sound alone, the one that completed those it is heard with."""
        if fragment.chunk_index >= 0:
            return fragment.chunk_index
        return bisect_right(self._chunk_end_ticks, fragment.start_ticks)

    def _tell(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PhaseError(f"the job's events cannot be read: {error.strerror}") from error


def _record_bytes(head: bytes) -> int:
    """Bytes of the record that begins with these: a tag, the length of the event as a varint, the event."""
    length = 0
    for place, byte in enumerate(head[1:]):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return 2 + place + length
    raise _shortened()


def _shortened() -> PhaseError:
    return PhaseError("the job's events cannot be read: the file is shorter than it was")
