"""The adapters of a server: which files they are, what requests call them, and whether they fit the DiT."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.latents_file import SHIFTS
from core.request import MAX_SHIFT, MIN_SHIFT
from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints.adapter_formats import RAVEN, Format
from services.checkpoints.adapters import PEFT_WEIGHTS, AdapterModule, given_name, number, partition_of, read_modules
from services.checkpoints.dit_modules import Architecture, official_modules, parameter_shapes
from services.checkpoints.identify import expect
from services.checkpoints.key_map import summary
from services.common.config import AdapterSource, adapter_name

FOLDER = "adapters"
"""Folder of a model directory whose adapters all are taken: files, and folders as PEFT writes them."""
STREAMING_NAME = "raven"
"""Name that tells the streaming adapter from others of its format."""
STREAMING_SHIFTS = (12.0, 3.0)
"""Video and audio shift that it was trained with, for any number of steps (docs/reference/raven-streaming.md §1).

A file of its format that was trained with others says so in its metadata, by the names in `SHIFTS`.
"""

_TURBO_NAME = re.compile(r"minimax_h3_[a-z0-9]+_(?:lightx2v_)?turbo_(?P<steps>[1-9][0-9]?)step(?:_(?P<rest>.*))?", re.I)
_SHIFTS, _SHIFTS_768P = (12.0, 3.0), (6.0, 3.0)
"""Shifts of LightX2V's turbo adapters by what their names carry (docs/reference/raven-streaming.md §8.3)."""


@dataclass(frozen=True)
class AdapterHeader:
    """An adapter as its file's header tells it; no matrix has been read."""

    name: str
    """What requests call it."""
    path: Path
    """The weight file."""
    format: str
    """Format of its keys."""
    modules: tuple[AdapterModule, ...]
    """The modules of a DiT that it names."""
    unknown_modules: tuple[str, ...]
    """Those it names that no DiT has."""
    default_strength: float
    """Strength it has where a request does not say."""
    partition: str
    """DiT weights it was trained on, "fl2va" or "ref2va"; empty if unknown."""
    trained_steps: int | None
    """Noise forwards it was trained for; None if unknown."""
    trained_video_shift: float | None
    """Shift of the video sigma grid it was trained with; None if unknown."""
    trained_audio_shift: float | None
    """Shift of the audio sigma grid it was trained with; None if unknown."""
    is_streaming: bool = False
    """Whether it is the adapter that streaming needs."""

    @property
    def file_name(self) -> str:
        """Name of the file, with that of its folder where it is called as PEFT calls all of them."""
        return f"{self.path.parent.name}/{self.path.name}" if self.path.name == PEFT_WEIGHTS else self.path.name

    @property
    def num_modules(self) -> int:
        """Modules that the file names."""
        return len(self.modules) + len(self.unknown_modules)

    @property
    def num_parameters(self) -> int:
        """Weights of the modules of a DiT."""
        return sum(module.down.info.num_elements + module.up.info.num_elements for module in self.modules)

    @property
    def min_rank(self) -> int:
        """Smallest rank of its modules."""
        return min(module.rank for module in self.modules)

    @property
    def max_rank(self) -> int:
        """Largest rank of its modules."""
        return max(module.rank for module in self.modules)

    @property
    def min_alpha(self) -> float:
        """Smallest alpha of its modules."""
        return min(module.alpha for module in self.modules)

    @property
    def max_alpha(self) -> float:
        """Largest alpha of its modules."""
        return max(module.alpha for module in self.modules)


@dataclass(frozen=True)
class Binding:
    """What of an adapter fits a DiT."""

    modules: tuple[AdapterModule, ...]
    """Modules that it changes."""
    faults: tuple[str, ...]
    """What does not fit, in phrases; empty if everything does."""


def read_registry(sources: Sequence[AdapterSource], model_directory: Path | None) -> tuple[AdapterHeader, ...]:
    """The adapters of a server: those that are given, then those in the model directory's `adapters/`, by their names.

    Left out of the folder is what is given already and what is called like something that is given.
    Raises ConfigError for a name that two have and if it is open which one streaming uses, CheckpointError for a file
    that is no adapter of the DiT.
    """
    given = {source.name: source for source in sources}
    folder = [] if model_directory is None else _folder(model_directory / FOLDER)
    given_files = {os.path.realpath(_weights(source.path)) for source in sources}
    left = [
        source
        for source in folder
        if source.name not in given and os.path.realpath(_weights(source.path)) not in given_files
    ]
    paths: dict[str, Path] = {}
    for source in (*sources, *left):
        if source.name in paths:
            raise ConfigError(f"{paths[source.name]} and {source.path} are both called {source.name}; rename one")
        paths[source.name] = source.path
    return _with_streaming(tuple(read_adapter(source) for source in (*sources, *left)))


