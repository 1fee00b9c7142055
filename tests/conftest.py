"""What tests of several packages share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine any example can take long. Where a change is judged, it is judged by the same examples each time.
settings.register_profile("h3stream", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("h3stream")

PROCESS_TESTS = {"browser", "e2e", "faults", "service"}
"""Folders of tests that start processes and watch them from outside."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Such a test can lose a race to a machine that stands still for a second. Where a change is judged it is tried
    # again, and listed as RERUN; at home every failure shows at once.
    if "CI" in os.environ:
        for item in items:
            if PROCESS_TESTS & {*item.path.parts}:
                item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of seed 0, made once per session; tests must not write to it."""
    from tools.make_tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory
