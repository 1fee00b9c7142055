"""Modules that keep their weights quantised, as ComfyUI's NVFP4 file stores them, and unpack them where they are used.

A weight is a 4-bit code times the scale of its block times the scale of its tensor. Only the code's bytes are kept, on
the host and on the device; one weight at a time exists unpacked, for the length of one multiplication.

Source: docs/reference/h3-model.md §6.6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.checkpoints.text_encoder import FP4_BLOCK

UNPACKED_AT_ONCE = 1 << 22
"""Weights that are unpacked in one go, whatever the size of their matrix: 16 MiB in float32.

The largest published matrix, 250 MiB in bfloat16, takes 40 to 60 MiB beside itself (host memory, two measurements).
"""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])  # [16], code to value
_BYTES = torch.cartesian_prod(_CODES, _CODES)  # [256, 2], byte to the values of its high and its low half


def untiled_scales(tiled: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of every block of a weight `[rows, columns]`, as `[rows, columns / 16]`, E4M3.

    tiled: as stored, E4M3 of the same number of rows and blocks rounded up to 128 and 4. A tile holds the scales of
    128 rows and 4 blocks; within it, those of rows that are 32 apart lie together.
    """
    padded_rows, padded_blocks = tiled.shape
    # As bytes: not every device can rearrange 8-bit floats.
    tiles = tiled.view(torch.uint8).view(padded_rows // 128, padded_blocks // 4, 32, 4, 4)
    scales = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_blocks)
    return scales[:rows, : columns // FP4_BLOCK].contiguous().view(tiled.dtype)


def unpacked(packed: Tensor, block_scales: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight `[rows, columns]` in `dtype`.

    packed: `[rows, columns / 2]`, U8; of two neighbouring columns the even one is the high half of the byte.
    block_scales: `[rows, columns / 16]`, E4M3.  scale: scalar, float32.
    The product is taken in float32, the two scales first, and rounded once to `dtype`.
    """
    rows, half = packed.shape
    weight = torch.empty(rows, 2 * half, dtype=dtype, device=packed.device)
    values_of = _BYTES.to(packed.device, non_blocking=True)  # else every weight would wait for all work before it
    rows_at_once = max(1, UNPACKED_AT_ONCE // (2 * half))
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        values = functional.embedding(packed[part].int(), values_of).view(-1, 2 * half // FP4_BLOCK, FP4_BLOCK)
        values *= (block_scales[part].float() * scale).unsqueeze(-1)
        weight[part] = values.view(-1, 2 * half)
    return weight


class Nvfp4Linear(nn.Module):
    """A linear map without bias whose weight is NVFP4; it multiplies in the dtype of its input."""

    weight: Tensor
    """Codes `[out, in / 2]`, U8."""
    weight_scale: Tensor
    """Scales of the blocks `[out, in / 16]`, E4M3, in the order of the weight."""
    weight_scale_2: Tensor
    """Scale of the tensor, float32 scalar."""
    pre_quant_scale: Tensor | None
    """What the input is multiplied by first, `[in]`, bfloat16; None where the weight was quantised as it was."""

    def __init__(self, num_inputs: int, num_outputs: int, *, has_pre_quant_scale: bool) -> None:
        super().__init__()
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.register_buffer("weight", torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8))
        scales = torch.empty(num_outputs, num_inputs // FP4_BLOCK, dtype=torch.float8_e4m3fn)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_scale_2", torch.empty((), dtype=torch.float32))
        input_scale = torch.empty(num_inputs, dtype=torch.bfloat16) if has_pre_quant_scale else None
        self.register_buffer("pre_quant_scale", input_scale)

    def forward(self, x: Tensor) -> Tensor:
        """x: `[..., in]`, bfloat16 or float32. Returns `[..., out]` in the same dtype."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        return functional.linear(x, unpacked(self.weight, self.weight_scale, self.weight_scale_2, x.dtype))


class Int8Embedding(nn.Module):
    """An embedding of INT8 rows with a scale each; its rows come out in the dtype that the model computes in."""

    weight: Tensor
    """Rows `[ids, width]`, INT8."""
    weight_scale: Tensor
    """Scale of each row `[ids, 1]`, float32."""

    def __init__(self, num_embeddings: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(num_embeddings, width, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.empty(num_embeddings, 1, dtype=torch.float32))
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """ids: `[...]`, int64. Returns `[..., width]`."""
        # Indexing, not an embedding: that is not there for every integer type.
        return (self.weight[ids].float() * self.weight_scale[ids]).to(self._dtype)
