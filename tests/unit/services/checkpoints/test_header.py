"""Headers of weight files: read as the safetensors library reads them, or refused with a reason; nothing else."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from h3stream.errors import CheckpointError
from services.checkpoints.header import (
    BITS,
    MAX_HEADER_BYTES,
    content_digest,
    read_header,
    sampled_digest,
    strict_json,
)
from tests.weight_files import describe, file_bytes, write_sparse

ONE = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return str(caught.value)


def library_reading(path: Path) -> tuple[dict[str, tuple[str, list[int]]], dict[str, str]] | None:
    """Dtypes and shapes by name, and metadata, as the safetensors library reads a file; None if it refuses."""
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {name: (one.get_dtype(), list(one.get_shape())) for name, one in slices.items()}
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError):
        return None


def our_reading(path: Path) -> tuple[dict[str, tuple[str, list[int]]], dict[str, str]] | None:
    """The same by our reader."""
    try:
        found = read_header(path)
    except CheckpointError as error:
        message = str(error)
    else:
        return {name: (info.dtype, list(info.shape)) for name, info in found.tensors.items()}, found.metadata
    assert len(message) < 1000
    assert message.isprintable()
    return None


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / "valid.safetensors"
    tensors = {
        "blocks.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "blocks.0.bias": np.arange(3, dtype=np.float16),
        "scale": np.array(2.0, dtype=np.float64),
        "none": np.zeros((0, 7), dtype=np.int8),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_header_says_what_was_written(valid: Path) -> None:
    found = read_header(valid)
    assert found.size_bytes == valid.stat().st_size
    assert found.metadata == {"format": "pt"}
    assert {name: (info.dtype, info.shape) for name, info in found.tensors.items()} == {
        "blocks.0.weight": ("F32", (2, 3)),
        "blocks.0.bias": ("F16", (3,)),
        "scale": ("F64", ()),
        "none": ("I8", (0, 7)),
    }
    weight = found.tensors["blocks.0.weight"]
    content = valid.read_bytes()
    assert np.frombuffer(content[weight.start : weight.stop], np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert (weight.num_bytes, weight.num_elements) == (24, 6)
    assert content[8 : found.data_start].strip().endswith(b"}")


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    entries = describe({"z": ([2], "U8"), "a": ([3], "U8"), "m": ([1], "U8")})
    path = write(tmp_path / "x", file_bytes(dict(reversed(entries.items())), bytes(6)))
    assert list(read_header(path).tensors) == ["z", "a", "m"]


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_is_one_that_the_library_knows(dtype: str, tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x", {"a": ([2, 8], dtype)})
    assert our_reading(path) == library_reading(path) == ({"a": (dtype, [2, 8])}, {})


# ---- files that are something else ----------------------------------------------------------------------------------


def other_kinds(folder: Path) -> dict[str, tuple[bytes, str]]:
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.writestr("archive/data.pkl", b"payload")
    return {
        "zip": ((folder / "x.zip").read_bytes(), "PyTorch pickle"),
        **{f"pickle {level}": (pickle.dumps({"a": 1.5}, level), "a pickle") for level in (2, 3, 4, 5)},
        "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "Git LFS pointer"),
        "html": (b"<!DOCTYPE html><html>404</html>", "web page"),
        "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc", "gzip"),
        "empty": (b"", "0 bytes long"),
        "short": (b"\x01\x00\x00", "3 bytes long"),
        "text": (b"hello world, this is text", "cut off or not a safetensors file"),
    }


def test_files_of_other_kinds_are_named(tmp_path: Path) -> None:
    for name, (content, expected) in other_kinds(tmp_path).items():
        message = refusal(write(tmp_path / "x.safetensors", content))
        assert expected in message, name
        assert str(tmp_path / "x.safetensors") in message, name


def test_no_pickle_is_ever_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    refusal(write(tmp_path / "x.safetensors", pickle.dumps(Trap())))
    assert not (tmp_path / "ran").exists()


def test_a_large_zip_whose_first_bytes_could_be_a_length_is_still_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"PK\x03\x04\x00\x00\x00\x00" + bytes(64))
    os.truncate(path, 100_000_000)  # 67 million, the length that "PK\3\4" states, fits into it
    assert "PyTorch pickle" in refusal(path)


# ---- lengths and places ---------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_is_refused(valid: Path, tmp_path: Path) -> None:
    content = valid.read_bytes()
    for length in range(len(content)):
        assert our_reading(write(tmp_path / "cut", content[:length])) is None, length
    assert our_reading(write(tmp_path / "more", content + b"\0")) is None


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 2**32, 200])
def test_a_header_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x", file_bytes(ONE, bytes(4), length))
    assert f"a header of {length} bytes" in refusal(path)


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x", struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, MAX_HEADER_BYTES * 2)
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: reads.append(count) or pread(fd, count, at))
    assert f"at most {MAX_HEADER_BYTES}" in refusal(path)
    assert sum(reads) == 8


def test_a_header_as_long_as_the_limit_is_read(tmp_path: Path) -> None:
    text = json.dumps(ONE).encode()
    path = write(tmp_path / "x", file_bytes(text + b" " * (MAX_HEADER_BYTES - len(text)), bytes(4)))
    assert our_reading(path) == library_reading(path) == ({"a": ("U8", [4])}, {})


def test_a_length_in_big_endian_order_is_named(tmp_path: Path) -> None:
    text = json.dumps(ONE).encode()
    path = write(tmp_path / "x", struct.pack(">Q", len(text)) + text + bytes(4))
    assert "big-endian" in refusal(path)


def test_a_million_tensors_are_refused_for_the_length_of_their_header(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        entries = (f'"{index}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for index in range(1_000_000))
        text = ("{" + ",".join(entries) + "}").encode()
        file.write(struct.pack("<Q", len(text)) + text)
    assert f"at most {MAX_HEADER_BYTES}" in refusal(path)


@pytest.mark.parametrize(
    ("entries", "data", "expected"),
    [
        pytest.param(
            {**ONE, "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, 6, "'b' overlaps 'a'", id="overlap"
        ),
        pytest.param(
            {**ONE, "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 4, "'b' overlaps 'a'", id="same"
        ),
        pytest.param(
            {**ONE, "b": {"dtype": "U8", "shape": [2], "data_offsets": [6, 8]}}, 8, "2 bytes before 'b'", id="hole"
        ),
        pytest.param({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, 3, "1 bytes before 'a'", id="first"),
        pytest.param(ONE, 9, "5 bytes behind the last tensor", id="rest"),
        pytest.param(ONE, 3, "lies at bytes 0 to 4 of the data, which has 3", id="outside"),
        pytest.param({}, 3, "3 bytes behind the last tensor", id="nothing described"),
        pytest.param({"a": {**ONE["a"], "data_offsets": [4, 0]}}, 4, "lies at bytes 4 to 0", id="backwards"),
        pytest.param({"a": {**ONE["a"], "shape": [3]}}, 4, "needs 3 bytes; its offsets give 4", id="too few"),
        pytest.param(
            {"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1, "needs 1.5 bytes", id="half a byte"
        ),
    ],
)
def test_tensors_that_do_not_tile_the_data_are_refused(
    entries: dict[str, Any], data: int, expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x", file_bytes(entries, bytes(data)))
    assert expected in refusal(path)
    assert library_reading(path) is None


# ---- headers that say nonsense --------------------------------------------------------------------------------------

WRONG_VALUES: list[Any] = [None, True, 1, -1, 1.5, "x", [], [1], {}, {"a": 1}, [None], [True, 4], [0.0, 4], ["0", "4"]]


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("value", WRONG_VALUES, ids=repr)
def test_fields_of_the_wrong_type_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x", file_bytes({"a": {**ONE["a"], field: value}}, bytes(4)))
    assert "tensor 'a'" in refusal(path)


@pytest.mark.parametrize("entry", [*WRONG_VALUES, {**ONE["a"], "more": 1}, {"dtype": "U8", "shape": [4]}], ids=repr)
def test_entries_of_the_wrong_form_are_refused(entry: Any, tmp_path: Path) -> None:
    assert "must state dtype, shape and data_offsets" in refusal(write(tmp_path / "x", file_bytes({"a": entry})))


@pytest.mark.parametrize("metadata", [None, [], "x", 1, {"a": 1}, {"a": None}, {"a": {}}], ids=repr)
def test_metadata_of_another_form_is_refused(metadata: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x", file_bytes({"__metadata__": metadata, **ONE}, bytes(4)))
    assert "__metadata__ must map strings to strings" in refusal(path)


ENTRY = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'"a"', "not a JSON object"),
        (b"\xff\xfe{}", "not valid JSON: 'utf-8' codec"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"\xc3(":' + ENTRY + b"}", "not valid JSON: 'utf-8' codec"),
        (b'{"a":' + ENTRY + b"}\0", "not valid JSON"),
        (b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", "the key 'a' is there twice"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "the key 'dtype' is there twice"),
        (b'{"__metadata__":{},"__metadata__":{},"a":' + ENTRY + b"}", "the key '__metadata__' is there twice"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[NaN]"), "NaN is no JSON number"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[-Infinity]"), "-Infinity is no JSON number"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[1e999]"), "1e999 is too large a number"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[-0]"), "-0 is no integer"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[" + b"9" * 9000 + b"]"), "a number of 9000 digits"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[18446744073709551615]"), "impossible shape"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[1,1,1,1,1,1,1,1,4]"), "impossible shape"),
        (ENTRY.join([b'{"a":', b"}"]).replace(b"[4]", b"[4294967296,4294967296,0]"), "impossible shape"),
        (b'{"a\\ud800":' + ENTRY + b"}", "half a surrogate pair"),
        (b'{"__metadata__":{"a":"\\uDFFF"},"a":' + ENTRY + b"}", "half a surrogate pair"),
    ],
)
def test_text_that_readers_disagree_about_is_refused(text: bytes, expected: str, tmp_path: Path) -> None:
    assert expected in refusal(write(tmp_path / "x", file_bytes(text, bytes(4))))


@pytest.mark.parametrize("depth", [100, 600, 950, 100_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_is_refused(depth: int, opening: bytes, tmp_path: Path) -> None:
    closing = b"]" if opening == b"[" else b"}"
    for place in (b'{"a":%s}', b'{"a":{"dtype":"U8","shape":%s,"data_offsets":[0,4]}}', b'{"__metadata__":{"a":%s}}'):
        nested = opening * depth + b"1" + closing * depth
        path = write(tmp_path / "x", file_bytes(place % nested, bytes(4)))
        assert our_reading(path) is None
        assert library_reading(path) is None


def test_a_repeated_key_among_very_many_is_found(tmp_path: Path) -> None:
    entries = ",".join(f'"{index}":0' for index in range(300_000))
    path = write(tmp_path / "x", file_bytes(f'{{{entries},"299999":0}}'.encode()))
    assert "the key '299999' is there twice" in refusal(path)


def test_nothing_in_a_header_reaches_a_terminal_as_a_command(tmp_path: Path) -> None:
    nasty = "\x1b]0;owned\x07\x1b[31m\n\r\u202e"
    for entries in (
        {nasty: 1},
        {nasty: {**ONE["a"], "dtype": nasty}},
        {nasty: {**ONE["a"], "shape": [nasty]}},
        {nasty * 1000: {**ONE["a"], "data_offsets": nasty}},
        {"a": {**ONE["a"], nasty: 1}},
        {nasty: ONE["a"], nasty + "b": {**ONE["a"], "data_offsets": [0, 4]}},
        {nasty: {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}, "b": {**ONE["a"], "data_offsets": [0, 4]}},
    ):
        message = refusal(write(tmp_path / "x", file_bytes(entries, bytes(4))))
        assert message.isprintable()
        assert len(message) < 1000


# ---- things that are no files ---------------------------------------------------------------------------------------


def test_things_that_are_no_regular_files_are_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s.safetensors"))
        for name, expected in {
            "pipe": "not a regular file",
            "folder": "not a regular file",
            "zero": "not a regular file",
            "loop": "cannot be read",
            "s": "cannot be read",
            "absent": "is missing",
            "x" * 300: "cannot be read",
            "nul\0": "cannot be read",
        }.items():
            path = tmp_path / f"{name}.safetensors"
            assert expected in refusal(path), name
            with pytest.raises(CheckpointError):
                content_digest(path)


def test_a_file_that_may_not_be_read_is_refused(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path, flags: int) -> int:  # file modes do not bind the superuser, who may run the tests
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", deny)
    message = refusal(valid)
    monkeypatch.undo()
    assert message == f"{valid} cannot be read: Permission denied"


def test_an_error_of_the_disk_is_a_typed_error(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, count: int, at: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    assert "Input/output error" in refusal(valid)


def test_a_link_to_a_file_is_followed(valid: Path, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(valid)
    assert read_header(tmp_path / "link.safetensors").tensors == read_header(valid).tensors


# ---- digests --------------------------------------------------------------------------------------------------------


def test_a_digest_tells_headers_and_beginnings_of_tensors_apart(valid: Path, tmp_path: Path) -> None:
    content = bytearray(valid.read_bytes())
    first = sampled_digest(read_header(valid))
    assert first == sampled_digest(read_header(write(tmp_path / "copy", bytes(content))))
    content[-1] ^= 1
    assert first != sampled_digest(read_header(write(tmp_path / "other", bytes(content))))
    renamed = valid.read_bytes().replace(b"blocks.0.bias", b"blocks.1.bias")
    assert first != sampled_digest(read_header(write(tmp_path / "renamed", renamed)))


def test_a_file_that_has_shrunk_has_no_digest(valid: Path) -> None:
    found = read_header(valid)
    os.truncate(valid, found.size_bytes - 1)
    with pytest.raises(CheckpointError, match="ends at byte"):
        sampled_digest(found)


def test_the_content_digest_is_of_every_byte(valid: Path) -> None:
    first = content_digest(valid)
    content = bytearray(valid.read_bytes())
    content[-1] ^= 1
    assert content_digest(write(valid, bytes(content))) != first


# ---- fuzzing --------------------------------------------------------------------------------------------------------


def assert_never_laxer_than_the_library(path: Path) -> None:
    """Our reading is the library's, or a refusal."""
    ours = our_reading(path)
    if ours is not None:
        assert ours == library_reading(path)


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, float, bytes]]:
    """Edits of a file: what is done, where (as a part of its length), with which bytes."""
    what = st.sampled_from(["flip", "insert", "delete", "repeat"])
    # Bytes that mean something in a header are tried more often.
    some = st.one_of(
        st.sampled_from([b'"', b"{", b"}", b"[", b",", b"0", b"9", b"-", b"\\", b"e"]), st.binary(max_size=4)
    )
    return draw(st.lists(st.tuples(what, st.floats(0, 1), some), min_size=1, max_size=4))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=mutations(), true_length=st.booleans())
