"""Rows of the DiT's official modules, which adapters are written for, cut and ordered for the published ones."""

from __future__ import annotations

from torch import Tensor

from services.checkpoints.dit_modules import module_rows
from services.checkpoints.dit_modules import official_modules as official_modules
from services.checkpoints.key_map import Rows, Rule
from services.common.weights import split_rows


def split_output_rows(official: str, rows: Tensor) -> tuple[Tensor, ...]:
    """The output rows `[out, ...]` of an official module, cut and ordered for the published modules it stands for.

    rows: a fused projection's stacked [Q; K; V], the first feed-forward matrix's [gate; up].
    """
    order = module_rows(official, "comfyui")
    return split_rows(Rule(("q", "k", "v") if order is Rows.STACKED else ("",), order), rows)
