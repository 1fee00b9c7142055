"""Published variants of the DiT that are not taken: recognised by their headers, and refused with the reason.

Source: docs/reference/h3-model.md §3.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from core.geometry import PATCH, VIDEO_LATENT_CHANNELS
from services.checkpoints.quantisation import quantisation_mark
from services.checkpoints.source import Checkpoint, StoredTensor

_PATCH_DIM = VIDEO_LATENT_CHANNELS * PATCH * PATCH
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_ADALN_WEIGHT = re.compile(r"(transformer_)?blocks\.[0-9]+\.adaln_proj\.linear\.weight")
_QUANTISED: dict[str, str] = {
    "convrot": "with rotated activations (convrot)",
    "w4a8": "as 4-bit codes for 8-bit activations (w4a8)",
    "nvfp4": "in NVFP4",
    "fp8": "in FP8",
    "int8": "in INT8",
    "quantised": "in a quantised form",
}
"""Names people know the forms by, and how a message calls them."""


def refused_variant(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], partition: str
) -> tuple[str, str] | None:
    """Name of the variant and, as a clause that goes on from the file's name, why it is refused; None if it is not.

    tensors: the checkpoint's, without what stands before all their keys.  partition: "fl2va", "ref2va" or "".
    """
    instead = f"use minimax_h3_{partition or 'fl2va'}_bf16.safetensors or a folder with the full weights"
    rank = _pruned_rank(tensors)
    if rank is not None:
        return "pruned", (
            f"is a pruned DiT: a rank-{rank} fit replaces its time embedder (adaln_t_table), so it only comes close to "
            f"the model and the adapters have no modules to go to; {instead}"
        )
    markers = {key: mark for key in tensors if (mark := quantisation_mark(key))}
    codes = {key for key, tensor in tensors.items() if tensor.info.dtype not in _FLOAT_DTYPES} - markers.keys()
    if markers or codes:
        form = _quantised_form(checkpoint, markers, codes)
        return form, (
            f"is a DiT {_QUANTISED[form]}: {len(codes)} tensors hold codes and {len(markers)} scales or formats; "
            f"quantised weights are not taken, since adapters add to the weights they were trained on; {instead}"
        )
    if any(".to_gate_compress." in key for key in tensors):
        return "sparse", f"has gates for sparse attention (to_gate_compress), so it is another model; {instead}"
    rows = _rows(tensors.get("final_layer.video_out.weight") or tensors.get("proj_out.weight"))
    if rows > _PATCH_DIM and rows % _PATCH_DIM == 0:
        return "stacked heads", (
            f"has {rows // _PATCH_DIM} stacked output heads ({rows} rows where there should be {_PATCH_DIM}), so it is "
            f"another model; {instead}"
        )
    return None


def _pruned_rank(tensors: Mapping[str, StoredTensor]) -> int | None:
    """Rank of the fit in place of the time embedder; None if there is none."""
    table = next((tensor.info.shape for key, tensor in tensors.items() if key.endswith("adaln_t_table")), None)
    if table is not None:
        return table[-1] if table else 0
    if any(key.startswith("time_embedder.") for key in tensors):
        return None
    shapes = [tensor.info.shape for key, tensor in tensors.items() if _ADALN_WEIGHT.fullmatch(key)]
    # 18 vectors of the hidden width come from half that width in the model, from 8 or 64 numbers in a fit.
    return next((inputs for rows, inputs in (s for s in shapes if len(s) == 2) if 16 * inputs <= rows // 18), None)


def _quantised_form(checkpoint: Checkpoint, markers: Mapping[str, str], codes: Iterable[str]) -> str:
    """A key of `_QUANTISED`.  markers: keys and the words that mark them.  codes: keys of quantised weights."""
    words = (checkpoint.path.name.lower(), *checkpoint.metadata.values(), *markers, *codes)
    marks = set(markers.values())
    dtypes = set(checkpoint.dtypes())
    if any("convrot" in word for word in words):
        return "convrot"
    if "weight_codebook" in marks:
        return "w4a8"
    if "weight_scale_2" in marks:
        return "nvfp4"
    if any(dtype.startswith("F8_") for dtype in dtypes) or "scaled_fp8" in marks:
        return "fp8"
    return "int8" if "I8" in dtypes else "quantised"


def _rows(stored: StoredTensor | None) -> int:
    return stored.info.shape[0] if stored is not None and stored.info.shape else 0
