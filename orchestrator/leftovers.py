"""What a server that was killed has left running: who the server was, and which processes are still its own.

Reads /proc; a process is told by what it has open and never by its number alone, which another may have by now.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import StartupError

PROC = Path("/proc")
EDGE = b"orchestrator.edge"
"""Program of the edge, whose output is the server's own."""
END_TIMEOUT_S = 30.0
"""How long killed processes may take to be gone: one that holds much device memory takes seconds."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process among all that ever have its number."""

    pid: int
    """Its number."""
    start_ticks: int
    """When it started, in clock ticks since the machine did."""
    boot_id: str
    """Which run of the machine that was."""
    pid_namespace: str
    """Where the number counts: in another container it names another process."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this number now. Raises OSError if there is none."""
        # The name of the program stands in parentheses and may hold spaces: what is counted comes after it.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return cls(
            pid,
            start_ticks=int(fields[19]),
            boot_id=(PROC / "sys/kernel/random/boot_id").read_text().strip(),
            pid_namespace=os.readlink(PROC / "self/ns/pid"),
        )

    def is_alive(self) -> bool:
        """Whether it is still there, as far as can be seen from here."""
        try:
            return ProcessIdentity.of(self.pid) == self and not _is_zombie(self.pid)
        except OSError:
            return False


def end_users_of(runtime: Path) -> list[int]:
    """Kills what still works in the runtime directory of a server that is dead; returns the processes' numbers.

    Those are what writes its output into a file below the directory, as everything of Ray's does, and the edge in
    front of a socket in it. Somebody who only looks at a file there, or calls, is left alone.
    Raises StartupError if one of them does not end.
    """
    ended: list[int] = []
    give_up_s = time.monotonic() + END_TIMEOUT_S
    while found := list(_users_of(runtime)):  # again: one that was being started may have been missed
        for pid, pidfd in found:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                ended.append(pid)
        for pid, pidfd in found:
            is_gone = _wait(pidfd, give_up_s)
            os.close(pidfd)
            if not is_gone:
                raise StartupError(f"process {pid} of the server before this one was killed and does not end")
    return ended


def _users_of(runtime: Path) -> Iterator[tuple[int, int]]:
    """Number and descriptor of each process; what the descriptor means cannot become another process."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # gone by now, or another user's
            pidfd = os.pidfd_open(int(entry.name))
            if _is_user(entry, str(runtime)):
                yield int(entry.name), pidfd
            else:
                os.close(pidfd)


def _is_user(process: Path, runtime: str) -> bool:
    """Whether a process works in the directory; one that has ended has nothing open any more."""
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        if EDGE in arguments and any(argument.startswith(f"unix:{runtime}/".encode()) for argument in arguments):
            return True
        outputs = {"1", "2"}.intersection(os.listdir(process / "fd"))
        return any(os.readlink(process / "fd" / number).startswith(f"{runtime}/") for number in outputs)
    except OSError:
        return False


def _is_zombie(pid: int) -> bool:
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _wait(pidfd: int, until_s: float) -> bool:
    """Whether a process ends before that time of the monotonic clock."""
    readable, _, _ = select.select([pidfd], [], [], max(0.0, until_s - time.monotonic()))
    return bool(readable)
