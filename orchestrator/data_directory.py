"""The data directory as a whole: one server at a time, the version of what is in it, what a killed server has left."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h3stream.errors import ConfigError
from orchestrator.job_files import fsync_directory
from orchestrator.journal import JOURNAL_NAME
from orchestrator.leftovers import ProcessIdentity, end_users_of
from services.common.files import remove, write_whole

log = logging.getLogger(__name__)

VERSION = 1
"""Of what this server writes. Version 0, without a journal, is a directory without a file that tells its version."""
VERSION_NAME = "VERSION"
LOCK_NAME = "lock"
RUNTIME_NAME = "runtime.json"
"""File that tells of the running server and of its directory for sockets and Ray's files."""
RUNTIME_PREFIX = "h3stream-"
JOURNAL_FILES = tuple(f"{JOURNAL_NAME}{suffix}" for suffix in ("", "-wal", "-shm"))


class DataDirectory:
    """A data directory that this process alone uses."""

    def __init__(self, path: Path, version: int) -> None:
        """version: of what is in it."""
        self.path = path
        self.version = version

    def set_current(self) -> None:
        """Records that all in it is of this server's version; to be called once that is so, and not before.

        Raises ConfigError if it cannot be written.
        """
        if self.version != VERSION:
            try:
                write_whole(self.path / VERSION_NAME, f"{VERSION}\n".encode())
                fsync_directory(self.path)
            except OSError as error:
                raise _not_writable(self.path, error) from error
            self.version = VERSION

    @contextmanager
    def runtime_directory(self) -> Iterator[Path]:
        """A new directory for sockets and Ray's own files, which only this user can enter; removed afterwards.

        It is told of in the data directory before it is there, so that the next server removes it if this one cannot.
        Raises ConfigError if neither can be made.
        """
        runtime = Path(tempfile.gettempdir()).resolve() / f"{RUNTIME_PREFIX}{secrets.token_hex(4)}"
        note = {"path": str(runtime), "owner": dataclasses.asdict(ProcessIdentity.of(os.getpid()))}
        try:
            write_whole(self.path / RUNTIME_NAME, json.dumps(note).encode())
        except OSError as error:
            raise _not_writable(self.path, error) from error
        try:
            runtime.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"the directory for sockets {runtime} cannot be made: {error.strerror}") from error
        try:
            yield runtime
        finally:
            # Ray's last processes may still be writing there: what they leave is the next server's to remove.
            shutil.rmtree(runtime, ignore_errors=True)
            if not runtime.exists():
                remove(self.path / RUNTIME_NAME)


@contextmanager
def take_data_directory(path: Path) -> Iterator[DataDirectory]:
    """The directory, made if it is not there, with other servers kept out until the end.

    What a server that was killed left running or lying is ended and removed. Of a version 0 the journal, if there is
    one, is removed: an earlier change to version 1 did not come to its end, and starts again from the jobs.
    Raises ConfigError if nothing can be written there, another server has it or a newer one made it; StartupError if a
    process of an earlier server does not end.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / "jobs").mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path / "jobs"):
            pass
        # Two servers would share the journal, and the residency ledger, whose lock would fail the jobs of one of them.
        lock = (path / LOCK_NAME).open("w")
    except OSError as error:
        raise _not_writable(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path) from None
        except OSError as error:
            raise ConfigError(f"data: {path} cannot be locked: {error.strerror}; give a directory that can") from error
        version = read_version(path)
        _clear_up(path)
        if version == 0:
            for name in JOURNAL_FILES:
                remove(path / name)
        yield DataDirectory(path, version)


def read_version(path: Path) -> int:
    """The version of a data directory; 0 where nothing tells it.

    Raises ConfigError for one that this server does not know.
    """
    try:
        text = (path / VERSION_NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: {path / VERSION_NAME} cannot be read: {error}") from error
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            f"data: {path / VERSION_NAME} holds {text[:20]!r}, which is no version; it is 1 to {VERSION}: restore the "
            "file from a backup, or remove it to have the journal made anew from the jobs"
        )
    if int(text) > VERSION:
        raise ConfigError(
            f"data: {path} has version {text}, and this server knows versions up to {VERSION}: start the server that "
            "wrote it or a newer one, or give another directory"
        )
    return int(text)


def _clear_up(path: Path) -> None:
    """Ends and removes what the server before this one has left, if it was killed."""
    note = path / RUNTIME_NAME
    try:
        told = json.loads(note.read_bytes())
        owner, runtime = ProcessIdentity(**told["owner"]), Path(told["path"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read, so what an earlier server left is not looked for: %s", note, error)
        return
    if owner.is_alive():  # although the lock is free: somebody has removed the file that it was on
        raise _in_use(path)
    if not runtime.name.startswith(RUNTIME_PREFIX):
        log.warning("%s tells of %s, which is no directory of this program: it is left alone", note, runtime)
        return
    for pid in end_users_of(runtime):
        log.warning("process %d of the server before this one was still running and has been ended", pid)
    if runtime.exists():
        shutil.rmtree(runtime, ignore_errors=True)
        log.warning("%s of the server before this one has %sbeen removed", runtime, "not " * runtime.exists())
    remove(note)


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"data: nothing can be written in {path}: {error.strerror}")


def _in_use(path: Path) -> ConfigError:
    return ConfigError(f"data: another server uses {path}; give this one another directory")
