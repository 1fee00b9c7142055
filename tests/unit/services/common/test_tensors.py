from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.errors import InvalidRequestError
from h3stream.v1 import types_pb2, workers_pb2
from services.common.tensors import PART_BYTES, TensorAssembler, to_parts

FLOATS = (torch.float32, torch.bfloat16)


def assembled(tensor: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Tensor:
    assembler = TensorAssembler({"x": ((tensor.dtype,), shape)})
    for part in to_parts("x", tensor):
        assembler.add(types_pb2.TensorPart.FromString(part.SerializeToString()))
    return assembler.finish()["x"]


def first_part(shape: tuple[int, ...] = (4,), **changes: object) -> types_pb2.TensorPart:
    part = types_pb2.TensorPart(name="x", data_type=types_pb2.DATA_TYPE_FLOAT32, shape=shape, data=bytes(8))
    part.MergeFrom(types_pb2.TensorPart(**changes))  # type: ignore[arg-type]
    return part


@pytest.mark.parametrize("num_elements", [1, PART_BYTES // 4 - 1, PART_BYTES // 4, PART_BYTES // 4 + 1, 500_000])
def test_a_tensor_of_any_size_comes_back_bit_for_bit(num_elements: int) -> None:
    tensor = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    assert torch.equal(assembled(tensor, (None,)), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, -0.0, float("inf"), 1e-45]),
        torch.tensor([[1.0, -2.5, 3e38]], dtype=torch.bfloat16),
        torch.tensor([[0, -1], [2**62, -(2**63)]]),
    ],
)
def test_every_dtype_comes_back_bit_for_bit(tensor: torch.Tensor) -> None:
    back = assembled(tensor, tuple(tensor.shape))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_nan_keeps_its_payload() -> None:
    bits = torch.tensor([0x7FC12345, -1], dtype=torch.int32)
    assert torch.equal(assembled(bits.view(torch.float32), (2,)).view(torch.int32), bits)


def test_a_view_is_sent_as_it_looks() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    assert torch.equal(assembled(tensor, (4, 3)), tensor)


def test_what_arrives_can_be_written_to() -> None:
    back = assembled(torch.zeros(3), (3,))
    back += 1
    assert back.tolist() == [1, 1, 1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([*FLOATS, torch.int64]))
def test_any_shape_comes_back(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    back = assembled(tensor, (None,) * len(shape))
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_parts_stay_below_the_message_limit_with_their_envelope() -> None:
    parts = list(to_parts("a name of ordinary length", torch.zeros(1, 24, 5, 48, 86)))
    assert len(parts) == 3
    for part in parts:
        assert workers_pb2.SampleChunkResponse(tensor=part).ByteSize() < MAX_MESSAGE_BYTES - 128 * 1024


def test_only_the_first_part_states_what_the_tensor_is() -> None:
    first, *rest = to_parts("x", torch.zeros(500_000))
    assert (first.data_type, list(first.shape)) == (types_pb2.DATA_TYPE_FLOAT32, [500_000])
    assert [(p.name, p.data_type, list(p.shape)) for p in rest] == [("x", 0, [])] * 2


def test_tensors_may_arrive_interleaved() -> None:
    a, b = torch.randn(300_000), torch.randn(300_000)
    assembler = TensorAssembler({"a": (FLOATS, (None,)), "b": (FLOATS, (None,))})
    for pair in zip(to_parts("a", a), to_parts("b", b), strict=True):
        for part in pair:
            assembler.add(part)
    back = assembler.finish()
    assert torch.equal(back["a"], a)
    assert torch.equal(back["b"], b)


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (first_part(name="y"), r"tensor 'y' is not expected; expected are \['x'\]"),
        (first_part(data_type=types_pb2.DATA_TYPE_INT64), r"is torch.int64 \[4\], expected torch.float32 or"),
        (first_part(data_type=99), r"is None \[4\], expected"),
        (first_part(shape=(5,)), r"is torch.float32 \[5\], expected .* \[4\]"),
        (first_part(shape=(4, 1)), r"is torch.float32 \[4, 1\], expected .* \[4\]"),
        (first_part(shape=()), r"is torch.float32 \[\], expected .* \[4\]"),
        (first_part(offset_bytes=8), r"part at byte 8 of 8 bytes, expected byte 0 of 16"),
        (first_part(data=bytes(20)), r"part at byte 0 of 20 bytes, expected byte 0 of 16"),
    ],
)
def test_a_first_part_that_was_not_expected_is_refused(part: types_pb2.TensorPart, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        TensorAssembler({"x": (FLOATS, (4,))}).add(part)


@pytest.mark.parametrize("shape", [(0,), (-1,)])
def test_a_free_size_is_at_least_one(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match=r"expected .* \[any\]"):
        TensorAssembler({"x": (FLOATS, (None,))}).add(first_part(shape=shape))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (types_pb2.TensorPart(name="x", offset_bytes=0, data=bytes(8)), "part at byte 0 of 8 bytes, expected byte 8"),
        (types_pb2.TensorPart(name="x", offset_bytes=12, data=bytes(4)), "part at byte 12 of 4 bytes, expected byte 8"),
        (types_pb2.TensorPart(name="x", offset_bytes=8, data=bytes(12)), "of 12 bytes, expected byte 8 of 16"),
        (types_pb2.TensorPart(name="x", offset_bytes=8, data=bytes(8), shape=[4]), "states its type or shape again"),
        (
            types_pb2.TensorPart(name="x", offset_bytes=8, data=bytes(8), data_type="DATA_TYPE_FLOAT32"),
            "states its type or shape again",
        ),
    ],
)
def test_a_later_part_that_does_not_follow_is_refused(part: types_pb2.TensorPart, complaint: str) -> None:
    assembler = TensorAssembler({"x": (FLOATS, (4,))})
    assembler.add(first_part())
    with pytest.raises(InvalidRequestError, match=complaint):
        assembler.add(part)


def test_an_incomplete_tensor_is_refused() -> None:
    assembler = TensorAssembler({"x": (FLOATS, (4,))})
    assembler.add(first_part())
    with pytest.raises(InvalidRequestError, match="tensor 'x' ends at byte 8 of 16"):
        assembler.finish()


def test_a_missing_tensor_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tensor 'x' is missing"):
        TensorAssembler({"x": (FLOATS, (4,))}).finish()


def test_an_optional_tensor_may_be_missing_and_is_otherwise_as_strict() -> None:
    expected = dict.fromkeys("xy", (FLOATS, (4,)))
    assembler = TensorAssembler(expected, optional="y")
    for part in to_parts("x", torch.ones(4)):
        assembler.add(part)
    assert assembler.finish().keys() == {"x"}
    assembler.add(first_part(name="y"))
    with pytest.raises(InvalidRequestError, match="tensor 'y' ends at byte 8 of 16"):
        assembler.finish()
    with pytest.raises(InvalidRequestError, match="tensor 'x' is missing"):
        TensorAssembler(expected, optional="y").finish()


def test_announcing_a_huge_tensor_takes_no_memory() -> None:
    assembler = TensorAssembler({"x": (FLOATS, (None, 5120))})
    assembler.add(first_part(shape=(2**62, 5120)))
    with pytest.raises(InvalidRequestError, match="ends at byte 8 of"):
        assembler.finish()
