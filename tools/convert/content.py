"""Where the rows of a new tensor come from, and reading them: a block of rows at a time, never a whole tensor.

Layouts differ in names and in the order of rows. What the loader's `split_rows` and `join_rows` do to weights is done
here to row numbers, so the two cannot disagree; the weights themselves are copied from file to file in that order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from h3stream.errors import CheckpointError
from services.checkpoints.header import open_file
from services.checkpoints.key_map import KeyMap, Rule, Shape
from services.checkpoints.source import StoredTensor
from services.common.weights import DTYPES, join_rows, split_rows

BLOCK_BYTES = 8 << 20
"""Most bytes that are read at a time, but at least one row: larger blocks are no faster."""

_STRIDE = 1 << 40
"""Distance between the row numbers of two tensors; no tensor has as many rows."""


class Content(Protocol):
    """What a new tensor holds."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Name of its dtype in a header."""

    def blocks(self, files: SourceFiles) -> Iterator[Tensor]:
        """Its elements in order, some whole rows at a time, in the dtype it is to have. Raises CheckpointError."""


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a stored tensor."""

    stored: StoredTensor
    """The tensor. One without dimensions has a single row."""
    start: int
    """First row."""
    stop: int
    """Row behind the last."""


@dataclass(frozen=True)
class Rows:
    """Rows of stored tensors, one after the other."""

    runs: tuple[Run, ...]
    """The rows in their new order."""
    shape: Shape
    """Shape of the new tensor."""
    dtype: str
    """Dtype of the new tensor; the stored ones are converted to it."""

    def blocks(self, files: SourceFiles) -> Iterator[Tensor]:
        """As `Content.blocks`."""
        for run in self.runs:
            for block in files.rows(run):
                yield block.to(DTYPES[self.dtype])


@dataclass(frozen=True)
class Folded:
    """The weight that weight norm computes: `g * v / |v|`, the norm over all but the first dimension."""

    g: StoredTensor
    """Norms of the rows, `[rows, 1, ...]`."""
    v: StoredTensor
    """Directions of the rows."""
    dtype: str = "F32"
    """Dtype of the new tensor."""

    @property
    def shape(self) -> Shape:
        """As `Content.shape`."""
        return self.v.info.shape

    def blocks(self, files: SourceFiles) -> Iterator[Tensor]:
        """As `Content.blocks`."""
        start = 0
        for v in files.rows(whole(self.v)):
            (g,) = files.rows(Run(self.g, start, start + len(v)))
            # What the class itself computes with: other formulas differ in the last bit.
            yield torch._weight_norm(v, g, 0)
            start += len(v)


@dataclass(frozen=True)
class Unfolded:
    """Weight norm of a plain weight: its own rows as directions, and their norms.

    Folding it again gives the same weight, bit for bit. What the weight was folded from is not known any more.
    """

    weight: StoredTensor
    """The weight."""
    is_norm: bool
    """Whether this is "g", the norms, or "v", the directions."""
    dtype: str = "F32"
    """Dtype of the new tensor."""

    @property
    def shape(self) -> Shape:
        """As `Content.shape`."""
        rows, *rest = self.weight.info.shape
        return (rows, *(1 for _ in rest)) if self.is_norm else (rows, *rest)

    def blocks(self, files: SourceFiles) -> Iterator[Tensor]:
        """As `Content.blocks`."""
        for block in files.rows(whole(self.weight)):
            rows = torch.ones((len(block), *(1 for _ in block.shape[1:])))
            _, norms = torch._weight_norm_interface(block, rows, 0)
            # A row of zeros has a norm and no direction: any other gives it back.
            yield norms if self.is_norm else torch.where(norms == 0, rows, block)


@dataclass(frozen=True)
class Values:
    """Numbers that no tensor of the source holds."""

    values: tuple[float, ...]
    """The numbers."""
    shape: Shape
    """Shape of the new tensor."""
    dtype: str
    """Dtype of the new tensor."""

    def blocks(self, files: SourceFiles) -> Iterator[Tensor]:
        """As `Content.blocks`."""
        yield torch.tensor(self.values, dtype=torch.float64).to(DTYPES[self.dtype])


def whole(stored: StoredTensor) -> Run:
    """All rows of a tensor."""
    return Run(stored, 0, stored.info.shape[0] if stored.info.shape else 1)


def num_bytes(content: Content) -> int:
    """Bytes that a new tensor takes."""
    return math.prod(content.shape) * DTYPES[content.dtype].itemsize


class Parameters:
    """The parameters of a published class as a checkpoint stores them."""

    def __init__(self, tensors: Mapping[str, StoredTensor], key_map: KeyMap) -> None:
        """tensors: of the checkpoint, checked against the map."""
        self._places = {
            target: (stored, key_map[key], index)
            for key, stored in tensors.items()
            if key in key_map
            for index, target in enumerate(key_map[key].targets)
        }

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._places

    def stored(self, parameter: str) -> StoredTensor:
        """The tensor that holds a parameter."""
        return self._places[parameter][0]

    def rows(self, rule: Rule, shape: Shape, dtype: str | None) -> Rows:
        """What the stored tensor of a rule holds in another layout.

        shape: of that tensor.  dtype: its dtype; None for the one that its parameters are stored in.
        Raises CheckpointError if they are stored in several.
        """
        places = [self._places[target] for target in rule.targets]
        stored = {id(tensor): tensor for tensor, _, _ in places}
        dtypes = {tensor.info.dtype for tensor in stored.values()}
        if dtype is None and len(dtypes) > 1:
            raise CheckpointError(
                f"{', '.join(rule.targets)} become one tensor and are stored in {' and '.join(sorted(dtypes))}; "
                "say with --dtype which it shall have"
            )
        firsts = {key: index * _STRIDE for index, key in enumerate(stored)}
        numbers = (
            split_rows(source_rule, firsts[id(tensor)] + torch.arange(whole(tensor).stop))[index]
            for tensor, source_rule, index in places
        )
        runs = _runs(join_rows(rule, numbers), list(stored.values()))
        return Rows(runs, shape, dtype or dtypes.pop())


def _runs(rows: Tensor, tensors: list[StoredTensor]) -> tuple[Run, ...]:
    """Row numbers `[rows]` as runs; number `i * _STRIDE + r` is row r of tensor i."""
    if not len(rows):
        return ()
    starts = torch.cat((torch.tensor([0]), torch.where(rows.diff() != 1)[0] + 1))
    lengths = torch.cat((starts, torch.tensor([len(rows)]))).diff()
    runs = []
    for first, length in zip(rows[starts].tolist(), lengths.tolist(), strict=True):
        index, row = divmod(first, _STRIDE)
        runs.append(Run(tensors[index], row, row + length))
    return tuple(runs)


class SourceFiles:
    """The files that are read, each opened once, for the length of a `with` block."""

    def __init__(self) -> None:
        self._files = ExitStack()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def rows(self, run: Run) -> Iterator[Tensor]:
        """The rows of a run as they are stored, some at a time. Raises CheckpointError."""
        info = run.stored.info
        row_shape = info.shape[1:]
        row_bytes = info.num_bytes // whole(run.stored).stop if info.num_bytes else 0
        at_a_time = max(1, BLOCK_BYTES // max(1, row_bytes))
        for row in range(run.start, run.stop, at_a_time):
            count = min(at_a_time, run.stop - row)
            data = self._read(run.stored, info.start + row * row_bytes, count * row_bytes)
            empty = torch.empty(0, dtype=DTYPES[info.dtype])
            values = torch.frombuffer(data, dtype=empty.dtype) if data else empty
            yield values.reshape((count, *row_shape) if info.shape else ())

    def _read(self, stored: StoredTensor, offset: int, length: int) -> bytearray:
        if stored.path not in self._descriptors:
            self._descriptors[stored.path] = self._files.enter_context(open_file(stored.path))
        data = bytearray(length)
        position = 0
        while position < length:
            try:
                count = os.preadv(self._descriptors[stored.path], [memoryview(data)[position:]], offset + position)
            except OSError as error:
                raise CheckpointError(f"{stored.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{stored.path} has changed while it was read")
            position += count
        return data
