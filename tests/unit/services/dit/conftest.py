"""What the DiT's unit tests share: the golden vectors' model, whole rollouts in milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from h3stream.request import ClipSpec
from services.dit.config import DitConfig
from services.dit.worker import DitWorker
from tests.raven_vectors import write_model_directory

TEXT_DIM = 64


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`transformer/` and `adapters/`; tests must not write to it."""
    return write_model_directory(tmp_path_factory.mktemp("dit") / "model")


@pytest.fixture
def worker(model_directory: Path) -> DitWorker:
    """A worker in float32, its weights on the device."""
    worker = DitWorker(DitConfig(model_directory, device="cpu", compute_dtype="float32"))
    worker.weights.enter()
    return worker


@pytest.fixture
def context() -> torch.Tensor:
    """Hidden states of a prompt of five tokens, `[5, 64]`."""
    return torch.randn(5, TEXT_DIM, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def token_tags() -> torch.Tensor:
    return torch.tensor([1, 1, 0, 1, 1])


@pytest.fixture
def clip() -> ClipSpec:
    """Five chunks, of which the window drops some."""
    return ClipSpec(
        num_frames=73,
        width=64,
        height=32,
        steps=2,
        video_shift=12.0,
        audio_shift=3.0,
        sink=1,
        window=1,
        kv_storage="gpu",
        seed=7,
    )


@pytest.fixture
def dense_clip(clip: ClipSpec) -> ClipSpec:
    """The same five chunks, sampled as a whole."""
    return dataclasses.replace(clip, mode="dense", sink=0, window=None, steps=3)
