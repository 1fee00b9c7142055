"""The residency ledger: who had weights on the device, and when.

Every worker of a lane appends to one file. The same file's lock is held while a worker's weights are on the device, so
exclusive residency does not depend on the orchestrator being right; the kernel frees the lock of a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import UnsupportedError


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger."""

    monotonic_ns: int
    """When, on the machine's monotonic clock, which all processes share."""
    worker: str
    """Who."""
    event: str
    """"enter", written before the first weight is copied; "leave", written after the last one is freed; "lost", written
    by the next worker for one whose process died with weights on the device."""
    device_weight_bytes: int
    """Bytes of weights on the device after the event."""


class ResidencyLedger:
    """One worker's hand on the ledger."""

    def __init__(self, path: Path, worker: str) -> None:
        self._path = path
        self._worker = worker
        self._lock_fd = -1

    def enter(self, device_weight_bytes: int) -> None:
        """Takes the device. Raises UnsupportedError if another worker's weights are on it."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UnsupportedError(
                f"{self._worker} cannot enter its phase: another worker's weights are on the device"
            ) from None
        try:
            # Holding the lock proves that whoever entered last is gone, also if it could not say so.
            last = _last_entry(self._path)
            if last is not None and last.event == "enter":
                self._write(fd, last.worker, "lost", 0)
            self._write(fd, self._worker, "enter", device_weight_bytes)
        except BaseException:  # a full disk must not leave the lock behind, nor may a file that is no ledger
            os.close(fd)
            raise
        self._lock_fd = fd

    def leave(self) -> None:
        """Gives the device up; the weights must be gone."""
        fd, self._lock_fd = self._lock_fd, -1
        try:
            self._write(fd, self._worker, "leave", 0)
        finally:
            os.close(fd)

    @staticmethod
    def _write(fd: int, worker: str, event: str, device_weight_bytes: int) -> None:
        entry = LedgerEntry(time.monotonic_ns(), worker, event, device_weight_bytes)
        line = (json.dumps(entry.__dict__) + "\n").encode()
        size = os.fstat(fd).st_size
        if os.write(fd, line) < len(line):
            os.ftruncate(fd, size)  # with half a line in it the ledger could not be read again, nor a phase entered
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_ledger(path: Path) -> list[LedgerEntry]:
    """All entries, oldest first."""
    return [LedgerEntry(**json.loads(line)) for line in path.read_text().splitlines()]


def overlaps(entries: list[LedgerEntry]) -> list[tuple[LedgerEntry, LedgerEntry]]:
    """Pairs of entries at which a second worker entered before the first had left."""
    found: list[tuple[LedgerEntry, LedgerEntry]] = []
    holders: dict[str, LedgerEntry] = {}
    for entry in sorted(entries, key=lambda e: e.monotonic_ns):
        if entry.event != "enter":
            holders.pop(entry.worker, None)
        else:
            found.extend((held, entry) for name, held in holders.items() if name != entry.worker)
            holders[entry.worker] = entry
    return found


def _last_entry(path: Path) -> LedgerEntry | None:
    """The newest entry, read from the end of the file: a ledger grows for as long as its lane runs."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1024))
        lines = file.read().splitlines()
    return LedgerEntry(**json.loads(lines[-1])) if lines else None
