from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from orchestrator.data_directory import RUNTIME_NAME, VERSION, VERSION_NAME, read_version, take_data_directory
from orchestrator.leftovers import ProcessIdentity


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runtime directories are made."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def note(data: Path, runtime: Path, owner: dict[str, object]) -> None:
    (data / RUNTIME_NAME).write_text(json.dumps({"path": str(runtime), "owner": owner}))


def identity(**changed: object) -> dict[str, object]:
    """This process's, with something changed."""
    return {**vars(ProcessIdentity.of(os.getpid())), **changed}


def test_a_new_directory_is_only_its_users_and_gets_its_version_last(data: Path) -> None:
    with take_data_directory(data) as taken:
        assert taken.version == 0
        assert data.stat().st_mode & 0o777 == 0o700
        assert (data / "jobs").is_dir()
        assert not (data / VERSION_NAME).exists()
        taken.set_current()
        assert (data / VERSION_NAME).read_text() == f"{VERSION}\n"
    with take_data_directory(data) as taken:
        assert taken.version == VERSION


def test_a_change_of_version_that_was_interrupted_starts_again_from_the_jobs(data: Path) -> None:
    (data / "jobs" / "old-job").mkdir(parents=True)
    (data / "journal.db").write_bytes(b"half of a journal")
    with take_data_directory(data) as taken:
        assert not (data / "journal.db").exists()
        assert (data / "jobs" / "old-job").is_dir()
        (data / "journal.db").write_bytes(b"a whole journal")
        taken.set_current()
    with take_data_directory(data):
        assert (data / "journal.db").read_bytes() == b"a whole journal"


def test_a_newer_directory_is_refused_and_left_as_it_is(data: Path) -> None:
    with take_data_directory(data) as taken:
        taken.set_current()
    (data / VERSION_NAME).write_text("7\n")
    (data / "journal.db").write_bytes(b"of the newer server")
    with pytest.raises(ConfigError, match="has version 7, and this server knows versions up to 1: start the server"):
        take_data_directory(data).__enter__()
    assert (data / "journal.db").read_bytes() == b"of the newer server"


@pytest.mark.parametrize("text", ["", "0\n", "-1", "one", "1.5", "é"])
def test_a_version_that_is_none_is_refused(data: Path, text: str) -> None:
    data.mkdir()
    (data / VERSION_NAME).write_text(text)
    with pytest.raises(ConfigError, match=VERSION_NAME):
        read_version(data)


def test_two_servers_never_have_one_directory(data: Path) -> None:
    with take_data_directory(data), pytest.raises(ConfigError, match=f"another server uses {data}"):
        take_data_directory(data).__enter__()
    with take_data_directory(data):
        pass


def test_a_server_that_lives_keeps_its_directory_though_its_lock_file_was_removed(data: Path, temporary: Path) -> None:
    runtime = temporary / "h3stream-0"
    runtime.mkdir()
    data.mkdir()
    note(data, runtime, identity())
    with pytest.raises(ConfigError, match="another server uses"):
        take_data_directory(data).__enter__()
    assert runtime.exists()


@pytest.mark.parametrize("changed", [{"start_ticks": 0}, {"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
def test_another_process_with_the_number_of_a_dead_server_is_not_taken_for_it(
    data: Path, temporary: Path, changed: dict[str, object]
) -> None:
    runtime = temporary / "h3stream-0"
    (runtime / "session").mkdir(parents=True)
    data.mkdir()
    note(data, runtime, identity(**changed))
    with take_data_directory(data):
        assert not runtime.exists()
        assert not (data / RUNTIME_NAME).exists()


def test_the_runtime_directory_is_told_of_while_it_is_there_and_only_its_users(data: Path, temporary: Path) -> None:
    with take_data_directory(data) as taken:
        with taken.runtime_directory() as runtime:
            assert json.loads((data / RUNTIME_NAME).read_text())["path"] == str(runtime)
            assert runtime.stat().st_mode & 0o777 == 0o700
            (runtime / "core.sock").touch()
        assert list(temporary.iterdir()) == []
        assert not (data / RUNTIME_NAME).exists()


def test_what_is_no_runtime_directory_is_never_removed(
    data: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    precious = temporary / "precious"
    precious.mkdir()
    data.mkdir()
    note(data, precious, identity(start_ticks=0))
    with take_data_directory(data):
        assert precious.exists()
    assert "left alone" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{}", b'{"path": "/tmp/h3stream-x", "owner": {"pid": 1}}', b"\xff"])
def test_a_note_that_cannot_be_read_does_not_keep_a_server_from_starting(
    data: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    data.mkdir()
    (data / RUNTIME_NAME).write_bytes(content)
    with take_data_directory(data), caplog.at_level("WARNING"):
        pass
    assert "cannot be read" in caplog.text
