"""The header of a safetensors file: read alone, in bounded time and memory, and checked as if it were hostile.

Nothing behind the header is read here. The format: eight bytes of little-endian header length, that many bytes of JSON
(name to dtype, shape and offsets; `__metadata__` holds strings), then the tensors' bytes without gaps.
Source: github.com/huggingface/safetensors, README.md, "Format".

Whatever the safetensors library refuses is refused here, and some of what it takes: repeated names, of which it keeps
the last; fields it does not know, which it skips; a tensor told as an array; metadata of null; more than
`MAX_DIMENSIONS`; a header above `MAX_HEADER_BYTES`, where it stops at 100 MB. Nothing that saves weights writes these.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3stream.errors import CheckpointError

MAX_HEADER_BYTES = 8 << 20
"""Largest header that is read. The largest published one, of 2054 tensors, has 230 KB.

The worst that this many bytes can say (130 000 tensors; a list of 2.8 million lists) takes 2 s and 230 MB to read.
"""
MAX_DIMENSIONS = 8
MAX_SIZE = 2**63 - 1
MAX_DEPTH = 64
"""Deepest nesting of JSON; far below what makes Python itself give up, so that any value can be shown."""

BITS: dict[str, int] = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits of an element of each dtype, by its name in a header."""

_PREFIX_BYTES = 8
_MAX_DIGITS = 20
"""Digits of 2^64 and of the lowest 64-bit integer with its sign."""
_SAMPLE_BYTES = 4096
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = 40
_SHORT.maxlist = 2 * MAX_DIMENSIONS
_OTHER_KINDS = (
    (b"PK\x03\x04", "a zip archive, probably a PyTorch pickle"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"version ", "a Git LFS pointer; the file itself has not been downloaded"),
    (b"<", "a web page or XML file"),
    (b"\x1f\x8b", "a gzip archive"),
)
"""How files begin that are taken for safetensors files."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it."""

    dtype: str
    """Name of the element type, a key of `BITS`."""
    shape: tuple[int, ...]
    """Row-major shape; empty for a scalar."""
    start: int
    """Position of its first byte in the file."""
    stop: int
    """Position behind its last byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        return self.stop - self.start

    @property
    def num_elements(self) -> int:
        """Elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself."""

    path: Path
    """The file."""
    size_bytes: int
    """Size of the whole file."""
    data_start: int
    """Position of the first byte behind the JSON."""
    metadata: dict[str, str]
    """Strings of `__metadata__`."""
    tensors: dict[str, TensorInfo]
    """By name, in the order of the file's bytes."""
    text_sha256: str
    """SHA-256 of length and JSON as they are in the file."""


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Raises CheckpointError that names the file and what is wrong with it: not there, not a regular file, another kind of
    file, cut off, too large a header, no valid JSON, unknown dtypes, impossible shapes, offsets that overlap, leave
    gaps or point outside.
    """
    with open_file(path) as fd:
        size = os.fstat(fd).st_size
        prefix = os.pread(fd, _PREFIX_BYTES, 0)
        if len(prefix) < _PREFIX_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file: it is {size} bytes long")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - _PREFIX_BYTES:
            raise CheckpointError(f"{path} {_why_too_long(prefix, length, size)}")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: the header has {length} bytes, at most {MAX_HEADER_BYTES} are accepted"
                + (f"; it begins like {kind}" if (kind := _other_kind(prefix)) else "")
            )
        text = read_exactly(fd, length, _PREFIX_BYTES, path)
    entries = _parse(text, path)
    metadata = _metadata(entries.pop("__metadata__", {}), path)
    data_start = _PREFIX_BYTES + length
    tensors = {}
    for name, entry in entries.items():
        try:
            tensors[name] = _tensor(entry, data_start, size)
        except ValueError as fault:
            raise CheckpointError(f"{path}: tensor {name[:200]!r} {fault}") from None
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_packing(ordered, data_start, size, path)
    return Header(path, size, data_start, metadata, ordered, hashlib.sha256(prefix + text).hexdigest())


def sampled_digest(header: Header) -> str:
    """SHA-256 over a file's header, its size and the first 4 KiB of every tensor: a few megabytes read of any file.

    It tells layouts, precisions and trainings of one architecture apart; it does not prove that two files are the same.
    """
    digest = hashlib.sha256(f"{header.text_sha256} {header.size_bytes}".encode())
    with open_file(header.path) as fd:
        for info in header.tensors.values():
            digest.update(read_exactly(fd, min(info.num_bytes, _SAMPLE_BYTES), info.start, header.path))
    return digest.hexdigest()


def content_digest(path: Path) -> str:
    """SHA-256 of a whole file. Raises CheckpointError if it cannot be read."""
    with open_file(path) as fd, open(fd, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """The descriptor of a regular file that is open for reading for the length of the block.

    Raises CheckpointError for one that is not there, cannot be opened, or is a device, pipe, socket or directory; a
    pipe is never waited for. Symbolic links are followed: the Hugging Face cache consists of them.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        yield fd
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def read_exactly(fd: int, length: int, offset: int, path: Path) -> bytes:
    """Some bytes of a file that is open, a few megabytes at the most. Raises CheckpointError if it ends before."""
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise CheckpointError(f"{path} ends at byte {offset + len(data)}, {offset + length} were announced")
    return data