def test_a_file_with_changed_bytes_is_read_as_the_library_reads_it_or_refused(
    edits: list[tuple[str, float, bytes]], true_length: bool, valid: Path, tmp_path: Path
) -> None:
    content = bytearray(valid.read_bytes())
    length = read_header(valid).data_start - 8
    before = len(content)
    for what, where, some in edits:
        # Half of the edits fall into the header, which is the larger part of this file.
        at = int(where * (len(content) - 1))
        match what:
            case "flip":
                content[at : at + len(some)] = some[: len(content) - at]
            case "insert":
                content[at:at] = some
            case "delete":
                del content[at : at + max(1, len(some))]
            case _:
                content[at:at] = content[at : at + 8]
    if true_length:  # so that the edit is seen by the parser, not by the length alone
        content[:8] = struct.pack("<Q", max(0, length + len(content) - before))
    assert_never_laxer_than_the_library(write(tmp_path / "mutated", bytes(content)))


NAMES = st.text(max_size=6)
SIZES = st.one_of(st.integers(-1, 9), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64]), st.just(1.0))
SCRAPS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(sorted(BITS)), SCRAPS),
        "shape": st.one_of(st.lists(SIZES, max_size=4), SCRAPS),
        "data_offsets": st.one_of(st.lists(SIZES, min_size=2, max_size=2), SCRAPS),
    }
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.one_of(st.dictionaries(NAMES, st.one_of(ENTRIES, SCRAPS), max_size=3), SCRAPS),
    metadata=st.one_of(st.none(), st.dictionaries(NAMES, st.one_of(st.text(max_size=3), SCRAPS), max_size=2)),
    data=st.binary(max_size=12),
)
def test_any_header_is_read_as_the_library_reads_it_or_refused(
    entries: Any, metadata: Any, data: bytes, tmp_path: Path
) -> None:
    described = {**entries, "__metadata__": metadata} if isinstance(entries, dict) and metadata is not None else entries
    assert_never_laxer_than_the_library(write(tmp_path / "x", file_bytes(described, data)))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(sorted(set(BITS) - {"F4"}))), max_size=4
    ),
    metadata=st.dictionaries(NAMES, st.text(max_size=5), max_size=2),
    names=st.lists(NAMES, min_size=4, max_size=4, unique=True),
)
def test_every_good_file_is_read_whole(
    shapes: list[tuple[list[int], str]], metadata: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    shapes = [(shape, dtype) for shape, dtype in shapes if np.prod(shape, dtype=int) * BITS[dtype] % 8 == 0]
    path = write_sparse(tmp_path / "x", dict(zip(names, shapes, strict=False)), metadata)
    assert our_reading(path) == library_reading(path) is not None


@given(st.binary(max_size=64))
def test_json_of_any_bytes_is_a_value_or_a_value_error(text: bytes) -> None:
    try:
        value = strict_json(text)
    except ValueError:
        return
    assert value == json.loads(text)


def test_what_is_kept_of_a_tensor_is_small(valid: Path) -> None:
    """A header may describe 130 000 of them."""
    assert not hasattr(next(iter(read_header(valid).tensors.values())), "__dict__")
