from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from h3stream.errors import ConfigError
from orchestrator.config import Settings
from services.common.config import AdapterSource, WorkerConfig
from services.common.options import add_flags, option_help, parse_values, texts_of, told
from services.dit.config import DitConfig
from services.text_encoder.config import TextEncoderConfig
from services.vae.config import VaeConfig


@dataclass(frozen=True)
class Base:
    share: int = 30
    """Part of the device,
    in %."""
    undocumented: int = 1


@dataclass(frozen=True)
class Extended(Base):
    path: str | None = None
    """Where to write."""
    needed: int = dataclasses.field(kw_only=True)
    """How many."""


def test_a_field_is_told_in_one_line_with_its_default() -> None:
    assert option_help(Extended) == {
        "share": "Part of the device, in %%. Default: 30.",
        "path": "Where to write.",
        "needed": "How many.",
    }


def test_a_class_without_source_has_no_help() -> None:
    assert option_help(dataclasses.make_dataclass("Made", [("size", int)])) == {}


def named(settings: Any) -> set[str]:
    """Settings that are no secret."""
    return {field.name for field in dataclasses.fields(settings)} - {"token"}


@pytest.mark.parametrize("settings", [Settings, WorkerConfig, DitConfig, TextEncoderConfig, VaeConfig])
def test_every_setting_of_every_process_is_told(settings: type[object]) -> None:
    assert option_help(settings).keys() == named(settings)


@pytest.mark.parametrize("settings", [Settings, DitConfig, TextEncoderConfig, VaeConfig])
def test_help_speaks_of_flags_and_of_no_value_that_none_can_give(settings: type[object]) -> None:
    assert not [name for name, text in option_help(settings).items() if "None" in text]


@dataclass(frozen=True)
class Everything:
    """A setting of each kind."""

    a_bool: bool = False
    a_count: int = 0
    a_rate: float = 0.0
    a_word: str = ""
    another: str | None = None
    a_path: Path | None = None
    model_directory: Path | None = None
    adapters: tuple[AdapterSource, ...] = ()


def parse(*arguments: str) -> Everything:
    parser = argparse.ArgumentParser()
    add_flags(parser, Everything)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return Everything(**parse_values(Everything, given))


def test_every_kind_of_setting_has_its_flag(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    x = str(tmp_path / "x")
    assert parse() == Everything()
    assert parse(
        "--a-bool", *("--a-count", "3"), *("--a-rate", "2.5"), *("--a-word", "w"), *("--another", "v"),
        *("--a-path", "p"), *("--model", "m"), *("--adapter", f"turbo={x}:2"), *("--adapter", x),
    ) == Everything(
        True, 3, 2.5, "w", "v", Path("p"), Path("m"),
        (AdapterSource("turbo", Path(x), 2.0), AdapterSource("x", Path(x))),
    )  # fmt: skip


def test_adapters_of_one_text_are_separated_by_semicolons(tmp_path: Path) -> None:
    for name in "xy":
        (tmp_path / name).touch()
    x, y = AdapterSource("x", tmp_path / "x"), AdapterSource("y", tmp_path / "y", 0.5)
    for text, expected in (("", ()), (f"{x}", (x,)), (f" {x} ; {y};", (x, y))):
        assert parse_values(Everything, {"adapters": text}) == {"adapters": expected}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a_bool", "yes", "a_bool is 'yes', which is no bool"),
        ("a_count", "many", "a_count is 'many', which is no int"),
        ("a_count", 2.5, "a_count is 2.5, which is no int"),
        ("a_count", True, "a_count is True, which is no int"),
        ("a_rate", "fast", "a_rate is 'fast', which is no float"),
        ("a_path", 5, "a_path is 5, which is no Path"),
        ("a_path", "", "a_path is '', which is no Path"),
        ("model_directory", "", "model_directory is '', which is no Path"),
        ("adapters", 5, "adapter is 5; it must be a list of texts"),
        ("adapters", ["x", 5], r"adapter is \['x', 5\]; it must be a list of texts"),
    ],
)
def test_a_value_of_another_kind_is_told_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_values(Everything, {name: value})


@pytest.mark.parametrize("settings", [Settings, WorkerConfig, DitConfig, TextEncoderConfig, VaeConfig])
def test_every_setting_of_every_process_can_be_given_as_a_flag(settings: type[object]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, settings)
    assert vars(parser.parse_args([])) == dict.fromkeys(named(settings))


def test_settings_are_told_as_flags_take_them(tmp_path: Path) -> None:
    path = tmp_path / "a style"
    path.touch()
    sources = (AdapterSource("a", path, 0.5), AdapterSource("b", path))
    settings = Everything(a_count=2, a_path=path, adapters=sources)
    assert texts_of(settings)["adapters"] == f"a={path}:0.5;b={path}"
    assert told(settings) == (
        f"a_bool=False a_count=2 a_rate=0.0 a_word='' a_path='{path}' adapters='a={path}:0.5;b={path}'"
    )
    assert "adapters" not in texts_of(Everything())


def test_a_secret_is_no_flag_and_is_not_told() -> None:
    config = WorkerConfig(token="s3cret" * 3)
    assert "token" not in texts_of(config)
    assert "s3cret" not in told(config) + repr(config)
