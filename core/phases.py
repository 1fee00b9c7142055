"""The phases of a job and the moves between them."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What a job is doing. The value is the name on the wire, without its prefix."""

    QUEUED = "queued"
    ENCODE = "encode"
    PREFILL = "prefill"
    DENOISE = "denoise"
    COMMIT = "commit"
    DECODE = "decode"
    FINISH = "finish"
    REFINE = "refine"


class Worker(Enum):
    """Who may hold the device."""

    TEXT_ENCODER = "text_encoder"
    DIT = "dit"
    VAE = "vae"


HOLDER: dict[Phase, Worker | None] = {
    Phase.QUEUED: None,
    Phase.ENCODE: Worker.TEXT_ENCODER,
    Phase.PREFILL: Worker.DIT,
    Phase.DENOISE: Worker.DIT,
    Phase.COMMIT: Worker.DIT,
    Phase.DECODE: Worker.VAE,
    Phase.FINISH: None,
    Phase.REFINE: Worker.DIT,
}
"""Whose weights a phase needs on the device."""

MOVES: dict[Phase, frozenset[Phase]] = {
    # A prompt seen before skips the encoder; a job that only refines has no text to prefill. One that is taken up again
    # begins with what it has yet to do.
    Phase.QUEUED: frozenset({Phase.ENCODE, Phase.PREFILL, Phase.DECODE, Phase.FINISH, Phase.REFINE}),
    Phase.ENCODE: frozenset({Phase.ENCODE, Phase.PREFILL, Phase.REFINE}),  # again for the negative prompt
    Phase.PREFILL: frozenset({Phase.DENOISE, Phase.COMMIT}),  # a commit puts back what a lost worker had
    # Chunk 0 completes no frame: it waits for chunk 1. Nothing is decoded twice for a chunk that is sampled again.
    Phase.DENOISE: frozenset({Phase.DECODE, Phase.COMMIT, Phase.FINISH}),
    # The tail and dense clips: no commit. After the chunks that were finished before: what follows them is sampled.
    Phase.DECODE: frozenset({Phase.DECODE, Phase.COMMIT, Phase.FINISH, Phase.ENCODE, Phase.PREFILL}),
    Phase.COMMIT: frozenset({Phase.DENOISE, Phase.COMMIT}),
    Phase.FINISH: frozenset({Phase.ENCODE, Phase.REFINE}),  # the clip has been delivered: its sound may be refined
    Phase.REFINE: frozenset({Phase.DECODE}),
}
"""Allowed successors of each phase."""
