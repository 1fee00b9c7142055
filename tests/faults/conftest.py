from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Server, start_server, stop_server


@pytest.fixture(scope="session")
def attacked_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server that tests send anything to; it must live through all of it."""
    running = start_server(tiny_model, tmp_path_factory.mktemp("attacked"), "--max-queued-jobs", "2")
    yield running
    assert running.process.poll() is None, "the server has died"
    assert stop_server(running) == 0
