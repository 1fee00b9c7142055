"""Which processes a server that was killed has left: real ones, told by what they have open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.leftovers import ProcessIdentity, end_users_of

WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(*arguments: str, stdout: int = subprocess.PIPE, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """A process that waits; it runs its own program once this returns."""
    command = [sys.executable, "-c", WAIT, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)


def test_what_works_in_the_directory_ends_and_what_only_looks_there_does_not(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    runtime, other = tmp_path / "h3stream-1", tmp_path / "h3stream-12"
    for directory in (runtime, other):
        directory.mkdir()
    with (runtime / "log").open("w") as log, (other / "log").open("w") as other_log:
        writes_there = start(stdout=log.fileno())
        complains_there = start(stderr=log.fileno())
        stands_before = start("orchestrator.edge", "--core", f"unix:{runtime}/core.sock")
        calls_there = start("--server", f"unix:{runtime}/core.sock")
        writes_elsewhere = start(stdout=other_log.fileno())
        reads_there = start(f"{runtime}/log")
    processes += [writes_there, complains_there, stands_before, calls_there, writes_elsewhere, reads_there]
    for process in (complains_there, stands_before, calls_there, reads_there):
        assert process.stdout is not None
        process.stdout.readline()
    ended = end_users_of(runtime)
    assert sorted(ended) == sorted(process.pid for process in (writes_there, complains_there, stands_before))
    assert [process.wait(10) for process in (writes_there, complains_there, stands_before)] == [-9, -9, -9]
    assert [process.poll() for process in (calls_there, writes_elsewhere, reads_there)] == [None, None, None]
    assert end_users_of(runtime) == []


def test_a_process_is_itself_until_it_ends_and_nobody_afterwards(processes: list[subprocess.Popen[bytes]]) -> None:
    process = start()
    processes.append(process)
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_alive()
    assert not ProcessIdentity(**{**vars(identity), "start_ticks": identity.start_ticks + 1}).is_alive()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, but still with its number
    assert not identity.is_alive()
    process.wait()
    assert not identity.is_alive()
