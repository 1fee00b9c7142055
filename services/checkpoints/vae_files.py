"""What the files of both VAEs have in common: parts that decoding never reads, statistics, and their configuration.

Published single files carry no configuration, and the official repository's `config.json` tells the latent statistics
but not the architecture. So the published class is built with, in this order:

1. the diffusers `config.json` in the weights' own folder, or beside a single file;
2. the model directory's, if it asks for just the shapes that the file has: else it belongs to another model;
3. what the shapes in the file say, and the class's published defaults for what they do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.header import BITS
from services.checkpoints.key_map import KeyMap, Rule, Shape, problems
from services.checkpoints.quantisation import quantisation_mark
from services.checkpoints.source import Checkpoint, StoredTensor, find_config

STATISTICS = ("latents_mean", "latents_std")
"""Latent statistics: keys of ComfyUI's files, and fields of configurations."""
MAX_VALUE = 1 << 16
"""Largest integer in a configuration; the largest published one is the sampling rate, 32 000."""
MAX_LENGTH = 16
"""Most entries of a list in a configuration; the longest published one has 7."""

_QUANTISED_DTYPES = frozenset(BITS) - {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}


@dataclass(frozen=True)
class PublishedClass:
    """A published autoencoder class, as configurations speak of it."""

    name: str
    """`_class_name` of its diffusers configurations."""
    official_names: tuple[str, ...]
    """`_class_name`s that the official repository gives the same weights; no architecture is told under them."""
    official_fields: tuple[str, ...]
    """Arguments that official configurations tell under the same names."""
    defaults: Mapping[str, Any]
    """Arguments of the class without the latent statistics, with their published values."""
    max_values: Mapping[str, int]
    """Largest values of arguments that count modules."""
    parallel: tuple[tuple[str, ...], ...]
    """Arguments that are lists of one length."""


@dataclass(frozen=True)
class ConfigFile:
    """A `config.json` that was found for some weights."""

    path: Path
    """The file."""
    values: dict[str, Any]
    """What it holds."""
    is_own: bool
    """Whether it lies with the weights, and not in a model directory that lends it to them."""

    def names(self, *class_names: str) -> bool:
        """Whether its class is one of these."""
        return self.values.get("_class_name") in class_names


@dataclass(frozen=True)
class Architecture:
    """What is known about a VAE before its weights are read."""

    config: dict[str, Any]
    """Arguments of the published class."""
    source: Path | None
    """The `config.json` they are from; None if they are from the shapes in the weight file."""
    files: tuple[ConfigFile, ...]
    """Configurations that speak for these weights, for instance of their latent statistics; own ones first."""


def config_files(checkpoint: Checkpoint, directories: Iterable[Path] = ()) -> tuple[ConfigFile, ...]:
    """The configurations of a checkpoint's own folder, then those of `directories`. Raises CheckpointError."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    places = [(folder, True), *((directory, False) for directory in directories)]
    return tuple(
        ConfigFile(place / "config.json", values, is_own)
        for directory, is_own in places
        for place in _with_parent(directory)
        if (values := find_config(place)) is not None
    )


def choose(
    published: PublishedClass,
    checkpoint: Checkpoint,
    files: tuple[ConfigFile, ...],
    fits: Callable[[dict[str, Any]], bool],
    derive: Callable[[], dict[str, Any]],
) -> Architecture:
    """The architecture of some weights by the rule of this module.

    files: found for the checkpoint.  fits: whether a configuration asks for the shapes in its files.
    derive: arguments that those shapes show; raises CheckpointError if they do not show enough.
    Raises CheckpointError for configurations with impossible values, and what `derive` raises if there is nothing else.
    """
    official = [file for file in files if file.names(*published.official_names)]
    diffusers = [file for file in files if file.names(published.name)]
    for file in diffusers:
        config = complete(published, file)
        if file.is_own or fits(config):
            return Architecture(config, file.path, tuple(one for one in files if one is file or one in official))
    try:
        derived = derive()
    except CheckpointError:
        if not diffusers:
            raise
        # The model directory's does not fit; what does not will be said with all else that is wrong.
        return Architecture(complete(published, diffusers[0]), diffusers[0].path, tuple(official))
    for file in reversed(official):  # the first has the last word
        derived |= {name: file.values[name] for name in published.official_fields if name in file.values}
    config = complete(published, ConfigFile(checkpoint.path, derived, is_own=True))
    return Architecture(config, None, tuple(official))


def complete(published: PublishedClass, file: ConfigFile) -> dict[str, Any]:
    """All arguments of the class: the file's, and the published defaults where it is silent.

    Raises CheckpointError for values that are not of their argument's type, too large to be meant, or lists of unlike
    lengths.
    """
    told = {name: _checked(published, name, file) for name in published.defaults if name in file.values}
    config = {**published.defaults, **file.values, **told}
    for names in published.parallel:
        if len({len(config[name]) for name in names}) > 1:
            raise CheckpointError(f"{file.path}: {' and '.join(names)} must be of one length")
    return config


def _checked(published: PublishedClass, name: str, file: ConfigFile) -> Any:
    value, default = file.values[name], published.defaults[name]
    limit = published.max_values.get(name, MAX_VALUE)
    if not _is_like(value, default, limit):
        raise CheckpointError(f"{file.path}: {name} is {value!r:.80}; it must be {_kind(default, limit)}")
    return value


def read_map(key_map: KeyMap, unused: Iterable[str]) -> dict[str, Rule]:
    """The rules of what decoding reads.  unused: modules of the class, at its top, that only encoding needs."""
    skipped = frozenset(unused)
    return {key: rule for key, rule in key_map.items() if rule.targets and _module(rule) not in skipped}


def key_problems(
    checkpoint: Checkpoint, key_map: KeyMap, shapes: Mapping[str, Shape], dtypes: tuple[str, ...], unused: Iterable[str]
) -> list[str]:
    """What is wrong with the keys, shapes and dtypes. A module that only encoding needs may be absent as a whole."""
    present = {_module(key_map[key]) for key in checkpoint.tensors if key in key_map and key_map[key].targets}
    absent = set(unused) - present
    expected = {key: rule for key, rule in key_map.items() if not rule.targets or _module(rule) not in absent}
    return problems(checkpoint.tensors, expected, shapes, lambda target: dtypes)


def class_problems(checkpoint: Checkpoint, published: PublishedClass) -> list[str]:
    """Whether a folder's `config.json` is that of another class."""
    named = None if checkpoint.config is None else checkpoint.config.get("_class_name")
    if checkpoint.config is None or named in (published.name, *published.official_names):
        return []
    return [f"config.json names the class {named!r:.80}, expected {published.name!r}"]


