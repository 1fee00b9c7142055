"""The journal: which jobs there are, whose, in what state and in what order, in SQLite.

It is an index. What a job is lies in its directory (`orchestrator/job_files.py`), from which a lost journal is made
anew (`orchestrator/stock.py`). Every change is one transaction, on disk before it returns.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
import os
import sqlite3
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from h3stream.errors import FieldViolation, PhaseError, StartupError
from h3stream.fields import invalid_request
from services.common.files import fsync_directory

log = logging.getLogger(__name__)

JOURNAL_NAME = "journal.db"
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
SCHEMA_VERSION = 2
BUSY_TIMEOUT_MS = 5_000
"""How long a change waits for somebody who reads the file, as a backup does."""

_TABLE = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    state TEXT NOT NULL,
    priority INTEGER NOT NULL,
    idempotency_key TEXT,
    request_digest TEXT NOT NULL,
    num_frames INTEGER NOT NULL,
    created_s REAL NOT NULL,
    ended_s REAL,
    num_resumes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    artifact_bytes INTEGER NOT NULL,
    end_order INTEGER,
    checksum INTEGER NOT NULL
) STRICT
"""
_SCHEMA_1 = (
    _TABLE.strip(),
    "CREATE TABLE boots (boot_id TEXT NOT NULL) STRICT",
    "CREATE INDEX jobs_of_tenant ON jobs (tenant, number)",
    "CREATE UNIQUE INDEX jobs_by_key ON jobs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL",
    "CREATE INDEX live_jobs ON jobs (number) WHERE ended_s IS NULL",
    "CREATE UNIQUE INDEX ended_jobs ON jobs (end_order) WHERE end_order IS NOT NULL",
    "CREATE INDEX jobs_with_artifacts ON jobs (end_order) WHERE artifact_bytes > 0",
)
_NEW_IN_2 = (
    "CREATE INDEX ended_jobs_of_tenant ON jobs (tenant, end_order) WHERE end_order IS NOT NULL",
    "CREATE INDEX jobs_with_artifacts_of_tenant ON jobs (tenant, end_order) WHERE artifact_bytes > 0",
)
_SCHEMA = _SCHEMA_1 + _NEW_IN_2
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
_TROUBLE = frozenset(
    (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
     sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
)  # fmt: skip
"""Primary codes of SQLite's errors that say nothing about what is in the file."""


@dataclass(frozen=True)
class JobRow:
    """A job as the journal knows it."""

    job_id: str
    """The job."""
    tenant: str
    """Whose it is."""
    state: State
    """Where it is; the last three are final."""
    priority: int
    """Number of the contract's JobPriority."""
    idempotency_key: str
    """What its request was named; empty: nothing."""
    request_digest: str
    """Of the request, as `job_files.request_digest` makes it."""
    num_frames: int
    """Frames of its clip."""
    created_s: float
    """When it was accepted; wall clock."""
    ended_s: float | None = None
    """When it ended; wall clock."""
    num_resumes: int = 0
    """How often it was taken up again."""
    stored_bytes: int = 0
    """Bytes of its events and artifacts, once it has ended."""
    artifact_bytes: int = 0
    """Those of the artifacts alone."""


_NAMES = tuple(column.name for column in dataclasses.fields(JobRow))
_SELECT = f"SELECT {', '.join(_NAMES)}, checksum FROM jobs"
_INSERT = f"INSERT INTO jobs ({', '.join(_NAMES)}, checksum) VALUES ({', '.join('?' * (len(_NAMES) + 1))})"
_UPDATE = f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in (*_NAMES, 'checksum'))} WHERE job_id = ?"
_END = """
UPDATE jobs SET end_order = (SELECT ifnull(max(end_order), 0) + 1 FROM jobs WHERE end_order IS NOT NULL)
WHERE job_id = ?
"""
"""The order in which jobs ended is not that of the times: a wall clock may be set back."""


