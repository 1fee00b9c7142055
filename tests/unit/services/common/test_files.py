from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from services.common.files import part_path, publish, remove, write_whole


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "clip.json"
    part_path(path).write_bytes(b"half")
    assert not path.exists()
    assert publish(path) == (4, hashlib.sha256(b"half").hexdigest())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("clip.json", b"half")]
    assert write_whole(path, b"whole") == (5, hashlib.sha256(b"whole").hexdigest())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("clip.json", b"whole")]


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        fsync(fd)
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))

    def watched_replace(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(("replace", target.name))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_whole(tmp_path / "clip.json", b"whole")
    assert done == [("fsync", ".clip.json.part"), ("replace", "clip.json"), ("fsync", tmp_path.name)]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    path = tmp_path / "clip.json"
    write_whole(path, b"before")
    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="the disk is full"):
        write_whole(path, b"after")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("clip.json", b"before")]


def test_what_is_not_there_needs_no_removal_and_what_stays_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    remove(tmp_path / "gone")
    remove(tmp_path / "file" / "below")
    assert caplog.messages == []
    remove(tmp_path)
    assert caplog.messages == [f"{tmp_path} cannot be removed: Is a directory"]
    remove(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
