"""Writing a conversion: headers first, then every tensor to its place; whole where it belongs, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from h3stream.errors import ConfigError
from services.checkpoints.source import INDEX_SUFFIX
from services.common.weights import DTYPES
from tools.convert.content import Content, SourceFiles, num_bytes
from tools.convert.plan import Plan

_ALIGNMENT = 8
"""The data begin at a multiple of this, as the safetensors library has it, so that every tensor is aligned."""


@dataclass(frozen=True)
class NewFile:
    """A weight file to be written."""

    name: str
    """Its name; empty for the only one, which is named by whoever asks for it."""
    head: bytes
    """Length and header."""
    tensors: dict[str, Content]
    """What follows, in order."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(map(num_bytes, self.tensors.values()))


def lay_out(plan: Plan, max_shard_bytes: int | None) -> tuple[NewFile, ...]:
    """The weight files of a plan.  max_shard_bytes: most bytes of tensors in one, unless a single tensor has more."""
    # Largest elements first, as the safetensors library has it: each tensor is then aligned.
    ordered = sorted(plan.tensors.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize)
    shards: list[dict[str, Content]] = [{}]
    filled = 0
    for key, content in ordered:
        size = num_bytes(content)
        if max_shard_bytes is not None and shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = content
        filled += size
    stem, count = plan.file_stem, len(shards)
    if count == 1 and not plan.has_index:
        names = [f"{stem}.safetensors"]
    else:
        names = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return tuple(
        NewFile(name, _head(tensors, plan.metadata), tensors) for name, tensors in zip(names, shards, strict=True)
    )


def small_files(plan: Plan, files: Sequence[NewFile]) -> dict[str, bytes]:
    """What lies beside the weights in a folder: configuration and index."""
    found: dict[str, Any] = {}
    if plan.config is not None:
        found["config.json"] = plan.config
    if len(files) > 1 or plan.has_index:
        weight_map = {key: file.name for file in files for key in file.tensors}
        total = sum(num_bytes(content) for content in plan.tensors.values())
        found[f"{plan.file_stem}{INDEX_SUFFIX}"] = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
    return {name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in found.items()}


@contextmanager
def whole_or_not_at_all(destination: Path, *, force: bool) -> Iterator[Path]:
    """A path to write to, of the destination's name and on its disk, which takes its place if the block succeeds.

    Nothing is left if the block fails or is interrupted. force: whether what is there already is replaced.
    Raises ConfigError if the destination is taken, holds more than a component's files, or cannot be written.
    """
    _check_destination(destination, force=force)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as scratch:
            made = Path(scratch) / destination.name
            yield made
            if destination.is_dir():
                destination.rename(Path(scratch) / ".replaced")
            made.replace(destination)
    except OSError as error:
        raise ConfigError(f"{destination} cannot be written: {error.strerror or error}") from error


def check_disk(destination: Path, needed_bytes: int) -> None:
    """Raises ConfigError if the destination's disk has no room for so many bytes."""
    free = shutil.disk_usage(destination.parent).free
    if needed_bytes > free:
        raise ConfigError(f"{destination} needs {needed_bytes / 1e9:.3f} GB, its disk has {free / 1e9:.3f} GB free")


def write_heads(made: Path, plan: Plan, files: Sequence[NewFile]) -> None:
    """Writes everything but the weights, in whose place the files have holes of their size."""
    if plan.is_folder:
        made.mkdir()
        for name, content in small_files(plan, files).items():
            (made / name).write_bytes(content)
    for file in files:
        path = _path(made, plan, file)
        path.write_bytes(file.head)
        os.truncate(path, file.size_bytes)


def write_weights(made: Path, plan: Plan, files: Sequence[NewFile], report: Callable[[int], None]) -> None:
    """Fills the files.  report: told how many bytes have been written, from time to time. Raises CheckpointError."""
    written = 0
    with SourceFiles() as sources:
        for file in files:
            with _path(made, plan, file).open("r+b") as target:
                target.seek(len(file.head))
                for key, content in file.tensors.items():
                    start = written
                    for block in content.blocks(sources):
                        data = block.contiguous().view(-1).view(torch.uint8).numpy()
                        target.write(data)  # type: ignore[arg-type]
                        written += len(data)
                        report(written)
                    assert written - start == num_bytes(content), key
                target.flush()
                os.fsync(target.fileno())


def _path(made: Path, plan: Plan, file: NewFile) -> Path:
    return made / file.name if plan.is_folder else made


def _head(tensors: Mapping[str, Content], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for key, content in tensors.items():
        stop = position + num_bytes(content)
        entries[key] = {"dtype": content.dtype, "shape": content.shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _check_destination(destination: Path, *, force: bool) -> None:
    if not destination.parent.is_dir():
        raise ConfigError(f"{destination}: the folder {destination.parent} does not exist")
    if not os.path.lexists(destination):
        return
    if not force:
        raise ConfigError(f"{destination} exists; remove it, choose another name, or give --force to replace it")
    if destination.is_symlink() or not (destination.is_file() or destination.is_dir()):
        raise ConfigError(f"{destination} is neither a file nor a folder, and is not replaced")
    if destination.is_dir():
        others = sorted(path.name for path in destination.iterdir() if not _is_replaceable(path))
        if others:
            raise ConfigError(
                f"{destination} holds more than weights, such as {others[0]!r:.200}, and is not replaced as a whole"
            )


def _is_replaceable(path: Path) -> bool:
    return path.is_file() and (path.name == "config.json" or path.name.endswith((".safetensors", INDEX_SUFFIX)))
