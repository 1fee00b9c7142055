"""Adapters: what their files hold, by format, module by module, and what is wrong with it.

What they are to be used with is not known here: `services/checkpoints/adapter_registry.py` names them and fits them to
a DiT.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.adapter_formats import PEFT, RAVEN, Format, Keys, is_adapter, read_keys, refusal
from services.checkpoints.header import open_file, read_exactly, strict_json
from services.checkpoints.key_map import Rule, summary
from services.checkpoints.layout import Recognition
from services.checkpoints.peft_config import FILE_NAME, MAX_ALPHA, PeftConfig, is_alpha, read_peft_config
from services.checkpoints.source import Checkpoint, StoredTensor, read_json_object

PEFT_WEIGHTS = "adapter_model.safetensors"
"""The weights of a folder that PEFT has written; its configuration lies beside them."""

_DIFFUSERS_CONFIG = "lora_adapter_metadata"
"""Metadata in which diffusers keeps PEFT's configuration of each model of a pipeline, as one JSON object."""
_PRUNED_INPUTS = {8, 64}
"""Inputs of the AdaLN projections of pruned DiTs (docs/reference/h3-model.md §3.2)."""
_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<f", "I64": "<q", "I32": "<i"}
"""Dtypes of alphas, as `struct` reads them; of BF16 the upper half of a F32."""
_PARTITIONS = {
    "fl2va": {"fl2va", "fl2v", "t2va", "t2v", "i2va", "i2v"},
    "ref2va": {"ref2va", "ref2v", "r2va", "r2v"},
}
"""Tasks by the DiT weights that do them, as file names tell them."""


@dataclass(frozen=True)
class AdapterModule:
    """The update of one module: `alpha / rank * up @ down`."""

    name: str
    """The module as the file names it, without its format's prefix."""
    rule: Rule
    """The published modules that it stands for, and how the rows of `up` become theirs."""
    down: StoredTensor
    """"A", `[rank, in]`."""
    up: StoredTensor
    """"B", `[out, rank]`."""
    alpha: float
    """Alpha."""

    @property
    def rank(self) -> int:
        """Rank of the update."""
        return self.down.info.shape[0]


def recognise(checkpoint: Checkpoint) -> Recognition | None:
    """The format of an adapter; None if the checkpoint is something else."""
    if not is_adapter(checkpoint.tensors):
        return None
    if refused := refusal(checkpoint.tensors):
        return Recognition("adapter", *refused)
    keys = read_keys(checkpoint.tensors)
    name = keys.format.name
    if pruned := _adaln_inputs(checkpoint, keys) & _PRUNED_INPUTS:
        reason = f"was trained on a pruned DiT, whose AdaLN projections have {min(pruned)} inputs, and fits no full one"
        return Recognition("adapter", name, reason)
    match partition_of(checkpoint, keys.format):
        case "fl2va":
            return Recognition("adapter", name)
        case "ref2va":
            note = "It was trained on the ref2va DiT."
        case _:
            note = "Whether it was trained on the fl2va or the ref2va DiT is not told."
    return Recognition("adapter", name, notes=(f"{note} On the other one it would attach and harm the picture.",))


def file_problems(checkpoint: Checkpoint, recognition: Recognition) -> list[str]:
    """What headers alone show to be wrong with an adapter, in phrases."""
    keys = read_keys(checkpoint.tensors)
    faults = _problems(checkpoint, keys)
    if keys.unknown_modules:
        faults.append(
            f"{len(keys.unknown_modules)} modules that the DiT does not have: {summary(keys.unknown_modules)}"
        )
    return faults


def read_modules(checkpoint: Checkpoint) -> tuple[Format, tuple[AdapterModule, ...], tuple[str, ...]]:
    """Format and modules of an adapter that is not refused, and the modules it names that no DiT has.

    Of the tensors only alphas are read. Raises CheckpointError that lists everything that is wrong with the file.
    """
    keys = read_keys(checkpoint.tensors)
    if faults := _problems(checkpoint, keys):
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(faults)}")
    stated = _stated(checkpoint, keys.format)
    own = _read_scalars(
        {module: checkpoint.tensors[sides["alpha"]] for module, sides in keys.modules.items() if "alpha" in sides}
    )
    if wrong := [module for module, alpha in own.items() if not is_alpha(alpha)]:
        raise CheckpointError(
            f"{checkpoint.path}: {len(wrong)} alphas that are no number above 0 and up to {MAX_ALPHA:g}: "
            f"{summary(wrong)}"
        )
    modules = []
    for module, sides in keys.modules.items():
        down, up, rule = checkpoint.tensors[sides["down"]], checkpoint.tensors[sides["up"]], keys.format.rule(module)
        alpha = own.get(module) or stated.alpha(module, down.info.shape[0])
        assert rule is not None, module  # or it would be among the unknown
        assert alpha is not None, module  # or it would be a problem
        modules.append(AdapterModule(module, rule, down, up, alpha))
    return keys.format, tuple(modules), keys.unknown_modules


def partition_of(checkpoint: Checkpoint, format_: Format) -> str:
    """The DiT weights that an adapter was trained on by its format or its file's name; empty if they do not tell."""
    if format_.partition:
        return format_.partition
    words = set(re.split(r"[^a-z0-9]+", given_name(checkpoint.headers[0].path).lower()))
    (partition, *others) = [name for name, tasks in _PARTITIONS.items() if tasks & words] or [""]
    return "" if others else partition


def given_name(path: Path) -> str:
    """The name that somebody gave an adapter's file: what PEFT writes has that of its folder."""
    return path.absolute().parent.name if path.name == PEFT_WEIGHTS else path.stem


