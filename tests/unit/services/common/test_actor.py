"""The actor without Ray: a plain object with the same methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3stream.errors import CheckpointError
from services.common.actor import WorkerActor
from services.text_encoder.config import TextEncoderConfig


async def test_a_worker_that_cannot_be_built_is_told_when_it_is_started_and_can_be_stopped(tmp_path: Path) -> None:
    # Ray prints a traceback of what making the actor raises; what a method raises goes to its caller alone.
    for folder in ("text_encoder", "tokenizer"):
        (tmp_path / folder).mkdir()
    actor = WorkerActor("services.text_encoder", TextEncoderConfig(model_directory=tmp_path))
    with pytest.raises(CheckpointError, match="text_encoder holds no safetensors file"):
        await actor.start("127.0.0.1:0")
    await actor.stop()
