"""Finds the model files below a path: weight files, folders that are one component, tokenizers, model directories.

Names and folders alone are looked at. However a tree is made (links in circles, links to everything, a million files),
a survey ends soon.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from h3stream.errors import CheckpointError
from services.checkpoints.components import Part, find_part
from services.checkpoints.source import INDEX_SUFFIX, SHARD_NAME

PlaceKind = Literal["weights", "tokenizer", "model", "foreign", "unread", "nothing"]

MAX_DEPTH = 8
"""Folders within folders that are entered. A snapshot in the Hugging Face cache needs 5 from the cache's root."""
MAX_ENTRIES = 20_000
"""Files and folders that are looked at in one survey."""

_MODEL_INDEX = "model_index.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_CONFIGS = ("config.json", "adapter_config.json")
_FOREIGN_SUFFIXES = (".gguf", ".ckpt", ".pt", ".pth")
"""Files that may hold weights, none of which is read."""


@dataclass(frozen=True)
class Place:
    """Something on the disk that may be a part of a model."""

    path: Path
    """A file, or the folder of a component, a tokenizer or a model."""
    kind: PlaceKind
    """What it looks like: "foreign" is a weight file of a kind that is never read, "unread" a folder that could not be
    looked into, "nothing" a path that the user named and that leads to no model file."""
    is_named: bool
    """Whether the user has named it, and it was not just come across."""
    problem: str = ""
    """Why it is "unread" or "nothing"."""


def survey(paths: list[Path]) -> Iterator[Place]:
    """Everything at or below the paths, in order of their names; a folder before what is in it."""
    walk = _Walk()
    for path in paths:
        if os.path.isdir(path):
            found = list(walk.folder(path))
            yield from found or [Place(path, "nothing", True, "holds no model files")]
        elif not os.path.lexists(path):
            yield Place(path, "nothing", True, "does not exist")
        else:
            yield Place(path, "weights", True)


class _Walk:
    """One survey: what it has seen, and how much it may still look at."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._num_left = MAX_ENTRIES

    def folder(self, path: Path) -> Iterator[Place]:
        """What a folder that was named is, then what is in it."""
        return self._folder(path, 0, is_within_model=False)

    def _folder(self, path: Path, depth: int, is_within_model: bool) -> Iterator[Place]:
        is_named = depth == 0
        try:
            names = self._names(path)
        except CheckpointError as error:
            yield Place(path, "unread", is_named, str(error))
            return
        if names is None:  # seen already, by another way
            return
        weights = [name for name in names if name.endswith(".safetensors")]
        is_model = _is_model(path, names, is_within=is_within_model)
        if is_model:
            yield Place(path, "model", is_named)
        if _TOKENIZER_CONFIG in names or ("tokenizer.json" in names and not weights):
            yield Place(path, "tokenizer", is_named)
        own = _component_files(names, weights)
        if own is not None:
            yield Place(path, "weights", is_named)
        for name in names:
            if name in (own or ()):
                continue
            yield from self._entry(path / name, depth + 1, is_within_model or is_model)

    def _entry(self, path: Path, depth: int, is_within_model: bool) -> Iterator[Place]:
        if os.path.isdir(path):
            if depth > MAX_DEPTH:
                yield Place(path, "unread", False, f"lies {depth} folders deep and was not looked into")
            else:
                yield from self._folder(path, depth, is_within_model)
        elif path.name.endswith(".safetensors"):
            yield Place(path, "weights", False)
        elif path.name.endswith(_FOREIGN_SUFFIXES):
            yield Place(path, "foreign", False)

    def _names(self, path: Path) -> list[str] | None:
        """Names in a folder, without hidden ones; None for a folder that was seen before."""
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in self._seen:
                return None
            self._seen.add((status.st_dev, status.st_ino))
            names = []
            with os.scandir(path) as entries:
                for entry in entries:
                    if self._num_left == 0:
                        raise CheckpointError(f"was not looked at in full: {MAX_ENTRIES} files have been seen before")
                    self._num_left -= 1
                    if not entry.name.startswith("."):
                        names.append(entry.name)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}") from error
        return sorted(names)


def _is_model(path: Path, names: list[str], *, is_within: bool) -> bool:
    """Whether a folder is a model directory: it says so, or at least two parts are where they are published.

    is_within: whether it is in one already, as the partitions of the official repository are.
    """
    if is_within or _MODEL_INDEX in names:
        return not is_within
    parts: tuple[Part, ...] = ("dit", "video_vae", "audio_vae", "text_encoder")
    return sum(find_part(path, part) is not None for part in parts) > 1


def _component_files(names: list[str], weights: list[str]) -> frozenset[str] | None:
    """The weight files of a folder that is one component; None if its files, if any, are each a component.

    With an index the files are its shards; others beside them stand alone.
    """
    shards = frozenset(name for name in weights if SHARD_NAME.fullmatch(name))
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return shards or frozenset(weights)
    if shards or (weights and any(name in names for name in _CONFIGS)):
        return frozenset(weights)
    return None
