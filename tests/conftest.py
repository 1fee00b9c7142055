"""What tests of several packages share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine any example can take long. Where a change is judged, it is judged by the same examples each time.
settings.register_profile("h3stream", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("h3stream")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of seed 0, made once per session; tests must not write to it."""
    from tools.make_tiny_model import make_tiny_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory
