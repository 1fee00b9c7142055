"""A server that cannot start ends with one clear line."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from services.checkpoints.components import FOLDERS


@pytest.mark.parametrize(
    ("data", "reason"),
    [("a-file", "File exists"), ("a-file/below", "Not a directory"), ("/proc/h3stream", "No such file")],
)
def test_a_data_directory_that_cannot_be_written_ends_the_server_with_one_line(
    tmp_path: Path, data: str, reason: str
) -> None:
    (tmp_path / "a-file").touch()
    line = last_line(tmp_path, tmp_path / data)
    assert line.startswith(f"h3stream: data: nothing can be written in {tmp_path / data}: {reason}")


def test_a_data_directory_that_another_server_uses_ends_the_server_with_one_line(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = last_line(tmp_path, tmp_path)
    assert line == f"h3stream: data: another server uses {tmp_path}; give this one another directory"


def last_line(model: Path, data: Path) -> str:
    """What a server says that cannot start, after its settings."""
    for folders in FOLDERS.values():
        (model / folders[0]).mkdir()
    command = [sys.executable, "-m", "orchestrator", "--model", str(model), "--data", str(data)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    settings, line = ended.stderr.splitlines()
    assert "settings:" in settings
    return line


def test_a_standard_input_that_never_closes_cannot_tell_of_the_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator", "--exit-with-parent", "--model", str(tmp_path)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == "h3stream: exit_with_parent needs a standard input that closes, such as a pipe\n"
