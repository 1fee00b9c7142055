from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.vae.config import VaeConfig
from services.vae.worker import VaeWorker
from tests.vae_model import write_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("vae_model"))


@pytest.fixture
def worker(model_directory: Path) -> Iterator[VaeWorker]:
    """A worker in its phase."""
    torch.set_num_threads(1)
    made = VaeWorker(VaeConfig(model_directory, device="cpu"))
    made.weights.enter()
    yield made
    for session_id in made.session_ids():
        made.close_session(session_id)
    made.weights.leave()
