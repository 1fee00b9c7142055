"""The settings that every worker has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import ConfigError


@dataclass(frozen=True)
class WorkerConfig:
    """Where a worker finds its weights and where it computes."""

    model_directory: Path
    """Model directory in the published diffusers layout."""
    device: str = "auto"
    """Compute device: "cuda", "cuda:N" or "cpu"; "auto" takes the first GPU, else the CPU."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice, one per core."""
    ledger: Path | None = None
    """File in which the workers of a lane record what is on the device; it also carries the lock that keeps two of them
    from holding it at once. None: this worker has the device to itself."""

    def __post_init__(self) -> None:
        if not Path(self.model_directory).is_dir():
            raise ConfigError(f"model directory {self.model_directory} does not exist")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}; it must be 0 (one per core) or more")
