from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.data_directory import VERSION_NAME, take_data_directory
from orchestrator.doctor import storage
from orchestrator.doctor.finding import Finding
from orchestrator.journal import JOURNAL_NAME, Journal


def levels(data: Path) -> dict[str, str]:
    return {finding.check: finding.level for finding in storage.check_storage(data)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of a server that has stopped."""
    path = tmp_path / "data"
    with take_data_directory(path) as taken:
        Journal(path / JOURNAL_NAME).close()
        taken.set_current()
    return path


def test_a_good_directory_is_left_as_it_was(data: Path) -> None:
    before = sorted(path.name for path in data.iterdir())
    found = levels(data)
    assert {name: found[name] for name in ("writing", "version", "journal", "leftovers")} == dict.fromkeys(
        ("writing", "version", "journal", "leftovers"), "ok"
    )
    assert sorted(path.name for path in data.iterdir()) == before


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    found = levels(tmp_path / "a" / "b")
    assert found["writing"] == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert levels(tmp_path / "file" / "below")["writing"] == "fail"


def test_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(num_bytes: int) -> Finding:
        usage = shutil._ntuple_diskusage(1 << 40, 0, num_bytes)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        return storage.check_room(tmp_path)

    assert with_free(20 << 30).level == "ok"
    assert with_free(5 << 30).level == "warn"
    full = with_free(1 << 20)
    assert full.level == "fail"
    assert "--kept-jobs" in full.remedy


@pytest.mark.parametrize(
    ("mounts", "level"),
    [
        ("/dev/a / ext4 rw 0 0\n", "ok"),
        ("/dev/a / ext4 rw 0 0\nserver:/x {place} nfs4 rw 0 0\n", "warn"),
        ("/dev/a / ext4 rw 0 0\ntmpfs {place} tmpfs rw 0 0\n", "warn"),
        ("/dev/a / nfs rw 0 0\n/dev/b {place} xfs rw 0 0\n", "ok"),
        ("/dev/a / ext4 rw 0 0\nserver:/x {place}-not nfs4 rw 0 0\n", "ok"),
    ],
)
def test_a_file_system_is_judged_by_the_mount_that_holds_the_directory(tmp_path: Path, mounts: str, level: str) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    escaped = str(place).replace(" ", r"\040")
    assert storage.check_file_system(place / "data", mounts.format(place=escaped)).level == level


def test_a_directory_that_others_can_look_into_is_told(data: Path) -> None:
    data.chmod(0o755)
    assert storage.check_writing(data).remedy == f"`chmod 700 {data}`"


def test_nothing_is_looked_at_in_another_users_directory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Finding:
        raise PermissionError

    # In place of a second user: root, who may run the tests, may look everywhere.
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)
    monkeypatch.setattr(storage, "check_version", refuse)
    assert list(levels(data)) == ["disk", "file system", "writing"]


def test_versions_are_told_apart(data: Path) -> None:
    (data / VERSION_NAME).write_text("9\n")
    newer = storage.check_version(data)
    assert newer.level == "fail"
    assert "version 9" in newer.message
    (data / VERSION_NAME).unlink()
    assert storage.check_version(data).level == "ok"
    (data / "jobs" / "old").mkdir()
    assert storage.check_version(data).level == "warn"


def test_the_journal_of_a_server_that_runs_is_read_beside_it(data: Path) -> None:
    journal = Journal(data / JOURNAL_NAME)
    try:
        assert storage.check_journal(data).level == "ok"
    finally:
        journal.close()


def test_a_damaged_journal_is_found(data: Path) -> None:
    path = data / JOURNAL_NAME
    with closing(sqlite3.connect(path)) as journal:
        journal.execute("CREATE TABLE more (text TEXT)")
        journal.executemany("INSERT INTO more VALUES (?)", [("x" * 500,)] * 100)
        journal.commit()
        journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert storage.check_journal(data).level == "ok"
    content = bytearray(path.read_bytes())
    content[-8192:] = b"\xff" * 8192
    path.write_bytes(content)
    assert storage.check_journal(data).level == "warn"
    path.write_bytes(b"no database at all")
    assert storage.check_journal(data).level == "warn"


def test_a_server_that_runs_is_told_from_one_that_was_killed(data: Path) -> None:
    with take_data_directory(data) as taken, taken.runtime_directory() as runtime:
        assert storage.is_used(data)
        running = storage.check_leftovers(data)
        assert running.level == "ok"
        assert str(runtime) in running.message
        note = (data / "runtime.json").read_bytes()
    assert not storage.is_used(data)
    (data / "runtime.json").write_bytes(note)
    assert storage.check_leftovers(data).level == "warn"
