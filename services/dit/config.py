"""The settings of the DiT worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import ConfigError
from services.common.config import AdapterSource, WorkerConfig

COMPUTE_DTYPES = ("auto", "bfloat16", "float32")
DEFAULT_SHARED_CACHE_BYTES = 16 << 30
DIT_LAYOUTS = ("auto", "diffusers", "official", "comfyui")


@dataclass(frozen=True)
class DitConfig(WorkerConfig):
    """Where the DiT worker finds its weights and in which precision it computes."""

    compute_dtype: str = "auto"
    """Precision of the block stack: "bfloat16" or "float32"; "auto" takes the precision it is stored in. The five
    modules that the checkpoint keeps in float32 stay there."""
    dit: Path | None = None
    """File or folder of the DiT in any published layout, in place of the model directory's."""
    dit_layout: str = "auto"
    """Layout of the DiT: "diffusers", "official" or "comfyui"; "auto" tells it from the names of its tensors and how
    they are split over files. The official and ComfyUI's have the same names and shapes and differ in the order of
    rows."""
    adapters: tuple[AdapterSource, ...] = ()
    """Adapter (LoRA) as [NAME=]PATH[:STRENGTH], beside those in the model directory's `adapters/`; may be given several
    times. NAME is what requests call it, else its file's name; STRENGTH is used where a request gives none, else 1.
    Streaming needs RAVEN's."""
    allow_partial_adapters: bool = False
    """Take adapters of which some modules are not in the DiT, with a warning; without it they are refused."""
    frozen_caches: Path | None = None
    """Directory for frozen caches on disk, which requests must allow; what processes that are gone have left of them
    there is removed at the start. Without it there are none on disk."""
    shared_cache_bytes: int = DEFAULT_SHARED_CACHE_BYTES
    """Bytes that frozen caches which refinements share may take between two of them, in host memory or on disk; the
    least recently used is freed first. 0 keeps none."""
    no_pinned_caches: bool = False
    """Keep frozen caches in ordinary host memory, not in page-locked memory, which some drivers do not bear."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"compute_dtype is {self.compute_dtype!r}; it must be one of {', '.join(COMPUTE_DTYPES)}")
        check_dit_layout(self.dit_layout)
        if self.shared_cache_bytes < 0:
            raise ConfigError(f"shared_cache_bytes is {self.shared_cache_bytes}; it must be 0 or more")
        self._require("dit")


def check_dit_layout(layout: str) -> None:
    """Raises ConfigError for a layout that a DiT cannot have."""
    if layout not in DIT_LAYOUTS:
        raise ConfigError(f"dit_layout is {layout!r}; it must be one of {', '.join(DIT_LAYOUTS)}")
