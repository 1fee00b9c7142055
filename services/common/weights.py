"""Tensors from published files straight to where they are used: never more than one of them twice in memory.

Files are read and not mapped: what a process holds is then what it has read, page by page in order, a file that is cut
off later cannot end the process, and the tensors can be pinned.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h3stream.errors import CheckpointError
from services.checkpoints.header import open_file
from services.checkpoints.key_map import KeyMap, Rows, Rule
from services.checkpoints.source import StoredTensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes that are read, by their names in a header."""


def load_parameters(
    tensors: Mapping[str, StoredTensor],
    key_map: KeyMap,
    dtype_of: Callable[[str], torch.dtype | None] = lambda target: None,
) -> dict[str, Tensor]:
    """The parameters that a checkpoint's tensors become, in host memory.

    tensors: checked against the map (`key_map.problems`).  dtype_of: the dtype that a parameter is kept in; None keeps
    the stored one. At no time is more than one stored tensor in memory beside the parameters.
    Raises CheckpointError if a file has changed or cannot be read any more.
    """
    wanted = {key: tensor for key, tensor in tensors.items() if key in key_map and key_map[key].targets}
    # All parameters of a published tensor run in one dtype.
    dtypes = {key: dtype_of(key_map[key].targets[0]) for key in wanted}
    kept = {
        key
        for key, tensor in wanted.items()
        if key_map[key].rows is Rows.SAME and dtypes[key] in (None, DTYPES.get(tensor.info.dtype))
    }
    # Taken once: an allocator that keeps some of what is freed would add up over hundreds of tensors.
    largest = max((tensor.info.num_bytes for key, tensor in wanted.items() if key not in kept), default=0)
    scratch = torch.empty(largest, dtype=torch.uint8)
    parameters: dict[str, Tensor] = {}
    for path, group in _by_file(wanted):
        with open_file(path) as fd:
            for key, stored in group:
                tensor = _read(fd, key, stored, None if key in kept else scratch)
                rule = key_map[key]
                parameters.update(zip(rule.targets, split_rows(rule, tensor, dtypes[key]), strict=True))
    return parameters


def read_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Reads tensors one by one, in the order given; one file at a time is open. Raises CheckpointError."""
    for path, group in _by_file(tensors):
        with open_file(path) as fd:
            for key, stored in group:
                yield key, _read(fd, key, stored)


def read_tensor(key: str, stored: StoredTensor) -> Tensor:
    """Reads one tensor. Raises CheckpointError that names it by its key."""
    ((_, tensor),) = read_tensors({key: stored})
    return tensor


def split_rows(rule: Rule, stored: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The parameters of a rule from its stored tensor `[rows, ...]`, each contiguous.

    dtype: theirs; None keeps the stored one. Only a tensor that needs no change is returned as it is; all others are
    new, so none of them keeps the stored one alive. Nothing else is allocated.
    """
    dtype = dtype or stored.dtype
    match rule.rows:
        case Rows.SAME:
            return (stored.to(dtype),)
        case Rows.STACKED:
            return tuple(_copied((part,), dtype) for part in stored.chunk(len(rule.targets)))
        case Rows.PER_HEAD:
            heads = stored.unflatten(0, (rule.num_heads, len(rule.targets), -1))
            return tuple(_copied(heads[:, index].unbind(0), dtype) for index in range(len(rule.targets)))
        case Rows.SWAPPED_HALVES:
            first, second = stored.chunk(2)
            return (_copied((second, first), dtype),)


def join_rows(rule: Rule, parameters: Iterable[Tensor]) -> Tensor:
    """The stored tensor of a rule's parameters: the inverse of `split_rows`."""
    given = tuple(parameters)
    match rule.rows:
        case Rows.SAME:
            return given[0]
        case Rows.STACKED:
            return torch.cat(given)
        case Rows.PER_HEAD:
            heads = [parameter.unflatten(0, (rule.num_heads, -1)) for parameter in given]
            return torch.stack(heads, dim=1).flatten(0, 2)
        case Rows.SWAPPED_HALVES:
            return split_rows(rule, given[0])[0]


def _copied(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of all parts in one new tensor."""
    first = parts[0]
    whole = torch.empty((sum(len(part) for part in parts), *first.shape[1:]), dtype=dtype, device=first.device)
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        rows.copy_(part)
    return whole


def _by_file(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[Path, Iterable[tuple[str, StoredTensor]]]]:
    return itertools.groupby(tensors.items(), lambda item: item[1].path)


def _read(fd: int, key: str, stored: StoredTensor, scratch: Tensor | None = None) -> Tensor:
    """The tensor, in memory of its own or at the start of `scratch`, `[bytes]`."""
    info = stored.info
    if info.dtype not in DTYPES:
        raise CheckpointError(f"{stored.path}: {key!r} is {info.dtype}, which is not read here")
    dtype = DTYPES[info.dtype]
    if scratch is None:
        tensor = torch.empty(info.shape, dtype=dtype)
    else:
        tensor = scratch[: info.num_bytes].view(dtype).view(info.shape)
    buffer: Any = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    position = 0
    while position < info.num_bytes:
        count = os.preadv(fd, [buffer[position:]], info.start + position)  # open_file translates what it raises
        if count == 0:
            raise CheckpointError(f"{stored.path} has changed: it ends within {key!r}")
        position += count
    return tensor
