"""Attention of a forward's rows over the retained rows and their own; the kernel choice lives here.

Streaming and dense forwards round differently, each like the implementation that it is compared with, and on a CPU to
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.functional import scaled_dot_product_attention

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of every row's angles, each `[N, 1, 48]` in the compute dtype."""
Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the rows' own K and V, returns all that they attend to."""


def self_attention(
    attn: Any, hidden: Tensor, rotary: Rotary | None = None, gather: Gather | None = None, *, dense: bool = False
) -> Tensor:
    """The attention branch of one block over rows `[N, hidden]`.

    attn: the published attention module; each projection is called, so adapters attached to it apply.
    Norm per head, then rotation, then attention over what `gather` returns: the rows alone where it is None.
    dense: whether it rounds like the dense reference, in `rotate` and in `attend`.
    """
    out: Tensor = attn.to_out[0](_heads(attn, hidden, rotary, gather, dense=dense))
    return out


def attention_over(attn: Any, hidden: Tensor, rotary: Rotary, context: Tensor, context_rotary: Rotary) -> Tensor:
    """The attention branch of rows `[N, hidden]` of a dense forward over rows `[P, hidden]`, theirs among them.

    Only keys and values of the context are projected. It rounds as `self_attention` with `dense` does.
    """
    heads = (attn.heads, attn.head_dim)
    query = rotate(attn.norm_q(attn.to_q(hidden).unflatten(-1, heads)), rotary, dense=True)
    key = rotate(attn.norm_k(attn.to_k(context).unflatten(-1, heads)), context_rotary, dense=True)
    value = attn.to_v(context).unflatten(-1, heads)
    out: Tensor = attn.to_out[0](attend(query, key, value, fused=True).flatten(1))
    return out


def _heads(attn: Any, hidden: Tensor, rotary: Rotary | None, gather: Gather | None, *, dense: bool) -> Tensor:
    """What the heads attend to, `[N, h d]`; queries, keys and values of a whole clip are free again once it returns."""
    heads = (attn.heads, attn.head_dim)
    # One after the other, so that of queries and keys never both the rotated and the unrotated rows are there.
    query = rotate(attn.norm_q(attn.to_q(hidden).unflatten(-1, heads)), rotary, dense=dense)  # [N, h, d]
    key = rotate(attn.norm_k(attn.to_k(hidden).unflatten(-1, heads)), rotary, dense=dense)
    value = attn.to_v(hidden).unflatten(-1, heads)
    if gather is not None:
        key, value = gather(key, value)  # [P + N, h, d]
    return attend(query, key, value, fused=dense).flatten(1)


def rotate(rows: Tensor, rotary: Rotary | None, *, dense: bool = False) -> Tensor:
    """Rotates channel i of `[N, h, d]` against channel i + 48; the channels behind the rotated ones pass through.

    rotary: None leaves the rows as they are.
    dense: whether both products are rounded to the rows' dtype before their sum. The streaming reference rounds one and
    fuses the other with the sum.
    """
    if rotary is None:
        return rows
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = rows.split((half, half, rows.shape[-1] - 2 * half), dim=-1)
    if dense:
        rotated = (first * cos - second * sin, second * cos + first * sin)
    else:
        rotated = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    return torch.cat((*rotated, rest), dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, *, fused: bool = False) -> Tensor:
    """Softmax attention of `[N, h, d]` over `[P + N, h, d]` at scale `d^-0.5`; no mask: what is given is visible.

    fused: on a CPU too, the kernel that never holds the weights of a whole head, which grow with the square of the
    rows: 2.6 GB for a 15 s clip of 512 x 288 on the tiny model. Its rounding is not that of the streaming reference.
    """
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))  # [h, rows, d]
    with _full_precision_math():
        if fused or q.is_cuda:
            # PyTorch's fused kernels need a batch axis; the plain one would hold every head's weights at once.
            return scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1)
        return scaled_dot_product_attention(q, k, v).transpose(0, 1)  # the plain kernel: the reference's bits


@contextmanager
def _full_precision_math() -> Iterator[None]:
    """Keeps the math kernel from summing in half precision, for this call only."""
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()
    cuda.allow_fp16_bf16_reduction_math_sdp(False)
    try:
        yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(before)
