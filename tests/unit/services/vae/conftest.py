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


@pytest.fixture(scope="session")
def loaded_worker(model_directory: Path) -> VaeWorker:
    torch.set_num_threads(1)
    return VaeWorker(VaeConfig(model_directory, device="cpu"))


@pytest.fixture
def worker(loaded_worker: VaeWorker) -> Iterator[VaeWorker]:
    """A worker in its phase, without sessions."""
    loaded_worker.weights.enter()
    yield loaded_worker
    for session_id in loaded_worker.session_ids():
        loaded_worker.close_session(session_id)
    loaded_worker.weights.leave()
