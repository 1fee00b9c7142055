"""The audit log: a line of JSON for each call, in a file of this user's that is set aside when it is large."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from h3stream.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**20
"""Of a file; about 200,000 calls."""
NUM_KEPT = 4
"""Files that are kept beside the one that is written: NAME.1, the newest, to NAME.4."""


class AuditLog:
    """One file that only grows, until it is set aside."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Opens or makes the file. Raises ConfigError."""
        self._path = path
        self._max_bytes = max_bytes
        self._is_failing = False
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"audit: {path} cannot be written: {error.strerror}") from error

    def write(self, entry: Mapping[str, object]) -> None:
        """Adds a line. Where that fails calls go on, and the log says so once."""
        line = json.dumps(entry).encode() + b"\n"
        try:
            if os.fstat(self._fd).st_size + len(line) > self._max_bytes:
                self._set_aside()
            self._append(line)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.error("%s cannot be written: %s; calls are not written down", self._path, error.strerror)
            self._is_failing = True

    def close(self) -> None:
        """Closes the file; what is written later fails, and is written nowhere."""
        os.close(self._fd)
        self._fd = -1

    def _append(self, line: bytes) -> None:
        end = os.fstat(self._fd).st_size
        if os.write(self._fd, line) < len(line):  # what comes later would continue half a line
            os.ftruncate(self._fd, end)
            raise OSError(0, "there is no room")

    def _set_aside(self) -> None:
        for number in range(NUM_KEPT - 1, 0, -1):
            if (older := self._numbered(number)).exists():
                os.replace(older, self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))
        fd = self._open()
        os.close(self._fd)
        self._fd = fd

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
