"""Files that a finished job leaves: what they are called, who writes them, which are kept unless a request says so."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from core.request import Violation

STREAM = "stream.mp4"
"""The media stream as it was sent, byte for byte."""
FINAL = "final.mp4"
"""The stream's pictures with the sound normalised over the whole clip, for players that want a plain file."""
FRAMES = "frames.mkv"
"""The decoded frames, lossless."""
SOUND = "audio.flac"
"""The decoded sound before any normalisation."""
LATENTS = "latents.safetensors"
"""What the DiT made."""

REFINED = "refined.mp4"
"""The clip with its refined sound, normalised over the whole clip; the video packets are the source's, where the video
has not moved."""
REFINED_SOUND = "refined.flac"
"""The refined sound before any normalisation."""
REFINED_LATENTS = "refined-latents.safetensors"
"""The latents after refinement."""
COMPARISON = "refine-compare.png"
"""Spectrograms of the sound before, of the refined sound, and of the exact result where there is one."""

TIMELINE = "timeline.json"
"""When each phase began and each fragment left."""
PROVENANCE = "provenance.json"
"""How the clip came to be: request, plan, model files, versions, figures, checksums of the other artifacts."""

WORKER_ARTIFACTS = {
    STREAM: "video/mp4",
    FINAL: "video/mp4",
    FRAMES: "video/x-matroska",
    SOUND: "audio/flac",
    LATENTS: "application/octet-stream",
}
"""Those that the VAE worker writes, with their media types."""

SERVER_ARTIFACTS = {TIMELINE: "application/json", PROVENANCE: "application/json"}
"""Those that the orchestrator writes once the others are there, in this order."""

REFINED_ARTIFACTS = {
    REFINED: "video/mp4",
    REFINED_SOUND: "audio/flac",
    REFINED_LATENTS: "application/octet-stream",
    COMPARISON: "image/png",
}
"""Those of a refinement, with their media types: all are kept, the last where two results are compared."""

ARTIFACTS = {**WORKER_ARTIFACTS, **SERVER_ARTIFACTS}
"""All that a request may name, with their media types."""

DEFAULT_ARTIFACTS = tuple(name for name in ARTIFACTS if name != FRAMES)
"""What is kept where a request names nothing. Lossless frames are left out: they weigh hundreds of megabytes where the
others together weigh some tens."""


def artifact_violations(names: Sequence[str]) -> Iterator[Violation]:
    """What is wrong with the names of a request."""
    for index, name in enumerate(names):
        field = f"artifacts[{index}]"
        if name not in ARTIFACTS:
            nearest = difflib.get_close_matches(name, ARTIFACTS, n=1)
            hint = f"the nearest is {nearest[0]}; " if nearest else ""
            description = f"{field} is {name!r}; {hint}there are {', '.join(ARTIFACTS)}"
            yield Violation(field, description, "UNKNOWN_ARTIFACT")
        elif name in names[:index]:
            yield Violation(field, f"{field} is {name!r}, which is named twice; name it once", "REPEATED_ARTIFACT")