@dataclass(frozen=True)
class _Stated:
    """What an adapter's file says of all its modules."""

    format: Format
    """Its format."""
    uniform: float | None
    """Alpha of every module by the file's metadata."""
    config: PeftConfig | None
    """PEFT's configuration."""

    def alpha(self, module: str, rank: int) -> float | None:
        """Alpha of a module that has none of its own; None if the file must state one and does not."""
        if self.uniform is not None:
            return self.uniform
        if self.config is not None and (alpha := self.config.alpha_of(self._path(module))) is not None:
            return alpha
        return float(rank) if self.format.default_alpha == "rank" else self.format.default_alpha

    def rank(self, module: str) -> float | None:
        """Rank of a module by the configuration."""
        return None if self.config is None else self.config.rank_of(self._path(module))

    def _path(self, module: str) -> str:
        """The module as PEFT's patterns name it, below what it has wrapped."""
        return f"{self.format.prefix.removeprefix(PEFT.prefix)}{module}" if self.format is RAVEN else module


def _problems(checkpoint: Checkpoint, keys: Keys) -> list[str]:
    """Everything that is wrong with the file itself, whatever it is used with."""
    try:
        stated, faults = _stated(checkpoint, keys.format), keys.problems
    except (ValueError, CheckpointError) as error:
        stated, faults = None, [*keys.problems, str(error)]
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for module, sides in keys.modules.items():
        tensors = {side: checkpoint.tensors[key].info for side, key in sides.items()}
        down, up, alpha = tensors["down"].shape, tensors["up"].shape, tensors.get("alpha")
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or 0 in (*down, *up):
            wrong[f"of A {list(down)} and B {list(up)}, which are no pair"].append(module)
            continue
        for info in (tensors["down"], tensors["up"]):
            if info.dtype not in keys.format.data_types:
                wrong[f"{info.dtype}, expected {' or '.join(keys.format.data_types)}"].append(module)
        if alpha is not None and (alpha.num_elements != 1 or alpha.dtype not in _SCALARS):
            wrong[f"whose alpha is {alpha.dtype} {list(alpha.shape)}, which is no number"].append(module)
        if stated is None:
            continue
        if (rank := stated.rank(module)) not in (None, down[0]):
            wrong[f"of rank {down[0]}, where the PEFT configuration says {rank}"].append(module)
        if alpha is None and stated.alpha(module, down[0]) is None:
            wrong[f"without an alpha, in the metadata or a {FILE_NAME} beside {PEFT_WEIGHTS}"].append(module)
    return faults + [f"{len(modules)} {what}: {summary(modules)}" for what, modules in wrong.items()]


def _stated(checkpoint: Checkpoint, format_: Format) -> _Stated:
    """What the metadata and the configuration say. Raises ValueError or CheckpointError for what cannot be used."""
    metadata = checkpoint.metadata
    uniform = None
    if setting := next((name for name in format_.alpha_settings if name in metadata), None):
        uniform = number(metadata[setting])
        if not is_alpha(uniform):
            rule = f"no number above 0 and up to {MAX_ALPHA:g}"
            raise ValueError(f"its metadata says {setting} {metadata[setting]!r:.40}, which is {rule}")
    try:
        config = _config(checkpoint, format_, is_needed=uniform is None)
        return _Stated(format_, uniform, None if config is None else read_peft_config(config))
    except ValueError as error:
        raise ValueError(f"its PEFT configuration {error}") from None


def _config(checkpoint: Checkpoint, format_: Format, *, is_needed: bool) -> dict[str, Any] | None:
    """PEFT's configuration: from the metadata, where diffusers puts it, or from beside the weights, where PEFT does.

    Beside RAVEN's file any will do, so it is read only if it is needed.
    """
    path = checkpoint.headers[0].path
    if format_.name == "diffusers" and _DIFFUSERS_CONFIG in checkpoint.metadata:
        values = strict_json(checkpoint.metadata[_DIFFUSERS_CONFIG].encode())
        if not isinstance(values, dict):
            raise ValueError("is no JSON object")
        own = {name: value for name, value in values.items() if name.startswith(format_.prefix)}
        return {name.removeprefix(format_.prefix): value for name, value in own.items()}
    if (format_ is PEFT and path.name == PEFT_WEIGHTS) or (format_ is RAVEN and is_needed):
        beside = path.with_name(FILE_NAME)
        return read_json_object(beside) if os.path.lexists(beside) else None
    return None


def number(text: str) -> float:
    """What a string in metadata says; NaN if that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _adaln_inputs(checkpoint: Checkpoint, keys: Keys) -> set[int]:
    """Inputs of the AdaLN projections that an adapter changes."""
    inputs = set()
    for module, sides in keys.modules.items():
        rule, shape = keys.format.rule(module), checkpoint.tensors[sides["down"]].info.shape
        if rule is not None and rule.targets[0].endswith(("adaln_proj.linear", "norm_out.linear")) and shape:
            inputs.add(shape[-1])
    return inputs


def _read_scalars(tensors: Mapping[str, StoredTensor]) -> dict[str, float]:
    """Values of tensors of one element each. Raises CheckpointError."""
    values = {}
    for path, group in itertools.groupby(tensors.items(), lambda item: item[1].path):
        with open_file(path) as fd:
            for name, tensor in group:
                data = read_exactly(fd, tensor.info.num_bytes, tensor.info.start, path)
                if tensor.info.dtype == "BF16":
                    data = b"\0\0" + data
                (values[name],) = struct.unpack(_SCALARS[tensor.info.dtype], data)
    return values
