"""The files of a tokenizer, as far as can be told without the library that loads them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3stream.errors import CheckpointError
from services.checkpoints.source import read_json_object

NAMES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Files that a tokenizer's folder may hold."""
_VOCABULARIES = (frozenset({"tokenizer.json"}), frozenset({"vocab.json", "merges.txt"}))
"""Files that hold a whole vocabulary. Source: docs/reference/h3-model.md §6.5."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer and what is wrong with them."""

    paths: tuple[Path, ...]
    """The files that are there."""
    values: dict[str, dict[str, Any]]
    """By name, what the JSON files say."""
    problems: tuple[str, ...]
    """What is wrong; empty if nothing is."""


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Reads the JSON files of a tokenizer's folder. What is wrong is returned, not raised."""
    paths = tuple(path for name in NAMES if os.path.lexists(path := folder / name))
    values: dict[str, dict[str, Any]] = {}
    problems = []
    for path in paths:
        if path.suffix == ".json":
            try:
                values[path.name] = read_json_object(path)
            except CheckpointError as error:
                problems.append(str(error))
    names = {path.name for path in paths}
    if not any(vocabulary <= names for vocabulary in _VOCABULARIES):
        problems.append(f"{folder} holds no vocabulary: neither tokenizer.json nor vocab.json with merges.txt")
    return TokenizerFiles(paths, values, tuple(problems))


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError with everything that is wrong with a tokenizer's folder."""
    problems = read_tokenizer(folder).problems
    if problems:
        raise CheckpointError(f"{folder} is no tokenizer: {'; '.join(problems)}")
