"""Settings that name files: what they are read from, and what is said where one is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import ADAPTER_NAME
from h3stream.errors import ConfigError
from services.common.config import AdapterSource, WorkerConfig
from services.dit.config import DitConfig
from services.text_encoder.config import TextEncoderConfig
from services.vae.config import VaeConfig

RULE = "an adapter is given as PATH, NAME=PATH, PATH:STRENGTH or NAME=PATH:STRENGTH"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with some adapters in it."""
    for name in ("turbo 4-step (v1).safetensors", "x", "a:b", "_.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "s=1").mkdir()
    (tmp_path / "s=1" / "style.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "path", "strength"),
    [
        ("x", "x", "x", None),
        ("turbo=x", "turbo", "x", None),
        ("x:0.5", "x", "x", 0.5),
        ("turbo=x:-1e-3", "turbo", "x", -0.001),
        ("turbo=./x:1", "turbo", "x", 1.0),
        ("turbo 4-step (v1).safetensors", "turbo-4-step-v1", "turbo 4-step (v1).safetensors", None),
        ("./s=1/style.safetensors", "style", "s=1/style.safetensors", None),
        ("s=./s=1/style.safetensors:2", "s", "s=1/style.safetensors", 2.0),
        ("a:b", "a-b", "a:b", None),
        ("a:b:0.25", "a-b", "a:b", 0.25),
    ],
)
def test_an_adapter_is_a_path_with_or_without_a_name_and_a_strength(
    folder: Path, text: str, name: str, path: str, strength: float | None
) -> None:
    source = AdapterSource.parse(text)
    assert source == AdapterSource(name, Path(path), strength)
    assert AdapterSource.parse(str(source)) == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"adapter is ''; {RULE}"),
        ("turbo=", f"adapter is 'turbo='; {RULE}"),
        ("=x", f"adapter is '=x'; {RULE}"),
        (":0.5", f"adapter is ':0.5'; {RULE}"),
        ("turbo=:0.5", f"adapter is 'turbo=:0.5'; {RULE}"),
        ("y", f"adapter y=y: y does not exist; {RULE}"),
        ("x:strong", f"adapter x-strong=x:strong: x:strong does not exist; {RULE}"),
        ("a=" + "x" * 300, f"adapter a={'x' * 300}: {'x' * 300} does not exist; {RULE}"),
        ("my turbo=x", "adapter my turbo=x: the name is 'my turbo'; it must be 1 to 64 letters, digits"),
        ("_.safetensors", f"adapter is '_.safetensors': give it a name; {RULE}"),
        ("x:0", "adapter x=x:0.0: the strength is 0.0; it must not be 0 and be from -16 to 16"),
        ("x:nan", "adapter x=x:nan: the strength is nan; it must not be 0 and be from -16 to 16"),
        ("x:17", "adapter x=x:17.0: the strength is 17.0; it must not be 0 and be from -16 to 16"),
    ],
)
def test_what_is_no_adapter_is_told_with_the_rule(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AdapterSource.parse(text)
    assert str(refused.value).startswith(message)


@given(st.text())
def test_any_text_is_an_adapter_or_a_clear_error(text: str) -> None:
    try:
        source = AdapterSource.parse(text)
    except ConfigError:
        return
    assert ADAPTER_NAME.fullmatch(source.name)
    assert source.path.exists()


def test_a_model_directory_must_be_there_but_need_not_be_given(tmp_path: Path) -> None:
    assert WorkerConfig().model_directory is None
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        WorkerConfig(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (DitConfig, {"dit": "transformer"}),
        (VaeConfig, {"video_vae": "vae", "audio_vae": "audio_vae"}),
        (TextEncoderConfig, {"text_encoder": "text_encoder", "tokenizer": "tokenizer"}),
    ],
)
def test_each_part_is_the_model_directory_s_or_one_of_its_own(
    tmp_path: Path, config: type[WorkerConfig], parts: dict[str, str]
) -> None:
    for missing in parts:
        own = {part: tmp_path / "own" for part in parts if part != missing}
        (tmp_path / "own").touch()
        flag = f"--{missing.replace('_', '-')} PATH"
        with pytest.raises(ConfigError, match=f"{missing} is not set: give {flag}, or --model DIR"):
            config(**own)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{missing}: .* has none of .*{parts[missing]}.*; give {flag}"):
            config(tmp_path, **own)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{missing}: {tmp_path}/gone does not exist"):
            config(**own, **{missing: tmp_path / "gone"})  # type: ignore[arg-type]
    config(**dict.fromkeys(parts, tmp_path / "own"))  # type: ignore[arg-type]
    for folder in parts.values():
        (tmp_path / folder).mkdir()
    config(tmp_path)


def test_a_layout_that_no_dit_has_is_refused_with_those_that_one_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dit_layout is 'gguf'; it must be one of auto, diffusers, official, comfyui"):
        DitConfig(dit=tmp_path, dit_layout="gguf")
