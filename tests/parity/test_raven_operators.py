"""Single operators against the RAVEN vectors: the roundings that a whole float32 rollout cannot see."""

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm

from services.dit.adaln import add_gated, modulate, modulation, time_embedding
from services.dit.adapters import add_residuals
from services.dit.attention import rotate
from services.dit.rollout import renoised, transition
from services.dit.rows import ChunkLatents
from services.dit.weights import load_transformer
from tests.raven_vectors import relative_l2, tensors, write_transformer


@pytest.fixture(scope="module")
def ops():
    return tensors("ops")


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    path = tmp_path_factory.mktemp("raven") / "transformer"
    write_transformer(path)
    return load_transformer(path, "bfloat16")


def test_the_shared_adaln_input_is_rounded_after_silu(ops, transformer):
    seen = []
    hook = transformer.norm_out.linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    replace = transformer.time_embedder.register_forward_hook(lambda module, args, out: ops["adaln.t_emb_fp32"])
    modulation(transformer, tuple(ops["adaln.t"].tolist()))
    hook.remove()
    replace.remove()
    assert torch.equal(seen[0], ops["adaln.input_bf16"])


def test_the_time_embedding_agrees(ops, transformer):
    embedding = time_embedding(transformer, tuple(ops["adaln.t"].tolist()))
    assert embedding.dtype == torch.float32
    assert relative_l2(embedding, ops["adaln.t_emb_fp32"]) <= 3e-6


def test_a_gated_branch_is_rounded_before_it_is_added(ops):
    hidden = ops["gate.x"].clone()
    add_gated(hidden, ops["gate.branch"], ops["gate.gate"], ops["gate.row"])
    assert torch.equal(hidden, ops["gate.out"])


def test_scale_and_shift_are_rounded_one_by_one(ops):
    result = modulate(ops["mod.h"], ops["mod.shift"], 1 + ops["mod.scale"], ops["mod.row"])
    assert torch.equal(result, ops["mod.out"])


def test_context_is_renoised_with_float32_coefficients(ops):
    x0, eps = ops["renoise.x0"], ops["renoise.eps"]
    mixed = renoised(ChunkLatents(x0, x0), ChunkLatents(eps, eps))
    assert torch.equal(mixed.video, ops["renoise.out"])
    assert torch.equal(mixed.audio, ops["renoise.out"])
    assert not torch.equal(mixed.video, ops["renoise.wrong"])


def test_a_transition_is_exact(ops):
    sigma, next_sigma = ops["step.sigmas"].tolist()
    x_t, velocity, eps = (ChunkLatents(ops[f"step.{name}"], ops[f"step.{name}"]) for name in ("x_t", "v", "eps"))
    x0, x_next = transition(x_t, velocity, eps, (sigma, sigma), (next_sigma, next_sigma))
    for stream in ("video", "audio"):
        assert torch.equal(getattr(x0, stream), ops["step.x0"])
        assert torch.equal(getattr(x_next, stream), ops["step.x_next"])


@pytest.mark.parametrize("rows", [300, 1])
def test_two_adapters_are_summed_in_float32_and_rounded_once(ops, rows):
    terms = [(ops[f"lora.A{i}"], ops[f"lora.B{i}"], ops[f"lora.scale{i}"].item()) for i in (0, 1)]
    out = add_residuals(ops["lora.x"][:rows], ops["lora.base_out"][:rows].clone(), terms)
    if rows == 300:
        assert torch.equal(out, ops["lora.out"])
    else:  # another row count, another matrix kernel: one bfloat16 unit
        torch.testing.assert_close(out, ops["lora.out"][:rows], rtol=2**-7, atol=0)


def test_the_base_linear_of_the_vectors_is_ours(ops):
    base = nn.Linear(48, 56, dtype=torch.bfloat16)
    base.weight.data, base.bias.data = ops["lora.w"], ops["lora.b"]
    torch.testing.assert_close(base(ops["lora.x"]).detach(), ops["lora.base_out"], rtol=2**-7, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_norm_and_rotation_agree(ops, transformer, dtype, tolerance, capsys):
    name = "fp32" if dtype == torch.float32 else "bf16"
    assert torch.equal(transformer.rope.inv_freq, ops["rope.inv_freq"])
    cos, sin = transformer.rope(ops["rope.positions"])
    rotary = cos[:, None, :48].to(dtype), sin[:, None, :48].to(dtype)
    for head in ("q", "k"):
        normed = rms_norm(ops[f"rope.{name}.{head}_in"], (128,), ops[f"rope.{name}.{head}w"], 1e-5)
        result, expected = rotate(normed, rotary), ops[f"rope.{name}.{head}_out"]
        difference = (result - expected).abs().max().item() if dtype == torch.float32 else relative_l2(result, expected)
        with capsys.disabled():
            print(f"\nnorm and rotation of {head}, {name}: {difference:.2e}")
        assert difference <= tolerance
