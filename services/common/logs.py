"""How every process of h3stream writes its log: as text for people or as JSON for programs, a record a line.

What is being worked on is told with every record, without being handed through: `job_context`, `request_context`.
Secrets are taken out of the finished line, wherever in it they stand. Imports no torch.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO

LOG_FORMATS = ("text", "json")

REQUEST_ID_KEY = "x-h3stream-request-id"
"""Metadata of calls between the server's own processes that says which caller's call they are about."""

_job_id: ContextVar[str] = ContextVar("job_id", default="")
_request_id: ContextVar[str] = ContextVar("request_id", default="")

_SECRETS = (
    (re.compile(r"\b(bearer +)[A-Za-z0-9._~+/=-]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\bh3s_[A-Za-z0-9._~+/=-]+"), "h3s_***"),
    (re.compile(r"(_TOKEN=)[A-Za-z0-9._~+/=-]+"), r"\1***"),
)
"""What must never be in a log and what stands for it: credentials of calls, keys of callers, tokens of workers."""
_RAY_PREFIX = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ")
"""What Ray puts before each line of a worker that it passes on."""


def setup(log_format: str = "text", *, has_time: bool = True) -> None:
    """Makes this process write its log to standard error; a second call replaces what the first one did.

    log_format: "text" or "json".  has_time: whether a line of text begins with the time; another process may add it.
    As JSON, what others print on standard error becomes records too: whoever reads finds JSON alone.
    """
    stream = sys.stderr.stream if isinstance(sys.stderr, _Records) else sys.stderr
    handler = _Handler(stream)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(has_time))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    is_json = log_format == "json"
    sys.stderr = _Records(stream, handler) if is_json else stream
    sys.excepthook = _log_uncaught if is_json else sys.__excepthook__


@contextmanager
def job_context(job_id: str) -> Iterator[None]:
    """Within it, and in tasks that are started there, records tell of this job."""
    with _set(_job_id, job_id):
        yield


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Within it, and in tasks that are started there, records tell of this call."""
    with _set(_request_id, request_id):
        yield


def enter_job(job_id: str) -> None:
    """From here to the end of a task, records tell of this job."""
    _job_id.set(job_id)


def enter_request(request_id: str) -> None:
    """From here to the end of a task, records tell of this call."""
    _request_id.set(request_id)


def redact(text: str) -> str:
    """The text without secrets."""
    for pattern, stand_in in _SECRETS:
        text = pattern.sub(stand_in, text)
    return text


@contextmanager
def _set(variable: ContextVar[str], value: str) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that nobody finishes is closed in a context that is not its own
            variable.reset(token)


class _Handler(logging.StreamHandler[TextIO]):
    """The one handler of `setup`, told from those that others have put on the root logger."""


class _TextFormatter(logging.Formatter):
    """Records as text: the ids behind the message, a traceback on the lines below."""

    def __init__(self, has_time: bool) -> None:
        super().__init__(f"{'%(asctime)s ' if has_time else ''}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{name}={value}" for name, value in _ids().items())
        return super().formatMessage(record) + (f" [{ids}]" if ids else "")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _JsonFormatter(logging.Formatter):
    """Records as JSON objects: time (UTC), level, logger, message, pid, the ids that are known, and exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"message": record.getMessage(), "pid": record.process, **_ids()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _line(record.created, record.levelname, record.name, fields)


class _Records(io.TextIOBase):
    """Standard error whose lines become records; those that are records already, of a worker's, stay as they are."""

    def __init__(self, stream: TextIO, handler: _Handler) -> None:
        """handler: writes to the same stream; its lock keeps lines whole."""
        self.stream = stream
        self._handler = handler
        self._begun = ""

    def write(self, text: str) -> int:
        self._handler.acquire()
        try:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                if line.strip():
                    self.stream.write(f"{_record_of(line)}\n")
            if lines:
                self.stream.flush()
        finally:
            self._handler.release()
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()


def _record_of(line: str) -> str:
    """A line as a JSON object, which it may be already."""
    own = _RAY_PREFIX.sub("", line, count=1) if _RAY_PREFIX.match(line) else line
    try:
        if isinstance(json.loads(own), dict):
            return redact(own)
    except ValueError:
        pass
    return _line(time.time(), "WARNING", "stderr", {"message": line, **_ids()})


def _line(created_s: float, level: str, logger: str, fields: dict[str, Any]) -> str:
    told = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s)) + f".{int(created_s * 1000) % 1000:03d}Z"
    return redact(json.dumps({"time": told, "level": level, "logger": logger, **fields}))


def _ids() -> dict[str, str]:
    """What is being worked on, as far as it is known."""
    return {name: value for name, value in (("job_id", _job_id.get()), ("request_id", _request_id.get())) if value}


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("the process ends with an error", exc_info=(kind, error, traceback))