@dataclass
class _Sums:
    """What each tenant's jobs that have ended come to."""

    num_ended: Counter[str] = field(default_factory=Counter)
    """Those jobs."""
    artifact_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of their artifacts."""
    stored_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of their events and artifacts."""

    def copy(self) -> _Sums:
        """The same, for itself."""
        return _Sums(self.num_ended.copy(), self.artifact_bytes.copy(), self.stored_bytes.copy())


class Journal:
    """The jobs of a data directory. Used from one thread; its changes raise PhaseError if they cannot be written, and
    then have not happened."""

    was_damaged = False
    """Whether there was a journal that could not be read; it has been moved aside, and this one is empty."""
    has_lost_power: bool
    """Whether the machine has lost its power since `remember_boot`, or may have."""
    _sums: _Sums

    def __init__(self, path: Path) -> None:
        """Opens the journal, or makes one. Raises StartupError if it can do neither."""
        self.path = path
        try:
            try:
                self._open()
            except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is damaged
                if not _is_damage(error):
                    raise
                log.error("%s is damaged (%s); it is moved aside and made anew from the jobs' files", path, error)
                self.was_damaged = True
                self._close()
                _move_aside(path)
                self._open()
            self.has_lost_power = self._connection.execute("SELECT boot_id FROM boots").fetchone() != (_boot_id(),)
        except (sqlite3.Error, OSError) as error:
            self._close()
            raise StartupError(f"the journal {path} cannot be opened: {error}") from error

    def add(self, row: JobRow) -> None:
        """Enters a job that has not ended."""
        assert row.ended_s is None, f"job {row.job_id} is entered as one that has ended"
        with self._writing():
            self._connection.execute(_INSERT, _values(row))
        self._count(row, 1)

    def set_running(self, job_id: str, num_resumes: int) -> None:
        """Notes that a job is on a lane, and how often it was taken up again before."""
        self._change(job_id, state="running", num_resumes=num_resumes)

    def set_ended(self, job_id: str, state: State, ended_s: float, stored_bytes: int, artifact_bytes: int) -> None:
        """Notes how and when a job ended and what it left."""
        self._change(job_id, state=state, ended_s=ended_s, stored_bytes=stored_bytes, artifact_bytes=artifact_bytes)

    def set_stored_bytes(self, job_id: str, stored_bytes: int, artifact_bytes: int) -> None:
        """Notes what is left of what a job left."""
        self._change(job_id, stored_bytes=stored_bytes, artifact_bytes=artifact_bytes)

    def remove(self, job_id: str) -> None:
        """Forgets a job, if it is there."""
        row = self.row(job_id)
        if row is not None:
            with self._writing():
                self._connection.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
            self._count(row, -1)

    def remember_boot(self) -> None:
        """Takes note of the machine's present boot, once all that a loss of power asks for has been done."""
        with self._writing():
            self._connection.execute("UPDATE boots SET boot_id = ?", (_boot_id(),))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around changes that happen all together, or not at all where one of them raises."""
        if self._connection.in_transaction:
            yield
            return
        sums = self._sums.copy()
        with self._writing():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._sums = sums
                if self._connection.in_transaction:  # SQLite ends some of those that fail by itself
                    self._connection.execute("ROLLBACK")
                raise

    def row(self, job_id: str) -> JobRow | None:
        """The job of that name."""
        return self._one("WHERE job_id = ?", job_id)

    def rows(self) -> Iterator[JobRow]:
        """All jobs, oldest first."""
        return self._select("ORDER BY number")

    def live(self) -> list[JobRow]:
        """The jobs that have not ended: those that were on a lane first, each kind oldest first."""
        return list(self._select("WHERE ended_s IS NULL ORDER BY state = 'queued', number"))

    def find_key(self, tenant: str, key: str) -> JobRow | None:
        """The tenant's job whose request was named so."""
        return self._one("WHERE tenant = ? AND idempotency_key = ?", tenant, key)

    def page(self, tenant: str | None, states: Sequence[str], token: str, limit: int) -> tuple[list[JobRow], str]:
        """Up to `limit` jobs, newest first, and the token of the next page, empty behind the last.

        tenant: None: of all.  states: to be listed; empty: all.  token: empty, or what the page before came with.
        Raises InvalidRequestError for a token that is none.
        """
        conditions = ["number < ?"]
        values: list[object] = [_number_of(token)]
        if tenant is not None:
            conditions.append("tenant = ?")
            values.append(tenant)
        if states:
            conditions.append(f"state IN ({', '.join('?' * len(states))})")
            values.extend(states)
        query = f"SELECT number, {_SELECT.removeprefix('SELECT')} WHERE {' AND '.join(conditions)}"
        with self._reading():
            found = self._connection.execute(f"{query} ORDER BY number DESC LIMIT ?", (*values, limit + 1)).fetchall()
            rows = [_to_row(columns) for _, *columns in found[:limit]]
        return rows, _token_of(found[limit - 1][0]) if len(found) > limit else ""

    def stored_bytes(self, tenant: str) -> int:
        """Bytes of the events and artifacts of the tenant's jobs that have ended."""
        return self._sums.stored_bytes[tenant]

    @property
    def num_ended(self) -> Mapping[str, int]:
        """Jobs of each tenant that have ended."""
        return self._sums.num_ended

    @property
    def artifact_bytes(self) -> Mapping[str, int]:
        """Bytes of all artifacts of each tenant's jobs that have ended."""
        return self._sums.artifact_bytes

    def oldest_ended(self, tenants: Collection[str]) -> JobRow | None:
        """The job of these tenants that ended first."""
        return self._oldest_of(tenants, "end_order IS NOT NULL")

    def oldest_with_artifacts_of(self, tenants: Collection[str]) -> JobRow | None:
        """The job of these tenants that ended first of those whose artifacts are still there."""
        return self._oldest_of(tenants, "artifact_bytes > 0")

    def oldest_with_artifacts(self) -> JobRow | None:
        """The job that ended first of those whose artifacts are still there."""
        return self._one("WHERE artifact_bytes > 0 ORDER BY end_order LIMIT 1")

    def newest_with_artifacts(self) -> JobRow | None:
        """The job that ended last of those whose artifacts are still there."""
        return self._one("WHERE artifact_bytes > 0 ORDER BY end_order DESC LIMIT 1")

    def close(self) -> None:
        """Brings all into the one file and closes it."""
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:  # all of it is in the file beside, where the next opening finds it
            log.warning("the journal cannot be brought into one file: %s", error)
        self._close()

    def _open(self) -> None:
        """Opens the file, making it and its tables where there are none, and reads it once from end to end."""
        with suppress(FileExistsError):  # whose locks closing it once more would drop
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        execute = self._connection.execute
        execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("BEGIN IMMEDIATE")  # so that a file without tables is one that nobody has made them in yet
        found = {sql for (sql,) in execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
        (version,) = execute("PRAGMA user_version").fetchone()
        if not found and version == 0:
            for statement in _SCHEMA:
                execute(statement)
            execute("INSERT INTO boots VALUES ('')")
            execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version == 1 and found == set(_SCHEMA_1):
            for statement in _NEW_IN_2:
                execute(statement)
            execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION or found != set(_SCHEMA):
            raise sqlite3.DatabaseError(f"its tables are not those of version {SCHEMA_VERSION}")
        execute("COMMIT")
        fsync_directory(self.path.parent)
        if (report := execute("PRAGMA integrity_check(1)").fetchone()) != ("ok",):
            raise sqlite3.DatabaseError(" ".join(report[0].split()))
        self._sums = _Sums()
        for values in execute(_SELECT):
            self._count(_to_row(values), 1)

    def _close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()

    def _change(self, job_id: str, **changes: Any) -> None:
        before = self.row(job_id)
        assert before is not None, f"there is no job {job_id} in the journal"
        after = dataclasses.replace(before, **changes)
        with self.at_once():
            self._connection.execute(_UPDATE, (*_values(after), job_id))
            if before.ended_s is None and after.ended_s is not None:
                self._connection.execute(_END, (job_id,))
        self._count(before, -1)
        self._count(after, 1)

    def _count(self, row: JobRow, sign: int) -> None:
        """Keeps the sums, which would take long to ask for."""
        if row.ended_s is not None:
            self._sums.num_ended[row.tenant] += sign
            self._sums.artifact_bytes[row.tenant] += sign * row.artifact_bytes
            self._sums.stored_bytes[row.tenant] += sign * row.stored_bytes

    def _oldest_of(self, tenants: Collection[str], condition: str) -> JobRow | None:
        """The job that ended first of those of the tenants that meet a condition, by a look at each tenant's first."""
        query = f"SELECT end_order FROM jobs WHERE tenant = ? AND {condition} ORDER BY end_order LIMIT 1"
        with self._reading():
            found = [self._connection.execute(query, (tenant,)).fetchone() for tenant in tenants]
        first = min((end_order for columns in found if columns is not None for end_order in columns), default=None)
        return None if first is None else self._one("WHERE end_order = ?", first)

    def _one(self, condition: str, *values: object) -> JobRow | None:
        return next(self._select(condition, *values), None)

    def _select(self, condition: str, *values: object) -> Iterator[JobRow]:
        with self._reading():
            rows = [_to_row(columns) for columns in self._connection.execute(f"{_SELECT} {condition}", values)]
        return iter(rows)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise PhaseError(f"the journal cannot be written: {error}") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise PhaseError(f"the journal cannot be read: {error}") from error


def _values(row: JobRow) -> tuple[object, ...]:
    """The columns of a row, its checksum last."""
    values = [getattr(row, name) for name in _NAMES]
    values[_NAMES.index("idempotency_key")] = row.idempotency_key or None
    return *values, _checksum(values)


def _to_row(values: Sequence[Any]) -> JobRow:
    """The row of a table's columns. Raises sqlite3.DatabaseError if they are not what was written."""
    *columns, checksum = values
    if _checksum(columns) != checksum:
        raise sqlite3.DatabaseError(f"the row of job {columns[0]!r:.40} is damaged")
    row = JobRow(*columns)
    return row if row.idempotency_key else dataclasses.replace(row, idempotency_key="")


def _checksum(columns: Sequence[object]) -> int:
    """What SQLite does not keep: it notices damage to its own structure, but not to what was put into it."""
    return zlib.crc32(repr(tuple(columns)).encode())


def _token_of(number: int) -> str:
    data = number.to_bytes(8, "big")
    return base64.urlsafe_b64encode(data + zlib.crc32(data).to_bytes(4, "big")).decode()


def _number_of(token: str) -> int:
    """The number that a token stands for; that of no job for none. Raises InvalidRequestError."""
    if not token:
        return 2**63 - 1
    try:
        number = int.from_bytes(base64.urlsafe_b64decode(token)[:8], "big")
        if _token_of(number) == token:
            return number
    except (ValueError, binascii.Error, OverflowError):
        pass
    description = f"page_token is {token!r:.40}; it must be the next_page_token of an earlier answer, or empty"
    raise invalid_request([FieldViolation("page_token", description, "UNKNOWN_PAGE")])


def _is_damage(error: Exception) -> bool:
    """Whether an error is about what is in the file, and not about getting at it."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _TROUBLE


def _move_aside(path: Path) -> None:
    """Keeps a damaged journal under another name. Raises OSError."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + suffix))
    fsync_directory(path.parent)


def _boot_id() -> str:
    """Name of the machine's present boot; where it has none, every start may follow a loss of power."""
    try:
        return _BOOT_ID_PATH.read_text().strip()
    except OSError:
        return os.urandom(16).hex()
