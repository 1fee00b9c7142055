"""Stored rows: byte for byte those of the golden vectors, whatever blocks they are worked through in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from h3stream.errors import UnsupportedError
from services.dit.refine import codecs
from services.dit.refine.codecs import Codec, Fp8, Int4, make_codec

ROOT = Path(__file__).parents[5]
FIXTURES = ROOT / "tests" / "fixtures" / "audio_refine"
FACTS: dict[str, Any] = json.loads((FIXTURES / "codec.json").read_text())
PRECISIONS = ("bf16", "fp8", "int4")


@pytest.fixture(scope="module")
def vectors() -> dict[str, Tensor]:
    return load_file(FIXTURES / "codec.safetensors")


def encoded(codec: Codec, x: Tensor) -> tuple[Tensor, Tensor | None]:
    payload, scales = codec.payload(*x.shape), codec.scales(*x.shape)
    codec.encode(x, payload, scales)
    return payload, scales


def decoded(codec: Codec, payload: Tensor, scales: Tensor | None, width: int, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(payload), width), float("nan"), dtype=dtype)
    codec.decode(payload, scales, out)
    return out


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", FACTS)
def test_rows_are_stored_byte_for_byte_as_in_the_vectors(name: str, vectors: dict[str, Tensor]) -> None:
    case, _, precision = name.partition(".")
    x = vectors[f"{case}.input"]
    codec = make_codec(precision)
    payload, scales = encoded(codec, x)
    facts = FACTS[name]
    assert list(payload.shape) == facts["payload_shape"]
    assert str(payload.dtype) == facts["payload_dtype"]
    assert as_bytes(payload) == as_bytes(vectors[f"{name}.payload"])
    if facts["scales_shape"] is None:
        assert scales is None
    else:
        assert scales is not None
        assert list(scales.shape) == facts["scales_shape"]
        assert as_bytes(scales) == as_bytes(vectors[f"{name}.scales"])
    assert codec.bytes_per_row(x.shape[1]) * len(x) == facts["bytes"]
    assert payload.nbytes + (0 if scales is None else scales.nbytes) == facts["bytes"]
    out = decoded(codec, payload, scales, x.shape[1], torch.float32)
    torch.testing.assert_close(out, vectors[f"{name}.decoded"].float(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", [1, 127, 128, 200, 256])
def test_a_row_does_not_depend_on_the_rows_around_it(
    precision: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = make_codec(precision)
    x = torch.randn(11, width, generator=torch.Generator().manual_seed(1)) * 5
    payload, scales = encoded(codec, x)
    out = decoded(codec, payload, scales, width, torch.float32)
    monkeypatch.setattr(codecs, "ENCODE_ROWS", 4)
    monkeypatch.setattr(codecs, "HOST_DECODE_ROWS", 3)
    in_blocks, block_scales = encoded(codec, x)
    assert as_bytes(in_blocks) == as_bytes(payload)
    assert (block_scales is None) == (scales is None)
    if block_scales is not None and scales is not None:
        assert as_bytes(block_scales) == as_bytes(scales)
    assert torch.equal(decoded(codec, payload, scales, width, torch.float32), out)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("width", [200, 256])
def test_decoding_in_bf16_is_decoding_in_float32_rounded_once(precision: str, width: int) -> None:
    codec = make_codec(precision)
    stored = encoded(codec, torch.randn(9, width, generator=torch.Generator().manual_seed(2)))
    in_float = decoded(codec, *stored, width, torch.float32)
    assert torch.equal(decoded(codec, *stored, width, torch.bfloat16), in_float.bfloat16())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_decoding_writes_part_of_a_larger_buffer_and_nothing_beside_it(precision: str) -> None:
    codec = make_codec(precision)
    stored = encoded(codec, torch.randn(4, 256, generator=torch.Generator().manual_seed(3)))
    whole = torch.full((8, 300), 9.0)
    codec.decode(*stored, whole[2:6, :256])
    assert torch.equal(whole[2:6, :256], decoded(codec, *stored, 256, torch.float32))
    whole[2:6, :256] = 9.0
    assert bool((whole == 9.0).all())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_encoding_leaves_its_input_as_it_was(precision: str) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(4))
    before = x.clone()
    encoded(make_codec(precision), x)
    assert torch.equal(x, before)


def test_int4_puts_the_earlier_channel_into_the_low_half_of_a_byte() -> None:
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 7.0, -7.0
    payload, _ = encoded(Int4(), x)
    assert payload[0, 0].item() == 14 | 0 << 4
    assert payload[0, 1].item() == 7 | 7 << 4


def test_bf16_is_exact_for_what_is_computed_in_bf16() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    codec = make_codec("bf16")
    assert torch.equal(decoded(codec, *encoded(codec, x), 64, torch.bfloat16), x)


def test_fp8_is_refused_where_torch_does_not_have_it_and_the_others_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"fp8.*bf16 or int4"):
        Fp8(SimpleNamespace())


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_memory_of_encoding_and_decoding_does_not_grow_with_the_rows(precision: str) -> None:
    """Twice the rows, the same temporaries: those of one block of 16,384 rows, or of 512."""
    peaks = list(_peaks(precision))
    (encode_once, decode_once), (encode_twice, decode_twice) = peaks
    block = codecs.ENCODE_ROWS * 512 * 4
    assert max(encode_once, encode_twice) < 2 * block + (24 << 20)
    assert encode_twice < encode_once + block // 2
    assert max(decode_once, decode_twice) < 24 << 20


def _peaks(precision: str) -> Iterator[tuple[int, int]]:
    program = """
import sys, torch
from services.dit.refine.codecs import ENCODE_ROWS, make_codec
from tests.peak_memory import peak_of
torch.set_num_threads(1)
codec, rows, width = make_codec(sys.argv[1]), int(sys.argv[2]) * ENCODE_ROWS, 512
x = torch.ones(rows, width)
payload, scales = codec.payload(rows, width).view(torch.uint8).zero_(), codec.scales(rows, width).zero_()
payload = payload.view(codec.payload(0, width).dtype)
codec.encode(x[:8], payload[:8], scales[:8]), codec.decode(payload[:8], scales[:8], x[:8])
print(peak_of(lambda: codec.encode(x, payload, scales))[0])
print(peak_of(lambda: codec.decode(payload, scales, x))[0])
"""
    for blocks in ("2", "4"):
        result = subprocess.run(
            [sys.executable, "-c", program, precision, blocks],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        encode, decode = map(int, result.stdout.split())
        yield encode, decode
