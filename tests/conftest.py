"""What tests of several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of seed 0, made once per session; tests must not write to it."""
    from tools.make_tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory
