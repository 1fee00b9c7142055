from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from h3stream.request import PreviewSpec
from orchestrator.config import Settings, load_settings
from orchestrator.edge_settings import EdgeSettings
from services.common.config import AdapterSource


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


PARTS = ("dit", "video_vae", "audio_vae", "text_encoder", "tokenizer")


def test_parts_given_by_themselves_need_no_model_directory(tmp_path: Path) -> None:
    for name in PARTS:
        (tmp_path / name).touch()
    flags = [f"--{name.replace('_', '-')}={tmp_path / name}" for name in PARTS]
    settings, _ = load_settings(flags, {})
    assert settings.model is None
    assert settings.parts == {name: tmp_path / name for name in PARTS}
    with pytest.raises(ConfigError, match=r"every part by itself \(still missing: --video-vae, --tokenizer\)"):
        load_settings([flags[0], *flags[2:4]], {})
    settings, _ = load_settings(flags[1:], {"H3STREAM_DIT": str(tmp_path), "H3STREAM_DIT_LAYOUT": "comfyui"})
    assert (settings.dit, settings.dit_layout) == (tmp_path, "comfyui")


def test_a_part_may_replace_the_model_directory_s(tmp_path: Path) -> None:
    settings, _ = load_settings(["--model", str(tmp_path), "--dit", str(tmp_path)], {})
    assert settings.parts == {name: tmp_path if name == "dit" else None for name in PARTS}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {tmp_path}/gone does not exist"):
        load_settings(["--model", str(tmp_path), f"--{name.replace('_', '-')}", str(tmp_path / "gone")], {})


def test_adapters_come_from_the_environment_a_file_or_flags_as_a_whole(tmp_path: Path) -> None:
    a, b = (tmp_path / name for name in ("a.safetensors", "b.safetensors"))
    for path in (a, b):
        path.touch()
    file = tmp_path / "h3stream.toml"
    file.write_text(f"adapter = ['{b}', 'turbo={a}:0.5']\nallow_partial_adapters = true\n")
    model = ["--model", str(tmp_path)]
    settings, _ = load_settings(model, {"H3STREAM_ADAPTER": f"{a};b={b}:2"})
    assert settings.adapter == (AdapterSource("a", a), AdapterSource("b", b, 2.0))
    assert not settings.allow_partial_adapters
    settings, _ = load_settings([*model, "--config", str(file)], {"H3STREAM_ADAPTER": str(a)})
    assert settings.adapter == (AdapterSource("b", b), AdapterSource("turbo", a, 0.5))
    assert settings.allow_partial_adapters
    settings, _ = load_settings([*model, "--config", str(file), "--adapter", f"x={a}", "--adapter", str(b)], {})
    assert settings.adapter == (AdapterSource("x", a), AdapterSource("b", b))


