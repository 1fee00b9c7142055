"""The log of one job as it is written: every event, on disk before anyone is told of it.

`orchestrator/replay.py` reads it, in another process.
"""

from __future__ import annotations

import asyncio
import errno
import os
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from h3stream.errors import GenerationError, PhaseError
from h3stream.v1 import video_pb2

SYNC_EVERY = 16
"""Of events that need not be on the disk before they are told, every sixteenth is: a power failure takes at most the 15
last ones that were told."""

_TAG = b"\n"
"""First byte of a record: field 1 of AttachResponse."""


class JobLog:
    """Events of one job, numbered from 0, in a file of AttachResponse messages: what is sent is what is stored.

    The file is kept open from the first event on that tells of work, whoever removes it: a job that waits costs no
    descriptor.
    """

    _fd = -1

    def __init__(self, path: Path) -> None:
        """Makes an empty log. Raises PhaseError if the file cannot be made."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise _unwritable(error) from error
        self._begin(path)

    def _begin(self, path: Path) -> None:
        self.path = path
        """The file."""
        self.num_followers = 0
        """Those who are being told of events now."""
        self._ends = array("Q")  # end offset of each event in the file
        self._num_events = 0
        self._num_unsynced = 0  # at the end of the file
        self._changed = asyncio.Event()
        self._is_closed = False
        self._error: GenerationError | None = None

    @classmethod
    def recover(cls, path: Path) -> tuple[JobLog, Iterator[video_pb2.Event]]:
        """The log that an earlier process left, and its events, which must be read to their end before the log is used.

        What does not continue the events before it was not written to its end, and is cut off. A log that is gone is
        made again, empty.
        Raises PhaseError if the file cannot be read or cut.
        """
        log = cls.__new__(cls)
        log._begin(path)
        return log, log._scan()

    @classmethod
    def of_ended(cls, path: Path, num_events: int, error: GenerationError | None) -> JobLog:
        """The log of a job that ended with this error, if any: to be followed alone."""
        log = cls.__new__(cls)
        log._begin(path)
        log._num_events = num_events
        log.close(error)
        return log

    def __len__(self) -> int:
        return self._num_events

    def append(self, event: video_pb2.Event, *, sync: bool = True) -> None:
        """Writes an event and tells the followers. Raises PhaseError if the file takes no more; the log stays whole.

        sync: put it on the disk before it is told, with all before it; else only every so often.
        """
        assert not self._is_closed, "event after the end of the job"
        assert event.seq == self._num_events, f"event {event.seq} appended as number {self._num_events}"
        data = video_pb2.AttachResponse(event=event).SerializeToString()
        start = self._ends[-1] if self._ends else 0
        sync = sync or self._num_unsynced == SYNC_EVERY - 1
        try:
            self._write(data, start, sync, keeps_open=not event.HasField("progress"))
        except OSError as error:
            raise _unwritable(error) from error
        self._num_unsynced = 0 if sync else self._num_unsynced + 1
        self._ends.append(start + len(data))
        self._num_events += 1
        self._tell()

    def event(self, seq: int) -> video_pb2.Event:
        """An event that is in the log. Raises PhaseError if it cannot be read."""
        start = self._ends[seq - 1] if seq else 0
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return video_pb2.AttachResponse.FromString(file.read(self._ends[seq] - start)).event
        except OSError as error:
            raise _unreadable(error) from error
        except DecodeError as error:
            raise PhaseError(f"event {seq} of the job is damaged in its log") from error

    def close(self, error: GenerationError | None) -> None:
        """Marks the job's end; followers that reach it stop, or raise `error`."""
        self._release()
        self._is_closed = True
        self._error = error
        self._tell()

    def suspend(self, error: GenerationError) -> None:
        """Lets the followers go with an error although the job has not ended: another process goes on with the log."""
        self.close(error)

    async def follow(self) -> AsyncIterator[int]:
        """Yields the number of events, now and whenever it has grown, until the job ends; raises its error, if any."""
        told = -1
        self.num_followers += 1
        try:
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
        finally:
            self.num_followers -= 1

    def _scan(self) -> Iterator[video_pb2.Event]:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(fd, "r+b") as file:
                while (event := _read_event(file, len(self._ends))) is not None:
                    self._ends.append(file.tell())
                    self._num_events += 1
                    yield event
                whole_bytes = self._ends[-1] if self._ends else 0
                if os.fstat(fd).st_size > whole_bytes:
                    os.ftruncate(fd, whole_bytes)
                if len(self._ends) > 1:  # the first event of a job is on the disk before there is the job
                    os.fsync(fd)  # what the earlier process had no need to put there will be told again
        except OSError as error:
            raise _unreadable(error) from error

    def _write(self, data: bytes, offset: int, sync: bool, *, keeps_open: bool) -> None:
        """Writes at an offset of the file, which must be there. Raises OSError."""
        fd = self._fd if self._fd >= 0 else os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < offset:
                raise OSError(errno.EIO, "somebody has cut their file")
            view = memoryview(data)
            while view:
                view = view[os.pwrite(fd, view, offset + len(data) - len(view)) :]
            if sync:
                os.fdatasync(fd)
        finally:
            if keeps_open:
                self._fd = fd
            elif self._fd < 0:
                os.close(fd)

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._release()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _read_event(file: BinaryIO, seq: int) -> video_pb2.Event | None:
    """The event of that number, which the file must hold next; None if what it holds is none."""
    if file.read(1) != _TAG or (num_bytes := _read_varint(file)) is None:
        return None
    data = file.read(num_bytes) if num_bytes <= os.fstat(file.fileno()).st_size - file.tell() else b""
    if len(data) < num_bytes:
        return None
    try:
        event = video_pb2.Event.FromString(data)
    except DecodeError:
        return None
    return event if event.seq == seq and event.WhichOneof("payload") is not None else None


def _read_varint(file: BinaryIO) -> int | None:
    """The length of a record; None if there is none."""
    value = 0
    for place in range(10):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return value
    return None


def _unwritable(error: OSError) -> PhaseError:
    return PhaseError(f"the job's events cannot be written: {error.strerror}")


def _unreadable(error: OSError) -> PhaseError:
    return PhaseError(f"the job's events cannot be read: {error.strerror}")
