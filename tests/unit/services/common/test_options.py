from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from orchestrator.config import Settings
from services.common.config import WorkerConfig
from services.common.options import option_help
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


@pytest.mark.parametrize("settings", [Settings, WorkerConfig, DitConfig, TextEncoderConfig, VaeConfig])
def test_every_setting_of_every_process_is_told(settings: type[object]) -> None:
    assert option_help(settings).keys() == {field.name for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
