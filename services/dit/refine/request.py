"""What a call that refines a clip must bring, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor

from core.latents_file import latent_shapes
from core.prompt import MAX_PROMPT_TOKENS
from core.refine import RefineValues, refine_sigmas, refine_violations
from core.request import clip_violations
from h3stream.adapters import AdapterChoice
from h3stream.errors import InvalidRequestError
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec
from services.common.refusal import refuse
from services.common.tensors import ExpectedTensor, TensorAssembler

FIELD = "spec"
"""What the names of the fields of a refinement begin with."""


def filled_refinement(clip: ClipSpec, spec: RefineSpec, strengths: Mapping[str, float]) -> RefineSpec:
    """A refinement with the seed and the strengths that it leaves open filled in.

    strengths: of the registry's adapters, where none is asked for.
    Raises InvalidRequestError, with every violation, for one that cannot be of the clip.
    """
    refuse(clip_violations(clip))
    filled = dataclasses.replace(
        spec,
        seed=clip.seed if spec.seed is None else spec.seed,
        adapters=tuple(
            AdapterChoice(name, strengths.get(name, 1.0) if strength is None else strength)
            for name, strength in ((choice.name, choice.strength) for choice in spec.adapters)
        ),
    )
    refuse(refine_violations(cast(RefineValues, filled), clip.num_frames, FIELD))
    check_adapter_names((choice.name for choice in filled.adapters), strengths)
    try:
        refine_sigmas(spec.steps, spec.audio_denoise, clip.video_shift, clip.audio_shift, spec.scheduler)
    except ValueError as error:
        raise InvalidRequestError(f"{FIELD}: {error}") from error
    return filled


def check_adapter_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises InvalidRequestError for adapters that are not in the registry."""
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(known) or "none"
        raise InvalidRequestError(f"there is no adapter {', '.join(map(repr, unknown))}; there are {listed}")


def refine_tensors(clip: ClipSpec, spec: RefineSpec, text_dim: int) -> TensorAssembler:
    """Takes the tensors of a refinement that was checked."""
    expected: dict[str, ExpectedTensor] = {
        name: ((torch.float32,), shape) for name, shape in latent_shapes(clip).items()
    }
    for prefix in ("", "negative_") if spec.cfg != 1 else ("",):
        expected |= text_tensors(text_dim, prefix)
    return TensorAssembler(expected)


def text_tensors(text_dim: int, prefix: str = "") -> dict[str, ExpectedTensor]:
    """What the hidden states of a prompt and the tags of its tokens must be.  prefix: of their names."""
    num_tokens = range(1, MAX_PROMPT_TOKENS + 1)
    return {
        f"{prefix}context": ((torch.float32, torch.bfloat16), (num_tokens, text_dim)),
        f"{prefix}token_tags": ((torch.int64,), (num_tokens,)),
    }


def check_finite(**tensors: Tensor) -> None:
    """Raises InvalidRequestError for the first tensor that holds infinities or what is no number."""
    for name, tensor in tensors.items():
        if num_wrong := int((~torch.isfinite(tensor)).sum()):
            raise InvalidRequestError(f"tensor {name!r} holds {num_wrong} values that are not finite")
