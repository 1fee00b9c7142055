"""A server that cannot start ends with one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.model_info import COMPONENTS


@pytest.mark.parametrize(
    ("data", "reason"),
    [("a-file", "Not a directory"), ("a-file/below", "Not a directory"), ("/proc/h3stream", "No such file")],
)
def test_a_data_directory_that_cannot_be_written_ends_the_server_with_one_line(
    tmp_path: Path, data: str, reason: str
) -> None:
    for name in COMPONENTS:
        (tmp_path / name).mkdir()
    (tmp_path / "a-file").touch()
    command = [sys.executable, "-m", "orchestrator", "--model", str(tmp_path), "--data", str(tmp_path / data)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    settings, line = ended.stderr.splitlines()
    assert "settings:" in settings
    assert line.startswith(f"h3stream: data: nothing can be written in {tmp_path / data}: {reason}")
