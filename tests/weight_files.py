"""Weight files for tests: any bytes as a header, and whole published files that take no room on the disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.checkpoints.header import BITS, read_header

ROOT = Path(__file__).parent
TABLES = ROOT / "fixtures" / "checkpoints"


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of this header (as JSON unless it is bytes) and data, stating `length` or the header's true length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def describe(tensors: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, Any]:
    """Header entries of tensors (name to shape and dtype), one behind the other."""
    entries: dict[str, Any] = {}
    position = 0
    for name, (shape, dtype) in tensors.items():
        num_bits = BITS[dtype]
        for size in shape:
            num_bits *= size
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position := position + num_bits // 8],
        }
    return entries


def write_sparse(
    path: Path, tensors: Mapping[str, tuple[Sequence[int], str]], metadata: Mapping[str, str] | None = None
) -> Path:
    """Writes a file of any size whose tensors are all zero: its data is a hole, which takes no room on the disk."""
    entries = describe(tensors)
    size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    head = file_bytes({"__metadata__": dict(metadata), **entries} if metadata else entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return path


def write_shards(folder: Path, tensors: Mapping[str, tuple[Sequence[int], str]], num_files: int) -> Path:
    """A component folder of sparse shards with their index."""
    weight_map = {}
    for number in range(num_files):
        part = {key: tensors[key] for key in list(tensors)[number::num_files]}
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        write_sparse(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def fill(path: Path, key: str, values: Sequence[float]) -> None:
    """Gives an F32 tensor of a sparse file its values."""
    with path.open("r+b") as file:
        file.seek(read_header(path).tensors[key].start)
        file.write(struct.pack(f"<{len(values)}f", *values))


def published(name: str) -> dict[str, tuple[Sequence[int], str]]:
    """Tensors of a published file by the key table of that name."""
    tensors = json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))["tensors"]
    return {key: (shape, dtype) for key, (shape, dtype) in tensors.items()}
