"""The two halves of the training, each for a process of its own: neither needs anything of the other.

model: directory in which the parts are written.  work: where checkpoints lie.  Libraries are imported where they are
needed: each process loads only its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_FINISHED = "finished-"
"""Beginning of the name of an empty file that says that a part lies complete in the scratch model."""


def text_and_dit(model: Path, work: Path, seed: int, device: str) -> None:
    """Trains the text encoder, then the DiT, which learns from what the former makes of prompts."""
    import torch

    from tools.train_tiny.lessons import Lessons
    from tools.train_tiny.text_encoder import train_text_encoder
    from tools.train_tiny.transformer import train_transformer

    torch.set_num_threads(1)  # the other core has its own work, and sums keep their order
    _once(work, "text-encoder", lambda: train_text_encoder(model, work, seed))
    _once(work, "transformer", lambda: train_transformer(model, work, seed, Lessons(model, seed), torch.device(device)))


def autoencoders(model: Path, work: Path, seed: int) -> None:
    """Makes the autoencoder of the sound and trains that of the video."""
    import torch

    from tools.train_tiny.audio_vae import write_audio_vae
    from tools.train_tiny.video_vae import train_video_vae

    torch.set_num_threads(1)
    _once(work, "audio-vae", lambda: write_audio_vae(model / "audio_vae"))
    _once(work, "video-vae", lambda: train_video_vae(model / "vae", work, seed))


def _once(work: Path, name: str, make: Callable[[], None]) -> None:
    """Makes a part unless an earlier run has."""
    mark = work / f"{_FINISHED}{name}"
    if not mark.exists():
        make()
        mark.touch()
