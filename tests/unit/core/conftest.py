from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

RAVEN = Path(__file__).parents[2] / "fixtures" / "raven"


@pytest.fixture(scope="session")
def layout() -> Any:
    """Golden chunk ranges, emission tables and sigma grids of RAVEN streaming."""
    return json.loads((RAVEN / "layout.json").read_text())


@pytest.fixture(scope="session")
def positions() -> Any:
    """Golden positions, float64."""
    return load_file(RAVEN / "layout_positions.safetensors")
