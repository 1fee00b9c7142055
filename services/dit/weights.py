"""The DiT's files into diffusers' module tree: every tensor accounted for, then one by one to where it stays."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from h3stream.errors import CheckpointError
from h3stream.job import ModelPart
from services.checkpoints import dit
from services.checkpoints.dit import ISLANDS
from services.checkpoints.dit_modules import INV_FREQ
from services.checkpoints.model_files import DitFiles, open_dit
from services.common.parts import model_part
from services.common.weights import load_parameters, read_tensor

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel

log = logging.getLogger(__name__)

_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_INV_FREQ_TOLERANCE = 1e-5
"""Relative. Powers differ by some 1e-7 between machines, and by 1e-2 if the rotary base is larger by 1 %."""


class TransformerFiles(DitFiles):
    """A DiT on the disk, checked as far as that goes without its weights."""

    @property
    def part(self) -> ModelPart:
        """What a worker tells about them."""
        tensors, rules = self.checkpoint.tensors, self.contents.key_map
        return model_part("dit", self.layout, self.checkpoint, (tensors[key] for key in rules if rules[key].targets))

    def load(self, compute_dtype: str) -> MiniMaxH3Transformer3DModel:
        """The model in host memory, ready for inference.

        compute_dtype: "float32", "bfloat16" or "auto" (as stored) for everything but the float32 islands.
        At no time is there more in memory than the model and one stored tensor.
        Raises CheckpointError if the files cannot be read, or their dtypes are mixed and none is asked for.
        """
        from diffusers import MiniMaxH3Transformer3DModel  # five seconds of import, only needed by whoever loads

        stack_dtype = self._stack_dtype(compute_dtype)
        with torch.device("meta"):
            model = MiniMaxH3Transformer3DModel(**dataclasses.asdict(self.contents.architecture))
        parameters = load_parameters(
            self.checkpoint.tensors,
            self.contents.key_map,
            lambda target: torch.float32 if target.startswith(ISLANDS) else stack_dtype,
        )
        model.load_state_dict(parameters, strict=True, assign=True)
        # Never loaded: computed here from the configuration, in float32.
        model.rope = type(model.rope)(model.config.rope_freq_dim, model.config.rope_theta)
        return model.requires_grad_(False).eval()

    def _stack_dtype(self, compute_dtype: str) -> torch.dtype | None:
        """The dtype of the block stack; None where it stays as it is stored."""
        if compute_dtype != "auto":
            return _COMPUTE_DTYPES[compute_dtype]
        stored = dit.stack_dtypes(self.checkpoint, self.layout)
        if len(stored) > 1 or "F16" in stored:
            raise CheckpointError(
                f"{self.checkpoint.path}: the block stack is stored in {', '.join(stored)}, so the compute dtype "
                "cannot be taken from it; set compute_dtype to bfloat16 or float32"
            )
        return None


def open_transformer(path: Path, layout: str = "auto") -> TransformerFiles:
    """The files of a DiT, checked by their headers.

    path: a file or folder.  layout: "diffusers", "official", "comfyui" or "auto".
    Raises CheckpointError for another part of the model, for a variant that is not taken, and for everything that is
    wrong with the tensors, all of it in one error; ConfigError for a layout that contradicts them or must be given.
    """
    opened = open_dit(path, layout)
    log.info("%s is read in the %s layout", path, opened.layout)
    for note in opened.notes:
        log.warning("%s: %s", path, note)
    files = TransformerFiles(opened.checkpoint, opened.layout, opened.contents, opened.notes)
    _check_inv_freq(files)
    return files


def load_transformer(path: Path, compute_dtype: str, layout: str = "auto") -> MiniMaxH3Transformer3DModel:
    """The DiT of a file or folder in host memory. Arguments and errors: `open_transformer`, `TransformerFiles.load`."""
    return open_transformer(path, layout).load(compute_dtype)


def _check_inv_freq(files: TransformerFiles) -> None:
    """Stored frequencies must be those that are computed: else the model was trained with another rotary base."""
    stored = dit.stored_inv_freq(files.checkpoint)
    if stored is None:
        return
    expected = files.contents.architecture.inv_freq()
    found = read_tensor(INV_FREQ, stored).tolist()
    for index, (value, right) in enumerate(zip(found, expected, strict=True)):
        if not abs(value - right) <= _INV_FREQ_TOLERANCE * right:  # NaN is no match either
            raise CheckpointError(
                f"{files.checkpoint.path}: {INV_FREQ}[{index}] is {value:.6g}, expected {right:.6g}: the model was "
                f"trained with another rotary base than {files.contents.architecture.rope_theta:g}"
            )
