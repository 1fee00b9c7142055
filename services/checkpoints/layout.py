"""What a set of weights is: which part of the model, in which of the published layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Component = Literal["dit", "video_vae", "audio_vae", "text_encoder", "adapter"]
Layout = Literal["diffusers", "official", "comfyui", "transformers"]

NAMES: dict[Component, str] = {
    "dit": "DiT",
    "video_vae": "video VAE",
    "audio_vae": "audio VAE",
    "text_encoder": "text encoder",
    "adapter": "adapter",
}
"""What the parts are called in messages."""


@dataclass(frozen=True)
class Recognition:
    """What a checkpoint was recognised as, from its keys and dtypes alone."""

    component: Component
    """The part of the model."""
    layout: str
    """Its `Layout`, or the format of an adapter; of a refused variant the name people know it by."""
    refusal: str | None = None
    """Why it cannot be used, as a clause that goes on from the file's name; None if it can."""
    notes: tuple[str, ...] = ()
    """What its user should know, in sentences."""
