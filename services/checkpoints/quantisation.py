"""How quantised files are told from plain ones: by the tensors that they have beside their weights."""

from __future__ import annotations

_MARKS = frozenset(
    {
        *("comfy_quant", "weight_scale", "weight_scale_2", "weight_codebook", "input_scale", "pre_quant_scale"),
        *("scale_weight", "scale_input", "scaled_fp8"),
    }
)
"""Last words of their keys (docs/reference/h3-model.md §3.2, §6.6)."""


def quantisation_mark(key: str) -> str | None:
    """The word by which a key is one of a scale, a code book or the name of a format; None if it is none of them."""
    word = key.rpartition(".")[2]
    return word if word in _MARKS else None
