"""The data directory: whether it can be written safely, how much room it has, and what is in it.

Only a file of its own is written, and none where the directory is not there yet.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from h3stream.errors import ConfigError
from orchestrator.data_directory import LOCK_NAME, RUNTIME_NAME, VERSION, read_version
from orchestrator.doctor.finding import Finding
from orchestrator.job_files import fsync_directory
from orchestrator.journal import JOURNAL_NAME

LEAST_FREE_BYTES, SCANT_FREE_BYTES = 1 << 30, 10 << 30
"""A clip of 362 frames at 768p leaves a few hundred MB with all its artifacts; a shared frozen cache takes GB."""
SLOW_WRITE_S = 0.25
"""Every event but progress waits for the disk once, and so does each chunk of a job."""
SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "glusterfs", "ceph")
"""SQLite's write-ahead log needs memory that all who use the file share, which these do not promise."""


def is_used(data: Path) -> bool:
    """Whether a server has the directory now."""
    try:
        with (data / LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def check_storage(data: Path) -> Iterator[Finding]:
    """Everything about the data directory."""
    yield check_room(data)
    yield check_file_system(data, Path("/proc/self/mounts").read_text())
    if not data.is_dir():
        yield _check_parent(data)
        return
    yield check_writing(data)
    if not os.access(data, os.R_OK | os.W_OK | os.X_OK):  # another user's: nothing in it can be looked at
        return
    yield check_version(data)
    yield check_journal(data)
    yield check_leftovers(data)


def check_room(data: Path) -> Finding:
    """Free disk."""
    place = _nearest(data)
    free = shutil.disk_usage(place).free
    told = f"{free / (1 << 30):.1f} GiB are free where {data} is"
    remedy = "free some, give --data another disk, or keep less (--kept-jobs, --kept-age-s, --kept-bytes)"
    if free < LEAST_FREE_BYTES:
        return Finding("disk", "fail", f"{told}, less than a long clip may need", remedy)
    if free < SCANT_FREE_BYTES:
        return Finding("disk", "warn", told, remedy)
    return Finding("disk", "ok", told)


def check_file_system(data: Path, mounts: str) -> Finding:
    """Whether the file system is one of this machine's own.

    mounts: what /proc/self/mounts says.
    """
    place = _nearest(data).resolve()
    kind, point = "", ""
    for line in mounts.splitlines():
        _, escaped, this_kind, *_ = line.split(" ")
        this_point = escaped.replace(r"\040", " ")
        if place.is_relative_to(this_point) and len(this_point) >= len(point):  # the last one hides those before it
            kind, point = this_kind, this_point
    if kind in SHARED_FILE_SYSTEMS:
        return Finding(
            "file system", "warn", f"{data} is on {kind}, where neither locks nor the journal are sure",
            "put --data on a disk of this machine",
        )  # fmt: skip
    if kind in ("tmpfs", "ramfs"):
        return Finding(
            "file system", "warn", f"{data} is in memory ({kind}): jobs are gone when the machine restarts",
            "put --data on a disk",
        )  # fmt: skip
    return Finding("file system", "ok", f"{kind or 'unknown'} at {point or '/'}")


def check_writing(data: Path) -> Finding:
    """A file written, put on the disk and renamed, as everything that must outlive a crash is."""
    trial, renamed = data / f".doctor-{os.getpid()}.part", data / f".doctor-{os.getpid()}"
    started_s = time.monotonic()
    try:
        try:
            with trial.open("wb") as file:
                file.write(b"h3stream doctor\n")
                file.flush()
                os.fsync(file.fileno())
            trial.rename(renamed)
            fsync_directory(data)
        finally:
            trial.unlink(missing_ok=True)
            renamed.unlink(missing_ok=True)
    except OSError as error:
        return Finding(
            "writing", "fail", f"{data}: {error.strerror}",
            f"let the server's user write there (`chown -R USER {data}`), or give --data another directory",
        )  # fmt: skip
    took_s = time.monotonic() - started_s
    told = f"written, on the disk and renamed in {1000 * took_s:.0f} ms"
    if took_s > SLOW_WRITE_S:
        return Finding("writing", "warn", told, "every event waits for such a write: give --data a faster disk")
    if data.stat().st_mode & 0o077:
        return Finding("writing", "warn", f"{told}; others may look into {data}", f"`chmod 700 {data}`")
    return Finding("writing", "ok", told)


def check_version(data: Path) -> Finding:
    """The version of the directory."""
    try:
        version = read_version(data)
    except ConfigError as error:
        return Finding("version", "fail", str(error), "see docs/operations.md, Upgrade")
    if version == VERSION:
        return Finding("version", "ok", f"{data} has version {version}")
    if not any(data.glob("jobs/*")):
        return Finding("version", "ok", f"{data} is new")
    return Finding(
        "version", "warn", f"{data} is of a server without a journal (version 0)",
        f"nothing: the next start makes it version {VERSION}; a copy made now is the way back",
    )  # fmt: skip


def check_journal(data: Path) -> Finding:
    """SQLite's own check of the journal."""
    path = data / JOURNAL_NAME
    if not path.exists():
        return Finding("journal", "ok", "there is none yet")
    remedy = "nothing: the next start moves it aside and makes it anew from the jobs' directories"
    # Without this nobody has it open, and to read it in the usual way would make files beside it.
    is_open = path.with_name(f"{JOURNAL_NAME}-wal").exists()
    address = f"{path.resolve().as_uri()}?{'mode=ro' if is_open else 'immutable=1'}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=5.0)) as journal:
            (told,), *more = journal.execute("PRAGMA quick_check").fetchall()
            num_jobs = journal.execute("SELECT count(*) FROM jobs").fetchone()[0] if told == "ok" else 0
    except sqlite3.Error as error:
        return Finding("journal", "warn", f"{path}: {error}", remedy)
    if told != "ok" or more:
        return Finding("journal", "warn", f"{path} is damaged: {told}", remedy)
    return Finding("journal", "ok", f"{path} is whole and knows {num_jobs} jobs")


def check_leftovers(data: Path) -> Finding:
    """What a killed server has left."""
    try:
        runtime = json.loads((data / RUNTIME_NAME).read_bytes())["path"]
    except FileNotFoundError:
        return Finding("leftovers", "ok", "no server was killed here")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Finding("leftovers", "warn", f"{data / RUNTIME_NAME}: {error}", f"remove {data / RUNTIME_NAME}")
    if is_used(data):
        return Finding("leftovers", "ok", f"a server is running, its sockets are in {runtime}")
    return Finding(
        "leftovers", "warn", f"a server was killed; {runtime} and perhaps processes of it are still there",
        "nothing: the next start ends and removes them",
    )  # fmt: skip


def _check_parent(data: Path) -> Finding:
    """Whether a directory that is not there can be made."""
    place = _nearest(data)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding(
            "writing", "fail", f"{data} cannot be made in {place}: {error.strerror}",
            "give --data a place where the server's user may write",
        )  # fmt: skip
    return Finding("writing", "ok", f"{data} is not there yet and can be made")


def _nearest(path: Path) -> Path:
    """The path, or the nearest one above it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))
