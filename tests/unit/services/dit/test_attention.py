from __future__ import annotations

import pytest
import torch
from torch.backends import cuda

from services.dit.attention import attend, attention_over, rotate, self_attention
from tests import refine_vectors


def test_every_row_sees_every_key_at_the_scale_of_the_head() -> None:
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(3, 2, 128, generator=draw)
    key, value = torch.randn(7, 2, 128, generator=draw), torch.randn(7, 2, 128, generator=draw)
    weights = torch.einsum("nhd,mhd->hnm", query, key).mul(128**-0.5).softmax(-1)
    torch.testing.assert_close(attend(query, key, value), torch.einsum("hnm,mhd->nhd", weights, value))


def test_rotation_turns_pairs_and_leaves_the_rest() -> None:
    rows = torch.randn(2, 1, 128, generator=torch.Generator().manual_seed(2))
    angles = torch.linspace(0, 3, 48)[None, None].expand(2, 1, 48)
    turned = rotate(rows, (angles.cos(), angles.sin()))
    pairs, turned_pairs = (torch.complex(t[..., :48], t[..., 48:96]) for t in (rows, turned))
    torch.testing.assert_close(turned_pairs, pairs * torch.polar(torch.ones_like(angles), angles))
    assert torch.equal(turned[..., 96:], rows[..., 96:])


def test_dense_rotation_rounds_both_products() -> None:
    draw = torch.Generator().manual_seed(4)
    rows = torch.randn(40, 2, 128, generator=draw).bfloat16()
    angles = torch.randn(40, 1, 48, generator=draw)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    first, second = rows[..., :48], rows[..., 48:96]
    turned = rotate(rows, (cos, sin), dense=True)
    assert torch.equal(turned[..., :48], first * cos - second * sin)
    assert torch.equal(turned[..., 48:96], second * cos + first * sin)
    assert torch.equal(turned[..., 96:], rows[..., 96:])
    assert not torch.equal(turned, rotate(rows, (cos, sin)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_over_themselves_attend_as_a_dense_forwards_rows_do(dtype: torch.dtype) -> None:
    model = refine_vectors.transformer() if dtype == torch.float32 else refine_vectors.half_transformer()
    attn = model.transformer_blocks[0].attn
    draw = torch.Generator().manual_seed(6)
    rows = torch.randn(40, 256, generator=draw).to(dtype)
    angles = torch.randn(40, 1, 48, generator=draw)
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
    expected = self_attention(attn, rows, rotary, dense=True)
    assert torch.equal(attention_over(attn, rows, rotary, rows, rotary), expected)
    some = attention_over(attn, rows[:7], (rotary[0][:7], rotary[1][:7]), rows, rotary)
    torch.testing.assert_close(some, expected[:7])


def test_rows_without_positions_are_not_rotated() -> None:
    rows = torch.randn(3, 2, 128)
    assert rotate(rows, None) is rows


def test_the_fused_kernel_agrees_with_the_plain_one() -> None:
    draw = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(n, 2, 128, generator=draw) for n in (70, 90, 90))
    torch.testing.assert_close(attend(query, key, value, fused=True), attend(query, key, value))


@pytest.fixture
def reduction_allowed():
    before = cuda.fp16_bf16_reduction_math_sdp_allowed()
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    yield
    cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.usefixtures("reduction_allowed")
def test_half_precision_sums_are_off_during_the_call_only() -> None:
    # Where the sum is allowed, torch itself gives other bits than the float32 softmax.
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(64, 2, 128, generator=draw).bfloat16()
    exact = attend(rows.float(), rows.float(), rows.float()).bfloat16()
    assert torch.equal(attend(rows, rows, rows), exact)
    assert cuda.fp16_bf16_reduction_math_sdp_allowed()


@pytest.mark.usefixtures("reduction_allowed")
def test_the_setting_comes_back_after_a_failure() -> None:
    with pytest.raises(RuntimeError):
        attend(torch.zeros(3, 2, 128), torch.zeros(4, 2, 64), torch.zeros(4, 2, 64))
    assert cuda.fp16_bf16_reduction_math_sdp_allowed()
