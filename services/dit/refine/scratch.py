"""Directories for caches on disk: made below a given one, named for their owner, and swept once that is gone.

A directory is its owner's for as long as the lock on the file in it is held, which a process cannot outlive; that holds
across containers that share a disk but not their process ids. Where there is no lock (not yet, or on a file system that
has none), the owner's process id and start time, in the directory's name, decide.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "h3stream-frozen-cache-"
LOCK = "owner.lock"
_NAME = re.compile(re.escape(PREFIX) + r"(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[A-Za-z0-9_]+")


class ScratchDirectory:
    """A directory of this process's own, there until it is removed."""

    def __init__(self, parent: Path) -> None:
        """Sweeps the parent first. Raises OSError if no directory can be made there."""
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid}-{_start_time(pid)}-", dir=parent))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes it with all that is in it. Twice changes nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Removes the directories below `parent` that bear our name and whose owner is gone; returns which these were."""
    swept = []
    for path in sorted(parent.glob(f"{PREFIX}*")) if parent.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is None or path.is_symlink() or not path.is_dir():
            continue
        if not _has_owner(path, int(name["pid"]), int(name["start"])):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    if swept:
        log.info("swept %d directories of caches whose owners are gone, below %s", len(swept), parent)
    return swept


def _has_owner(path: Path, pid: int, start: int) -> bool:
    if _is_locked(path):
        return True
    # A directory has no lock for the moment in which it is made; one of this process's own was let go.
    return pid != os.getpid() and _start_time(pid) == start


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


def _start_time(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; -1 if it is not running."""
    with contextlib.suppress(OSError):
        # The second field, the name, may hold anything, parentheses included.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if state == "Z" else int(fields[18])
    return -1
