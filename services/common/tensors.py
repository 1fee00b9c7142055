"""Tensors on the wire: dtype, shape and little-endian bytes.

They are split to stay under the message limit and checked against the expected shape on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from h3stream.errors import InvalidRequestError
from h3stream.v1 import types_pb2

PART_BYTES = 768 * 1024
"""Bytes of a part: under the 1 MiB message limit with room for the envelope."""

_TO_WIRE = {
    torch.float32: types_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: types_pb2.DATA_TYPE_BFLOAT16,
    torch.int64: types_pb2.DATA_TYPE_INT64,
}
_FROM_WIRE = {int(v): k for k, v in _TO_WIRE.items()}

ExpectedShape = tuple[int | range | None, ...]
"""A shape in which a range stands for the sizes in it and None for any size from 1."""
ExpectedTensor = tuple[tuple[torch.dtype, ...], ExpectedShape]
"""The dtypes that a tensor may have, and its shape."""


def to_parts(name: str, tensor: torch.Tensor) -> Iterator[types_pb2.TensorPart]:
    """The parts of a tensor, in order."""
    # numpy has no bfloat16, so the bytes are taken through an integer view.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for offset in range(0, max(flat.nbytes, 1), PART_BYTES):
        part = types_pb2.TensorPart(name=name, offset_bytes=offset, data=flat[offset : offset + PART_BYTES].tobytes())
        if offset == 0:
            part.data_type = _TO_WIRE[tensor.dtype]
            part.shape.extend(tensor.shape)
        yield part


@dataclass
class _Incoming:
    """A tensor that has arrived in part. Memory grows with what has arrived, not with what was announced."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytearray

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorAssembler:
    """Collects the parts of the tensors of one call and refuses whatever was not expected."""

    def __init__(
        self,
        expected: Mapping[str, ExpectedTensor],
        optional: Collection[str] = (),
    ) -> None:
        """expected: what each must be, by name.  optional: names of those that may be missing."""
        self._expected = expected
        self._optional = optional
        self._incoming: dict[str, _Incoming] = {}

    @classmethod
    def of_floats(cls, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()) -> TensorAssembler:
        """Collects float32 tensors of these shapes."""
        return cls({name: ((torch.float32,), shape) for name, shape in shapes.items()}, optional)

    def add(self, part: types_pb2.TensorPart) -> None:
        """Takes one part. Raises InvalidRequestError for anything but the next part of an expected tensor."""
        incoming = self._incoming.get(part.name)
        if incoming is None:
            incoming = self._incoming[part.name] = self._announced(part)
        elif part.shape or part.data_type:
            raise InvalidRequestError(f"tensor {part.name!r}: a later part states its type or shape again")
        if not part.data:
            raise InvalidRequestError(f"tensor {part.name!r}: a part holds no bytes")
        start = len(incoming.data)
        if part.offset_bytes != start or start + len(part.data) > incoming.num_bytes:
            raise InvalidRequestError(
                f"tensor {part.name!r}: part at byte {part.offset_bytes} of {len(part.data)} bytes, "
                f"expected byte {start} of {incoming.num_bytes}"
            )
        incoming.data += part.data

    def finish(self) -> dict[str, torch.Tensor]:
        """All tensors by name, on the host. Raises InvalidRequestError if one is missing or incomplete."""
        for name in self._expected:
            if name not in self._incoming:
                if name in self._optional:
                    continue
                raise InvalidRequestError(f"tensor {name!r} is missing")
            incoming = self._incoming[name]
            if len(incoming.data) != incoming.num_bytes:
                raise InvalidRequestError(f"tensor {name!r} ends at byte {len(incoming.data)} of {incoming.num_bytes}")
        return {
            name: torch.frombuffer(incoming.data, dtype=incoming.dtype).reshape(incoming.shape)
            for name, incoming in self._incoming.items()
        }

    def _announced(self, part: types_pb2.TensorPart) -> _Incoming:
        if part.name not in self._expected:
            raise InvalidRequestError(
                f"tensor {part.name[:40]!r} is not expected; expected are {sorted(self._expected)}"
            )
        dtypes, expected_shape = self._expected[part.name]
        dtype = _FROM_WIRE.get(part.data_type)
        shape = tuple(part.shape)
        fits = len(shape) == len(expected_shape) and all(
            _fits(size, wanted) for size, wanted in zip(shape, expected_shape, strict=True)
        )
        if dtype is None or dtype not in dtypes or not fits:
            raise InvalidRequestError(
                f"tensor {part.name!r} is {dtype} {list(shape[:8])}, expected {' or '.join(map(str, dtypes))} "
                f"[{', '.join(map(_told, expected_shape))}]"
            )
        return _Incoming(dtype, shape, bytearray())


def _fits(size: int, wanted: int | range | None) -> bool:
    if isinstance(wanted, range):
        return size in wanted
    return size >= 1 and wanted in (None, size)


def _told(wanted: int | range | None) -> str:
    if isinstance(wanted, range):
        return f"{wanted.start} to {wanted.stop - 1}"
    return "any" if wanted is None else str(wanted)
