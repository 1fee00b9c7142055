"""A weight file, or a folder of them with its index and configuration, as one set of tensors on the disk."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.header import Header, TensorInfo, open_file, read_header, sampled_digest, strict_json

MAX_JSON_BYTES = 16 << 20
"""Largest configuration or index that is read."""
MAX_FILES = 512
"""Most weight files of one component: all of them may be open at a time, and a process may usually open 1024."""
MAX_ALL_HEADERS_BYTES = 16 << 20
"""Most bytes of headers of one component: a thousand files may not take a thousand times what one may."""
INDEX_SUFFIX = ".safetensors.index.json"
SHARD_NAME = re.compile(r".*-[0-9]+-of-[0-9]+\.safetensors")
"""Names of the files of a component that has several, as all tools write them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the file that holds it."""

    path: Path
    """The file."""
    info: TensorInfo
    """Where and what it is there."""


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one component; only headers have been read."""

    path: Path
    """The file or folder as it was named."""
    headers: tuple[Header, ...]
    """Of every weight file, by file name."""
    tensors: dict[str, StoredTensor]
    """Every tensor of all files, file by file in the order of their bytes."""
    has_index: bool
    """Whether it is a folder with an index of shards."""
    config: dict[str, Any] | None
    """The folder's `config.json`; None where there is none, or for a single file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.info.num_bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.info.num_elements for tensor in self.tensors.values())

    @property
    def metadata(self) -> dict[str, str]:
        """The headers' metadata; of several files the first that says something has the say."""
        return {key: value for header in reversed(self.headers) for key, value in header.metadata.items()}

    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the tensors, those with most bytes first."""
        return data_types(self.tensors.values())

    def digests(self) -> dict[str, str]:
        """File name to `sampled_digest`."""
        return {header.path.name: sampled_digest(header) for header in self.headers}


def data_types(tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """Dtypes of some tensors, those with most bytes first."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.info.dtype] += tensor.info.num_bytes
    return tuple(dtype for dtype, _ in counted.most_common())


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads the headers of a weight file, or of the weight files in a folder.

    A folder with an index holds the files that the index names; without one, every safetensors file in it.
    Raises CheckpointError for files that are not what they should be, a tensor that two files hold, and an index that
    names files elsewhere, files that are missing or tensors that are not where it says.
    """
    if not os.path.isdir(path):
        headers: tuple[Header, ...] = (read_header(path),)
        return Checkpoint(path, headers, _merged(headers), has_index=False, config=None)
    indexed = _index(path)
    files = sorted(set(indexed.values())) if indexed is not None else _named(path, ".safetensors")
    if not files:
        raise CheckpointError(f"{path} holds no safetensors file")
    if len(files) > MAX_FILES:
        raise CheckpointError(f"{path} has {len(files)} weight files, at most {MAX_FILES} are accepted")
    missing = [name for name in files if not os.path.exists(path / name)]
    if missing:
        named = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise CheckpointError(f"{path} lacks {named}, which its index names")
    headers = _read_headers(path, files)
    tensors = _merged(headers)
    if indexed is not None:
        _check_index(path, indexed, tensors)
    return Checkpoint(path, headers, tensors, has_index=indexed is not None, config=find_config(path))


def find_config(directory: Path) -> dict[str, Any] | None:
    """A folder's `config.json`, or None if it has none. Raises CheckpointError if it is no JSON object."""
    path = directory / "config.json"
    return read_json_object(path) if os.path.lexists(path) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises CheckpointError if it is missing, too large or something else."""
    with open_file(path) as fd:
        text = os.pread(fd, MAX_JSON_BYTES + 1, 0)
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes")
    try:
        value = strict_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _named(directory: Path, suffix: str) -> list[str]:
    """Names that end so of what lies in a folder, sorted. Raises CheckpointError."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(suffix))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    for name in names:
        if not name.isprintable():  # it will stand in messages
            raise CheckpointError(f"{directory} has a file whose name holds control characters, {name[:200]!r}")
    return names


def _read_headers(directory: Path, files: list[str]) -> tuple[Header, ...]:
    headers = []
    num_bytes = 0
    for name in files:
        headers.append(read_header(directory / name))
        num_bytes += headers[-1].data_start
        if num_bytes > MAX_ALL_HEADERS_BYTES:
            raise CheckpointError(f"{directory}: the headers of its files have more than {MAX_ALL_HEADERS_BYTES} bytes")
    return tuple(headers)


def _index(directory: Path) -> dict[str, str] | None:
    """Tensor to file name by the folder's index; None if it has none."""
    indexes = [directory / name for name in _named(directory, INDEX_SUFFIX)]
    if not indexes:
        return None
    if len(indexes) > 1:
        raise CheckpointError(f"{directory} has several indexes: {', '.join(path.name for path in indexes)}; keep one")
    weight_map = read_json_object(indexes[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{indexes[0]} is not a safetensors index: it has no weight_map")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{indexes[0]} names no file for {key[:200]!r}")
        # A name with a separator could lead anywhere; `..` has none and leads up.
        if "/" in name or "\0" in name or not name.endswith(".safetensors") or not name.isprintable():
            raise CheckpointError(f"{indexes[0]} names {name[:200]!r}, which is no safetensors file of its folder")
    return weight_map


def _merged(headers: tuple[Header, ...]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for key, info in header.tensors.items():
            if key in tensors:
                raise CheckpointError(f"{header.path} holds {key!r}, which {tensors[key].path.name} holds too")
            tensors[key] = StoredTensor(header.path, info)
    return tensors


def _check_index(directory: Path, indexed: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    wrong = [key for key in indexed.keys() | tensors.keys() if not _agrees(key, indexed, tensors)]
    if wrong:
        raise CheckpointError(
            f"{directory}: the index and the files disagree on {len(wrong)} tensors, such as {min(wrong)!r}"
        )


def _agrees(key: str, indexed: dict[str, str], tensors: dict[str, StoredTensor]) -> bool:
    return key in tensors and indexed.get(key) == tensors[key].path.name
