"""Directories of caches: gone with their owners, and nothing else is ever touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.dit.refine.scratch import LOCK, PREFIX, ScratchDirectory, sweep

ROOT = Path(__file__).parents[5]
NO_PROCESS = 2**22 + 1
"""No process has so large an id."""


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def directory_of(parent: Path, pid: int, start: int) -> Path:
    """What an owner has left, with something in it."""
    path = parent / f"{PREFIX}{pid}-{start}-abc"
    path.mkdir()
    (path / "0.payload").write_bytes(b"rows")
    return path


def test_a_directory_bears_its_owner_in_its_name_and_goes_when_removed(tmp_path: Path) -> None:
    scratch = ScratchDirectory(tmp_path / "made" / "for it")
    assert scratch.path.name.startswith(f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-")
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    (scratch.path / "file").touch()
    scratch.remove()
    scratch.remove()
    assert list((tmp_path / "made" / "for it").iterdir()) == []


def test_what_dead_owners_left_is_swept(tmp_path: Path) -> None:
    gone = directory_of(tmp_path, NO_PROCESS, 1)
    reused_id = directory_of(tmp_path, os.getppid(), start_time(os.getppid()) + 1)
    assert sweep(tmp_path) == sorted([gone, reused_id])
    assert list(tmp_path.iterdir()) == []


def test_what_lives_is_spared(tmp_path: Path) -> None:
    not_locked_yet = directory_of(tmp_path, os.getppid(), start_time(os.getppid()))
    own = ScratchDirectory(tmp_path)
    assert sweep(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == sorted([not_locked_yet, own.path])
    own.remove()


def test_a_lock_is_respected_whatever_the_name_says(tmp_path: Path) -> None:
    """As of an owner in another container, whose process ids mean nothing here."""
    own = ScratchDirectory(tmp_path)
    renamed = own.path.rename(tmp_path / f"{PREFIX}{NO_PROCESS}-1-abc")
    assert sweep(tmp_path) == []
    assert (renamed / LOCK).exists()
    own.remove()
    assert sweep(tmp_path) == [renamed]


def test_what_this_process_let_go_is_swept(tmp_path: Path) -> None:
    pid = os.getpid()
    left = directory_of(tmp_path, pid, start_time(pid))
    assert sweep(tmp_path) == [left]


def test_nothing_but_directories_of_our_name_is_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / f"{PREFIX}{NO_PROCESS}-1-link").symlink_to(elsewhere)
    (parent / f"{PREFIX}{NO_PROCESS}-1-file").touch()
    for name in ("other", PREFIX, f"{PREFIX}x-1-a", f"{PREFIX}{NO_PROCESS}-1", f"x{PREFIX}{NO_PROCESS}-1-a"):
        (parent / name).mkdir()
    before = sorted(parent.iterdir())
    assert sweep(parent) == []
    assert sorted(parent.iterdir()) == before
    assert (elsewhere / "precious").exists()


def test_a_link_within_a_swept_directory_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    parent = tmp_path / "parent"
    parent.mkdir()
    (directory_of(parent, NO_PROCESS, 1) / "link").symlink_to(precious)
    assert len(sweep(parent)) == 1
    assert (precious / "file").exists()


def test_there_is_nothing_to_sweep_where_there_is_no_directory(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == []


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_owner_is_cleaned_up_after_as_soon_as_it_is_dead(reaped: bool, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from services.dit.refine.scratch import ScratchDirectory
scratch = ScratchDirectory(Path(sys.argv[1]))
print(scratch.path, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert sweep(tmp_path) == []
    assert path.exists()
    owner.send_signal(signal.SIGKILL)
    if reaped:
        owner.wait(20)
    else:
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
    assert sweep(tmp_path) == [path]
    owner.wait(20)
    owner.communicate()
