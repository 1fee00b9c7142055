from __future__ import annotations

from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from orchestrator.config import Settings, load_settings


def test_flags_win_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "h3stream.toml"
    file.write_text('threads = 3\nmax_queued_jobs = 5\nlisten = "127.0.0.1:1"\n')
    environment = {"H3STREAM_MODEL": str(tmp_path), "H3STREAM_THREADS": "2", "H3STREAM_KEPT_JOBS": "9"}
    settings, _ = load_settings(["--config", str(file), "--max-queued-jobs", "7"], environment)
    assert (settings.threads, settings.max_queued_jobs, settings.kept_jobs) == (3, 7, 9)
    assert (settings.listen, settings.model) == ("127.0.0.1:1", tmp_path)


def test_the_data_directory_defaults_to_the_users_own(tmp_path: Path) -> None:
    settings, _ = load_settings(["--model", str(tmp_path)], {"XDG_DATA_HOME": "/var/data"})
    assert settings.data == Path("/var/data/h3stream")


def test_a_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--model DIR or H3STREAM_MODEL"):
        load_settings([], {})


def test_an_unknown_setting_in_the_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "h3stream.toml"
    file.write_text("treads = 3\n")
    with pytest.raises(ConfigError, match="unknown settings \\['treads'\\]"):
        load_settings(["--config", str(file), "--model", str(tmp_path)], {})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "h3stream.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"h3stream\.toml"):
        load_settings(["--config", str(file), "--model", str(tmp_path)], {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "many"], "threads is 'many', which is no int"),
        (["--threads", "-1"], "threads is -1; it must be at least 0"),
        (["--lanes", "0"], "lanes is 0; it must be at least 1"),
        (["--listen", "nowhere"], "listen is 'nowhere'; it must be HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "must be HOST:PORT"),
        (["--listen", "127.0.0.1:²"], "must be HOST:PORT"),
        (["--worker-transport", "pigeon"], "worker_transport is 'pigeon'"),
    ],
)
def test_a_wrong_value_is_told_with_its_rule(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(["--model", str(tmp_path), *arguments], {})


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "example.org:1"])
def test_listening_beyond_loopback_needs_the_flag_that_says_insecure(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match="only loopback"):
        load_settings(["--model", str(tmp_path), "--listen", listen], {})
    settings, _ = load_settings(["--model", str(tmp_path), "--listen", listen, "--insecure"], {})
    assert settings.listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:5", "[::1]:5", "localhost:5"])
def test_loopback_needs_no_flag(tmp_path: Path, listen: str) -> None:
    assert Settings(model=tmp_path, data=tmp_path, listen=listen).listen == listen


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing-here is not a directory"):
        Settings(model=tmp_path / "nothing-here", data=tmp_path)
