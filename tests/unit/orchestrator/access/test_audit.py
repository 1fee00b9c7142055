from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from orchestrator.access.audit import NUM_KEPT, AuditLog


def entries(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_lines_are_added_to_a_file_of_this_user(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(3):
        audit = AuditLog(path)
        audit.write({"n": number})
        audit.close()
    assert entries(path) == [0, 1, 2]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_large_file_is_set_aside_and_the_oldest_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, max_bytes=20)
    for number in range(10, 30):
        audit.write({"n": number})  # 10 bytes with the end of the line
    audit.close()
    names = [path.name, *(f"{path.name}.{number}" for number in range(1, NUM_KEPT + 1))]
    assert sorted(os.listdir(tmp_path)) == names
    assert [entries(tmp_path / name) for name in names] == [[28, 29], [26, 27], [24, 25], [22, 23], [20, 21]]


def test_a_log_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"audit: {tmp_path}/gone/a.jsonl cannot be written: No such file"):
        AuditLog(tmp_path / "gone" / "a.jsonl")


def test_a_full_disk_is_logged_once_and_stops_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(Path("/dev/full"))
    for _ in range(3):
        audit.write({"n": 1})
    audit.close()
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full cannot be written: No space left on device; calls are not written down"
    ]
