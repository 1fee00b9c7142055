"""What a PEFT configuration says of an adapter: its alphas and ranks. What it says of anything else is refused.

PEFT writes one beside the weights, diffusers into their file's metadata. Patterns are names of modules or their last
parts; regular expressions, which PEFT would take, come from a file that may be hostile and are refused.
Source: huggingface.co/docs/peft, "LoRA", `LoraConfig`; github.com/huggingface/peft, `get_pattern_key`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FILE_NAME = "adapter_config.json"
"""Beside `adapter_model.safetensors`."""
MAX_ALPHA = 1e6
"""Far above any that was trained; what an update is scaled with must stay a number in float32."""

_NAME = re.compile(r"\^?[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_SWITCHES = {
    "use_dora": "it is a DoRA, whose weights are normalised",
    "use_rslora": "its scale is alpha / sqrt(rank)",
    "use_qalora": "its inputs are pooled",
    "lora_bias": "it has biases",
    "fan_in_fan_out": "its matrices are transposed",
    "modules_to_save": "it replaces whole modules",
    "layer_replication": "it repeats layers",
    "trainable_token_indices": "it replaces token embeddings",
    "alora_invocation_tokens": "it begins at certain tokens",
}
"""Settings that make another update of the weights, and what they make of it; absent, null, false or empty is none."""
_MOVES_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to start training that take the adapter's first value out of the base weights, which have it here."""


Patterns = dict[str, tuple[int, float]]
"""By pattern its place among the others and its value: of those that fit a module the first has the say."""


@dataclass(frozen=True)
class PeftConfig:
    """Alphas and ranks by module."""

    alpha: float | None
    """Where no pattern fits; None if it is not stated."""
    rank: int | None
    """Where no pattern fits; None if it is not stated."""
    alphas: Patterns
    """Alphas by pattern."""
    ranks: Patterns
    """Ranks by pattern."""

    def alpha_of(self, module: str) -> float | None:
        """Alpha of a module by its path in the model; None if it is not stated."""
        return _first(self.alphas, module, self.alpha)

    def rank_of(self, module: str) -> float | None:
        """Rank of a module by its path in the model; None if it is not stated."""
        return _first(self.ranks, module, self.rank)


def read_peft_config(values: dict[str, Any]) -> PeftConfig:
    """The configuration that a JSON object holds. Raises ValueError, whose text goes on from the object's name."""
    if (kind := values.get("peft_type") or "LORA") != "LORA":
        raise ValueError(f"has the peft_type {reprlib.repr(kind)}; only LORA is supported")
    if (bias := values.get("bias") or "none") != "none":
        raise ValueError(f"has the bias {reprlib.repr(bias)}; only adapters without biases are supported")
    for name, meaning in _SWITCHES.items():
        if values.get(name):
            raise ValueError(f"has {name} {reprlib.repr(values[name])}: {meaning}, which is not supported")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_MOVES_THE_BASE):
        raise ValueError(
            f"has init_lora_weights {reprlib.repr(start)}: the adapter fits base weights that were changed for it, "
            "which is not supported; have it saved as a plain LoRA"
        )
    alpha, rank = values.get("lora_alpha", values.get("alpha")), values.get("r")
    return PeftConfig(
        alpha=None if alpha is None else _alpha(alpha),
        rank=None if rank is None else _rank(rank),
        alphas=_patterns(values.get("alpha_pattern"), _alpha),
        ranks=_patterns(values.get("rank_pattern"), _rank),
    )


def is_alpha(value: float) -> bool:
    """Whether a number can be an alpha."""
    return 0 < value <= MAX_ALPHA  # NaN compares false


def _patterns(patterns: Any, check: Callable[[Any], float]) -> Patterns:
    if not isinstance(patterns or {}, dict):
        raise ValueError(f"has the pattern {reprlib.repr(patterns)}; it must map names to numbers")
    checked = {}
    for place, (pattern, value) in enumerate((patterns or {}).items()):
        if _NAME.fullmatch(pattern) is None:
            raise ValueError(f"has the pattern {reprlib.repr(pattern)}; names of modules are supported, no others")
        checked[pattern] = (place, check(value))
    return checked


def _alpha(value: Any) -> float:
    if type(value) not in (int, float) or not is_alpha(value):
        raise ValueError(f"has an alpha of {reprlib.repr(value)}; it must be a number above 0 and up to {MAX_ALPHA:g}")
    return float(value)


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"has a rank of {reprlib.repr(value)}; it must be an integer above 0")
    return value


def _first(patterns: Patterns, module: str, default: float | None) -> float | None:
    """The value of the first pattern that is the module's path, with "^" before it, or its last parts, without."""
    parts = module.split(".")
    fitting = (f"^{module}", *(".".join(parts[start:]) for start in range(len(parts))))
    found = [patterns[pattern] for pattern in fitting if pattern in patterns]
    return min(found)[1] if found else default
