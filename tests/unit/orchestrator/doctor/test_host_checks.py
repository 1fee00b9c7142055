from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from orchestrator.doctor import host
from orchestrator.doctor.finding import Finding, as_json, as_text, is_fine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("model", "total", "available", "level"),
    [(0, 8, 6, "ok"), (40, 64, 60, "ok"), (40, 64, 42, "warn"), (62, 64, 60, "fail"), (0, 2, 2, "fail")],
)
def test_memory_is_held_against_the_model(model: int, total: int, available: int, level: str) -> None:
    assert host.check_memory(model * GIB, (total * GIB, available * GIB)).level == level


def test_there_is_some_memory() -> None:
    total, available = host.memory()
    assert 0 < available <= total


def test_an_address_is_free_taken_or_none_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert host.check_address(address, is_server_running=False).level == "fail"
        assert host.check_address(address, is_server_running=True).level == "ok"
    assert host.check_address(address, is_server_running=False).level == "ok"
    assert host.check_address("192.0.2.1:50051", is_server_running=False).level == "fail"
    assert host.check_address("[::1]:0", is_server_running=False).check == "address"


def test_a_clock_that_is_behind_its_own_files_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    written_s = host.newest_of([tmp_path / "gone", file])
    assert written_s == file.stat().st_mtime
    assert host.check_clock(written_s + 1, written_s).level in ("ok", "warn")
    assert host.check_clock(written_s - 3600, written_s).level == "fail"
    assert host.newest_of([]) == 0


def test_too_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_shared_memory(tmp_path / "gone").level == "warn"
    usage = shutil._ntuple_diskusage(1 << 30, 0, 64 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = host.check_shared_memory(tmp_path)
    assert found.level == "warn"
    assert "--shm-size" in found.remedy


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_packages().level == "ok"
    monkeypatch.setattr(
        host.metadata, "requires", lambda name: ["grpcio>=1", "no-such-package; x", 'y; extra == "dev"']
    )
    found = host.check_packages()
    assert (found.level, found.message) == ("fail", "missing: no-such-package")


def test_findings_are_told_to_people_and_to_programs() -> None:
    fine, odd, bad = (
        Finding("python", "ok", "Python 3.11"),
        Finding("disk", "warn", "2 GiB", "free some"),
        Finding("model", "fail", "two things:\n- a \x1b[2J\n- b", "fetch it"),
    )
    assert as_text(fine) == "ok    python         Python 3.11"
    assert as_text(odd).splitlines() == ["warn  disk           2 GiB", "                     -> free some"]
    assert as_text(bad).splitlines()[1] == r"                     - a \x1b[2J"
    assert is_fine([fine, odd])
    assert not is_fine([fine, bad])
    assert json.loads(as_json([odd])) == {
        "is_fine": True,
        "findings": [{"check": "disk", "level": "warn", "message": "2 GiB", "remedy": "free some"}],
    }
