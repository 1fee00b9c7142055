"""What people read of a server's adapters."""

from __future__ import annotations

from dataclasses import replace

from h3stream.report import adapter_table
from tests.fakes import ADAPTERS


def test_what_is_not_known_before_the_model_is_there_is_a_dash() -> None:
    loading = replace(ADAPTERS[1], num_bound_modules=0, sha256="")
    assert adapter_table((loading,))[1].split()[:5] == ["turbo", "0.75", "comfyui", "8-64", "-"]


def test_a_server_without_adapters_has_a_heading_alone() -> None:
    assert [line.split()[0] for line in adapter_table(())] == ["name"]