def test_settings_are_told_as_texts_and_those_that_are_not_set_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    settings, _ = load_settings(["--model", str(tmp_path), "--data", str(tmp_path)], {})
    told = settings.public(with_paths=True)
    assert (told["model"], told["allow_partial_adapters"], told["threads"]) == (str(tmp_path), "False", "0")
    assert not {"dit", "adapter"} & told.keys()
    sources = (AdapterSource("a", tmp_path / "a", 0.5), AdapterSource("b", tmp_path / "a"))
    told = dataclasses.replace(settings, adapter=sources).public(with_paths=True)
    assert told["adapter"] == f"a={tmp_path / 'a'}:0.5;b={tmp_path / 'a'}"
    told = dataclasses.replace(settings, adapter=sources).public(with_paths=False)
    assert told["listen"]
    assert str(tmp_path) not in " ".join(told.values())
    assert str(settings).startswith(f"data={tmp_path} model={tmp_path} dit_layout=auto allow_partial_adapters=False ")


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
        (["--device", "gpu"], 'device is \'gpu\'; it must be "auto", "cpu", "cuda" or "cuda:N"'),
        (["--device", "cuda:4096"], r"device is 'cuda:4096', which is not there: the NVIDIA driver offers \d+ GPUs"),
        (["--listen", "nowhere"], "listen is 'nowhere'; it must be HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "must be HOST:PORT"),
        (["--listen", "127.0.0.1:²"], "must be HOST:PORT"),
        (["--worker-transport", "pigeon"], "worker_transport is 'pigeon'"),
        (["--dit-layout", "gguf"], "dit_layout is 'gguf'; it must be one of auto, diffusers, official, comfyui"),
        (["--adapter", "turbo=/nowhere"], "adapter turbo=/nowhere: /nowhere does not exist"),
    ],
)
def test_a_wrong_value_is_told_with_its_rule(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(["--model", str(tmp_path), *arguments], {})


def test_a_wrong_value_is_told_with_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "h3stream.toml"
    file.write_text("kept_jobs = 'x'\n")
    model, wrong = ["--model", str(tmp_path)], "kept_jobs is 'x', which is no int"
    for arguments, environment, origin in (
        ([], {"H3STREAM_KEPT_JOBS": "x"}, "H3STREAM_KEPT_JOBS"),
        (["--config", str(file)], {"H3STREAM_KEPT_JOBS": "1"}, f"config file {file}"),
        (["--config", str(file), "--kept-jobs", "x"], {}, "--kept-jobs"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_settings([*model, *arguments], environment)
        assert str(caught.value) == f"{origin}: {wrong}"
    with pytest.raises(ConfigError, match=r"^H3STREAM_LANES: lanes is 0; it must be at least 1$"):
        load_settings(model, {"H3STREAM_LANES": "0"})
    with pytest.raises(ConfigError, match=r"^H3STREAM_PREVIEW_MAX_SIDE: preview_max_side is 7"):
        load_settings(model, {"H3STREAM_PREVIEW_MAX_SIDE": "7"})


def test_a_variable_that_is_no_setting_is_told_with_the_nearest_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"H3STREAM_KEPT_JOB": "3", "H3STREAM_SERVER": "localhost:1", "H3_THREADS": "1"}
    settings, _ = load_settings(["--model", str(tmp_path)], environment)
    assert settings.kept_jobs == 64
    assert caplog.messages == [
        "the variable H3STREAM_KEPT_JOB is no setting and changes nothing; the nearest one is H3STREAM_KEPT_JOBS"
    ]


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


def test_a_flag_has_its_whole_name_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(["--mod", str(tmp_path)], {})
    assert "unrecognized arguments: --mod" in capsys.readouterr().err


def test_stills_have_a_default_that_must_be_possible(tmp_path: Path) -> None:
    given = ["--model", str(tmp_path)]
    settings, _ = load_settings(given, {})
    assert settings.preview == PreviewSpec(256, 1)
    settings, _ = load_settings([*given, "--preview-max-side", "0", "--preview-every-steps", "3"], {})
    assert settings.preview == PreviewSpec(0, 3)
    with pytest.raises(ConfigError, match="preview_max_side is 8; it must be from 16 to 512 or 0; the nearest"):
        load_settings([*given, "--preview-max-side", "8"], {})


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "10.1.2.3:1", "example.org:1"])
def test_beyond_loopback_callers_must_be_authenticated_or_the_server_be_called_insecure(
    tmp_path: Path, listen: str
) -> None:
    files = {name: tmp_path / name for name in ("keys", "tls_cert", "tls_key", "tls_client_ca")}
    for path in files.values():
        path.touch()
    tls = {name: files[name] for name in ("tls_cert", "tls_key")}
    for settings in ({}, tls):
        with pytest.raises(ConfigError, match=r"not authenticated, .*; give keys or tls_client_ca, or set insecure"):
            Settings(model=tmp_path, data=tmp_path, listen=listen, **settings)
    for settings in ({"keys": files["keys"]}, {**tls, "tls_client_ca": files["tls_client_ca"]}, {"insecure": True}):
        assert Settings(model=tmp_path, data=tmp_path, listen=listen, **settings).listen == listen


def test_files_of_access_are_checked_and_told_to_the_edge(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.touch()
    for flags, words in (
        (["--keys", b], rf"--keys: keys: {b} is no file"),
        (["--tls-cert", a], "tls_cert is set without tls_key; TLS needs both"),
        (["--tls-key", a], "tls_key is set without tls_cert; TLS needs both"),
        (["--tls-client-ca", a], "tls_client_ca is set without tls_cert and tls_key"),
        (["--log-format", "xml"], r"log_format is 'xml'; it must be one of \('text', 'json'\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_settings(["--model", str(tmp_path), *map(str, flags)], {})
    settings, _ = load_settings(["--model", str(tmp_path), "--data", str(tmp_path), "--log-format", "json"], {})
    assert settings.edge == EdgeSettings(log_format="json")
    settings, _ = load_settings(["--model", str(tmp_path), "--data", str(tmp_path), "--keys", str(a)], {})
    assert settings.edge == EdgeSettings(keys=a, audit=tmp_path / "audit.jsonl")
