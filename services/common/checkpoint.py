"""Reading a model directory: configurations as JSON, weights from safetensors only, digests for provenance."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from h3stream.errors import CheckpointError


def read_config(directory: Path) -> dict[str, Any]:
    """The component's `config.json`. Raises CheckpointError if it is missing, unreadable or no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return config


def weight_files(directory: Path) -> list[Path]:
    """The component's safetensors files, sorted. Raises CheckpointError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no safetensors file")
    return files


def shard_files(directory: Path) -> list[Path]:
    """The component's weight files, sorted: those that its index names, or every safetensors file without an index.

    Raises CheckpointError if the index is none, or names files that are not in the directory.
    """
    indexes = sorted(directory.glob("*.safetensors.index.json"))
    if not indexes:
        return weight_files(directory)
    names: set[str] = set()
    for index in indexes:
        try:
            names.update(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(directory / name for name in names)
        except OSError as error:
            raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [file.name for file in files if file.parent != directory or not file.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which its index names")
    return files


def header_digest(path: Path) -> str:
    """SHA-256 of a safetensors file's header and size, without reading its many gigabytes.

    It tells layouts, precisions and metadata apart, but not two trainings of one architecture saved alike.
    Raises CheckpointError if the file is missing, cut off or something else.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path} is not a safetensors file: it is {len(prefix)} bytes long")
        (length,) = struct.unpack("<Q", prefix)
        size = path.stat().st_size
        if length > size - 8:
            raise CheckpointError(f"{path} is cut off or not a safetensors file")
        return hashlib.sha256(prefix + file.read(length) + struct.pack("<Q", size)).hexdigest()