def strict_json(text: bytes) -> Any:
    """JSON without what its readers disagree about: repeated keys, numbers beyond 64 bits, halves of surrogate pairs.

    Raises ValueError for those and for anything that is no JSON, however deep it is nested.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
        _check_depth(value, MAX_DEPTH)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a string holds half a surrogate pair") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _why_too_long(prefix: bytes, length: int, size: int) -> str:
    if kind := _other_kind(prefix):
        return f"is not a safetensors file but {kind}; only safetensors files are read"
    (swapped,) = struct.unpack(">Q", prefix)
    if 0 < swapped <= size - _PREFIX_BYTES:
        return "states its header length in big-endian byte order; safetensors files are little-endian"
    return (
        f"is cut off or not a safetensors file: its first bytes state a header of {length} bytes, "
        f"but the file has {size} in all"
    )


def _other_kind(prefix: bytes) -> str | None:
    return next((kind for magic, kind in _OTHER_KINDS if prefix.startswith(magic)), None)


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        entries = strict_json(text)
    except ValueError as error:  # JSON and UTF-8 errors, integers of thousands of digits
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return entries


def _check_depth(value: Any, num_left: int) -> None:
    if type(value) not in (dict, list):
        return
    if num_left == 0:
        raise ValueError("it is nested too deeply")
    for inner in value.values() if type(value) is dict else value:
        if type(inner) in (dict, list):
            _check_depth(inner, num_left - 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    if digits == "-0":  # which other readers take for a fraction
        raise ValueError("-0 is no integer")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _metadata(entry: Any, path: Path) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise CheckpointError(f"{path}: the header's __metadata__ must map strings to strings")
    return entry


def _tensor(entry: Any, data_start: int, size: int) -> TensorInfo:
    """A header's entry, checked. Raises ValueError that goes on from the tensor's name."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("must state dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"has the unknown dtype {_told(dtype)}; known are {', '.join(sorted(BITS))}")
    # The product without zeros, too, for readers that multiply before they meet the zero.
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) > MAX_SIZE:
        raise ValueError(f"has the impossible shape {_told(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"has the impossible offsets {_told(offsets)}")
    begin, end = offsets
    if not begin <= end <= size - data_start:
        raise ValueError(
            f"lies at bytes {begin} to {end} of the data, which has {size - data_start}: the file is cut off "
            "or its header is wrong"
        )
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (end - begin):
        raise ValueError(f"is {dtype} {shape}, which needs {bits / 8:.16g} bytes; its offsets give {end - begin}")
    return TensorInfo(dtype, tuple(shape), data_start + begin, data_start + end)


def _are_sizes(values: Any) -> bool:
    # type() and not isinstance(): true and false are no sizes.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)


def _told(value: Any) -> str:
    """A value of any size and depth in a few characters, none of which a terminal obeys."""
    return _SHORT.repr(value)


def _check_packing(tensors: dict[str, TensorInfo], data_start: int, size: int, path: Path) -> None:
    """The tensors, in order of their bytes, must cover the data: nothing twice, nothing hidden between them."""
    position = data_start
    previous = "the header"
    for name, info in tensors.items():
        if info.start < position:
            raise CheckpointError(f"{path}: tensor {name[:200]!r} overlaps {previous[:200]!r}")
        if info.start > position:
            raise CheckpointError(f"{path}: {info.start - position} bytes before {name[:200]!r} belong to no tensor")
        position, previous = info.stop, name
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes behind the last tensor belong to no tensor")
