"""The settings of the DiT worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import ConfigError
from services.common.config import WorkerConfig

COMPUTE_DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class DitConfig(WorkerConfig):
    """Where the DiT worker finds its weights and in which precision it computes."""

    compute_dtype: str = "auto"
    """Precision of the block stack: "bfloat16" or "float32"; "auto" takes the precision it is stored in. The five
    modules that the checkpoint keeps in float32 stay there."""
    adapter: Path | None = None
    """The RAVEN adapter. None: the only safetensors file in the model directory's `adapters/`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"compute_dtype is {self.compute_dtype!r}; it must be one of {', '.join(COMPUTE_DTYPES)}")
