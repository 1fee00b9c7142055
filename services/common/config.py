"""The settings that every worker has, and those that name files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from core.request import ADAPTER_NAME, MAX_STRENGTH
from h3stream.errors import ConfigError
from services.checkpoints.components import Part, part_path
from services.common.logs import LOG_FORMATS
from services.common.token import check_token

_ADAPTER_RULE = "an adapter is given as PATH, NAME=PATH, PATH:STRENGTH or NAME=PATH:STRENGTH"


@dataclass(frozen=True)
class AdapterSource:
    """An adapter file to load."""

    name: str
    """What requests call it."""
    path: Path
    """The file."""
    strength: float | None = None
    """Strength where a request does not say; None: the adapter's own."""

    def __post_init__(self) -> None:
        if ADAPTER_NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"adapter {self}: the name is {self.name!r}; it must be 1 to 64 letters, digits, dots, dashes and "
                f"underscores, the first a letter or a digit; {_ADAPTER_RULE}"
            )
        if self.strength is not None and not 0 < abs(self.strength) <= MAX_STRENGTH:  # NaN compares false
            raise ConfigError(
                f"adapter {self}: the strength is {self.strength}; it must not be 0 and be from {-MAX_STRENGTH:g} to "
                f"{MAX_STRENGTH:g}"
            )
        if not os.path.exists(self.path):  # unlike Path.exists, no name is too odd for it
            raise ConfigError(f"adapter {self}: {self.path} does not exist; {_ADAPTER_RULE}")

    def __str__(self) -> str:
        return f"{self.name}={self.path}" + ("" if self.strength is None else f":{self.strength}")

    @classmethod
    def parse(cls, text: str) -> AdapterSource:
        """The source that `[NAME=]PATH[:STRENGTH]` stands for; without a name it is called after its file.

        What precedes the first "=" is a name unless it holds a slash; what follows the last ":" is a strength if it is
        a number, else part of the path. Raises ConfigError for anything else.
        """
        name, equals, rest = text.partition("=")
        if not equals or "/" in name:
            name, equals, rest = "", "", text
        path, colon, last = rest.rpartition(":")
        strength = _number(last) if colon else None
        if strength is None:
            path = rest
        if not path or (equals and not name):
            raise ConfigError(f"adapter is {text!r}; {_ADAPTER_RULE}")
        if not (name := name or adapter_name(Path(path))):
            raise ConfigError(f"adapter is {text!r}: give it a name; {_ADAPTER_RULE}")
        return cls(name, Path(path), strength)


def adapter_name(path: Path) -> str:
    """A valid name for an adapter, made of its file's or folder's; empty where nothing of it can stay."""
    own = path.stem if path.suffix == ".safetensors" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", own).strip("._-")[:64]


@dataclass(frozen=True)
class WorkerConfig:
    """Where a worker finds its weights and where it computes."""

    model_directory: Path | None = None
    """Model directory in the published diffusers layout or the official one. Not needed where every part is given by
    itself."""
    device: str = "auto"
    """Compute device: "cuda", "cuda:N" or "cpu"; "auto" takes the first GPU, else the CPU."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice, one per core."""
    ledger: Path | None = None
    """File in which the workers of a lane record what is on the device; it also carries the lock that keeps two of them
    from holding it at once. Without it this worker has the device to itself."""
    log_format: str = "text"
    """How the log is written: "text", or "json", an object on each line."""
    token: str = field(default="", repr=False)
    """What callers must send; empty: anybody may call who reaches the worker."""

    def __post_init__(self) -> None:
        if self.model_directory is not None and not self.model_directory.is_dir():
            raise ConfigError(f"model directory {self.model_directory} does not exist")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}; it must be 0 (one per core) or more")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format is {self.log_format!r}; it must be one of {LOG_FORMATS}")
        check_token(self.token)

    def _require(self, part: Part) -> None:
        """Raises ConfigError unless a part has a path of its own that exists, or is in the model directory."""
        part_path(self.model_directory, part, getattr(self, part))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
