"""Tensors on the wire: dtype, shape and little-endian bytes, split to stay under the message limit and checked on arrival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
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

ExpectedShape = tuple[int | None, ...]
"""A shape in which None stands for any size from 1."""


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


class TensorAssembler:
    """Collects the parts of the tensors of one call and refuses whatever was not expected."""

    def __init__(self, expected: Mapping[str, tuple[tuple[torch.dtype, ...], ExpectedShape]]) -> None:
        """expected: for each name the dtypes allowed and the shape."""
        self._expected = expected
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}

    def add(self, part: types_pb2.TensorPart) -> None:
        """Takes one part. Raises InvalidRequestError for anything but the next part of an expected tensor."""
        if part.name not in self._tensors:
            self._tensors[part.name] = self._allocate(part)
            self._filled[part.name] = 0
        target = self._tensors[part.name].reshape(-1).view(torch.uint8).numpy()
        start = self._filled[part.name]
        if part.offset_bytes != start or start + len(part.data) > target.nbytes:
            raise InvalidRequestError(
                f"tensor {part.name!r}: part at byte {part.offset_bytes} of {len(part.data)} bytes, "
                f"expected byte {start} of {target.nbytes}"
            )
        target[start : start + len(part.data)] = np.frombuffer(part.data, np.uint8)
        self._filled[part.name] = start + len(part.data)

    def finish(self) -> dict[str, torch.Tensor]:
        """All tensors by name, on the host. Raises InvalidRequestError if one is missing or incomplete."""
        for name in self._expected:
            if name not in self._tensors:
                raise InvalidRequestError(f"tensor {name!r} is missing")
            if self._filled[name] != self._tensors[name].nbytes:
                raise InvalidRequestError(
                    f"tensor {name!r} ends at byte {self._filled[name]} of {self._tensors[name].nbytes}"
                )
        return self._tensors

    def _allocate(self, part: types_pb2.TensorPart) -> torch.Tensor:
        if part.name not in self._expected:
            raise InvalidRequestError(f"tensor {part.name!r} is not expected; expected are {sorted(self._expected)}")
        dtypes, expected_shape = self._expected[part.name]
        dtype = _FROM_WIRE.get(part.data_type)
        shape = tuple(part.shape)
        fits = len(shape) == len(expected_shape) and all(
            size >= 1 and (want is None or size == want) for size, want in zip(shape, expected_shape, strict=True)
        )
        if dtype not in dtypes or not fits:
            raise InvalidRequestError(
                f"tensor {part.name!r} is {dtype} {list(shape)}, expected {' or '.join(map(str, dtypes))} "
                f"{['any' if n is None else n for n in expected_shape]}"
            )
        assert dtype is not None
        return torch.empty(shape, dtype=dtype)