def quantisation(checkpoint: Checkpoint) -> str | None:
    """What shows that the weights are quantised, None if they are not."""
    dtypes = {tensor.info.dtype for tensor in checkpoint.tensors.values()} & _QUANTISED_DTYPES
    marks = set(filter(None, map(quantisation_mark, checkpoint.tensors)))
    return ", ".join((*sorted(dtypes), *sorted(marks))) or None


def shape_of(tensors: Mapping[str, StoredTensor], key: str) -> Shape | None:
    """Shape of a tensor; None if it is not there."""
    return tensors[key].info.shape if key in tensors else None


def series(shape: Callable[[str], Shape | None], pattern: str, start: int = 0) -> list[Shape]:
    """Shapes of consecutively numbered tensors, until one is missing.  shape: by key.  pattern: key with a hole."""
    shapes: list[Shape] = []
    while (found := shape(pattern.format(start + len(shapes)))) is not None:
        shapes.append(found)
    return shapes


def statistics_problems(checkpoint: Checkpoint, channels: int) -> list[str]:
    """What is wrong with the latent statistics of a file that has some."""
    found = {key: checkpoint.tensors[key].info for key in STATISTICS if key in checkpoint.tensors}
    faults = [f"1 missing: {key}" for key in STATISTICS if found and key not in found]
    for key, info in found.items():
        if info.shape != (channels,) or info.dtype not in ("F32", "F16", "BF16"):
            faults.append(
                f"1 {info.dtype} of shape {list(info.shape)}, expected F32, F16 or BF16 of [{channels}]: {key}"
            )
    return faults


def _module(rule: Rule) -> str:
    return rule.targets[0].partition(".")[0]


def _with_parent(directory: Path) -> tuple[Path, ...]:
    # The official repository has the video VAE's weights in `video_vae/source`, its statistics in `video_vae`.
    return (directory, directory.parent) if directory.absolute().name == "source" else (directory,)


def _is_like(value: Any, default: Any, limit: int) -> bool:
    # type() and not isinstance(): true and false are no numbers.
    if isinstance(default, tuple):
        return (
            isinstance(value, list | tuple)
            and 0 < len(value) <= MAX_LENGTH
            and all(_is_like(entry, default[0], limit) for entry in value)
        )
    if isinstance(default, int):
        return type(value) is int and 0 <= value <= limit
    if isinstance(default, float):
        return type(value) in (int, float) and abs(value) <= limit  # NaN compares false
    return isinstance(value, str)


def _kind(default: Any, limit: int) -> str:
    if isinstance(default, tuple):
        return f"a list of 1 to {MAX_LENGTH} entries, each {_kind(default[0], limit)}"
    if isinstance(default, int):
        return f"an integer from 0 to {limit}"
    return f"a number from -{limit} to {limit}" if isinstance(default, float) else "a string"