def read_adapter(source: AdapterSource) -> AdapterHeader:
    """Reads the header of an adapter and its alphas. Raises CheckpointError that lists everything wrong with it."""
    path = _weights(source.path)
    checkpoint, _ = expect(path, "adapter")
    format_, modules, unknown_modules = read_modules(checkpoint)
    steps, shifts = _schedule(format_, given_name(path))
    video_shift, audio_shift = (
        _stated_shift(path, checkpoint.metadata, name, shift) for name, shift in zip(SHIFTS, shifts, strict=True)
    )
    return AdapterHeader(
        name=source.name,
        path=path,
        format=format_.name,
        modules=modules,
        unknown_modules=unknown_modules,
        default_strength=1.0 if source.strength is None else source.strength,
        partition=partition_of(checkpoint, format_),
        trained_steps=steps,
        trained_video_shift=video_shift,
        trained_audio_shift=audio_shift,
    )


def bind(
    header: AdapterHeader, architecture: Architecture, *, partition: str = "", allow_partial: bool = False
) -> Binding:
    """Fits an adapter to a DiT of these sizes.

    partition: the DiT's weights, "fl2va" or "ref2va"; empty if unknown.  allow_partial: whether an adapter may fit in
    part. The streaming adapter may not: it changes every linear module of the DiT, all in one rank.
    Raises CheckpointError, with what matched of what was expected, for one of other weights or that does not fit.
    """
    if partition and header.partition and partition != header.partition:
        raise CheckpointError(
            f"{header.path} was trained on the {header.partition} DiT, and the one that is loaded is {partition}: "
            "it would attach and harm the picture"
        )
    shapes = parameter_shapes(architecture)
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    bound = []
    for module in header.modules:
        weights = [shapes[key] for name in module.rule.targets if (key := f"{name}.weight") in shapes]
        if len(weights) < len(module.rule.targets):
            wrong["that this DiT does not have"].append(module.name)
            continue
        down, up = module.down.info.shape, module.up.info.shape
        weight = [sum(rows for rows, _ in weights), weights[0][1]]
        if [up[0], down[1]] != weight:
            wrong[f"of A {list(down)} and B {list(up)}, which do not fit a weight {weight}"].append(module.name)
        else:
            bound.append(module)
    wrong["that no DiT has"] += header.unknown_modules
    expected = header.num_modules
    if header.is_streaming:
        linears = official_modules(architecture.num_layers, architecture.num_refiner_layers)
        expected = len(linears)
        wrong["missing"] += linears.keys() - {module.name for module in header.modules}
    faults = [f"{len(names)} {what}: {summary(names)}" for what, names in wrong.items() if names]
    if header.is_streaming and header.min_rank != header.max_rank:
        faults.append(f"ranks from {header.min_rank} to {header.max_rank}, expected one")
    if faults and (header.is_streaming or not allow_partial or not bound):
        advice = "" if header.is_streaming or not bound else "; to use it in part, set allow_partial_adapters"
        matched = f"{len(bound)} of {expected} modules match"
        raise CheckpointError(f"{header.path} does not fit the DiT: {matched}; {'; '.join(faults)}{advice}")
    return Binding(tuple(bound), tuple(faults))


def _folder(directory: Path) -> list[AdapterSource]:
    """The adapters in a folder, by name; nothing if there is no such folder."""
    try:
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    adapters = [path for path in paths if path.suffix == ".safetensors" or os.path.exists(path / PEFT_WEIGHTS)]
    return [AdapterSource(adapter_name(path), path) for path in adapters]


def _weights(path: Path) -> Path:
    """The weight file of an adapter that is given as this file or as the folder that PEFT wrote."""
    return path / PEFT_WEIGHTS if path.is_dir() else path


def _schedule(format_: Format, name: str) -> tuple[int | None, tuple[float, float] | tuple[None, None]]:
    """The steps and the (video, audio) shifts that an adapter was trained for, as far as its format and name tell."""
    if format_ is RAVEN:
        return None, STREAMING_SHIFTS
    if (turbo := _TURBO_NAME.fullmatch(name)) is None:
        return None, (None, None)
    is_768p = "768p" in (turbo["rest"] or "").lower().split("_")
    return int(turbo["steps"]), _SHIFTS_768P if is_768p else _SHIFTS


def _stated_shift(path: Path, metadata: Mapping[str, str], name: str, otherwise: float | None) -> float | None:
    """A shift as the file's metadata says it, and otherwise what its kind was trained with."""
    if name not in metadata:
        return otherwise
    shift = number(metadata[name])
    if not MIN_SHIFT <= shift <= MAX_SHIFT:
        rule = f"no number from {MIN_SHIFT:g} to {MAX_SHIFT:g}"
        raise CheckpointError(f"{path}: its metadata says {name} {metadata[name]!r:.40}, which is {rule}")
    return shift


def _with_streaming(headers: tuple[AdapterHeader, ...]) -> tuple[AdapterHeader, ...]:
    """The adapters with the streaming adapter, if there is one, marked."""
    candidates = [header for header in headers if header.format == RAVEN.name]
    named = [header for header in candidates if header.name == STREAMING_NAME]
    if len(candidates) > 1 and not named:
        listed = ", ".join(f"{header.name}={header.path}" for header in candidates)
        raise ConfigError(
            f"{len(candidates)} adapters can be the one that streaming uses: {listed}; give one of them the name "
            f"{STREAMING_NAME} (--adapter {STREAMING_NAME}=PATH), or give one alone. A file that is given takes the "
            "place of the same file in the model directory, whatever its name there"
        )
    chosen = next(iter(named or candidates), None)
    return tuple(replace(header, is_streaming=header is chosen) for header in headers)
