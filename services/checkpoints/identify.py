"""Which part of the model a checkpoint is: every part is asked whether it knows the keys."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from h3stream.errors import CheckpointError
from services.checkpoints import adapters, audio_vae, dit, text_encoder, video_vae
from services.checkpoints.layout import NAMES, Component, Recognition
from services.checkpoints.source import Checkpoint, open_checkpoint


class PartModule(Protocol):
    """What each part's module offers."""

    def recognise(self, checkpoint: Checkpoint) -> Recognition | None:
        """What the checkpoint is; None if it is something else."""

    def file_problems(self, checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
        """What headers alone show to be wrong with a checkpoint, in sentences.

        recognition: the part's own, which does not refuse it: of what is refused nothing else matters.
        """


PARTS: MappingProxyType[Component, PartModule] = MappingProxyType(
    {
        "dit": dit,
        "video_vae": video_vae,
        "audio_vae": audio_vae,
        "text_encoder": text_encoder,
        "adapter": adapters,
    }
)
"""The modules by the part that they know."""


def identify(checkpoint: Checkpoint) -> Recognition | None:
    """What a checkpoint is, by its keys, dtypes, metadata and configuration; None if it is no part of the model."""
    found = (part.recognise(checkpoint) for part in PARTS.values())
    return next((recognition for recognition in found if recognition is not None), None)


def expect(path: Path, component: Component) -> tuple[Checkpoint, Recognition]:
    """Opens the checkpoint of a part.

    Raises CheckpointError for files that cannot be read, another part of the model, a variant that is not supported and
    anything that is not recognised.
    """
    checkpoint = open_checkpoint(path)
    recognition = identify(checkpoint)
    if recognition is None:
        named = (checkpoint.config or {}).get("_class_name")
        raise CheckpointError(
            f"{path} is not recognised as any part of the model; expected the {NAMES[component]}"
            + (f", and its config.json names the class {named!r:.80}" if isinstance(named, str) else "")
        )
    if recognition.component != component:
        raise CheckpointError(
            f"{path} is the {NAMES[recognition.component]} ({recognition.layout} layout), not the {NAMES[component]}"
        )
    if recognition.refusal is not None:
        raise CheckpointError(f"{path} {recognition.refusal}")
    return checkpoint, recognition
