"""The audio VAE: how its files are recognised and checked."""

from __future__ import annotations

from services.checkpoints.layout import Recognition
from services.checkpoints.source import Checkpoint


def recognise(checkpoint: Checkpoint) -> Recognition | None:
    """What the checkpoint is; None if it is something else."""
    return None


def file_problems(checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
    """What headers alone show to be wrong, in sentences."""
    return []
