from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from h3stream.errors import CheckpointError
from services.checkpoints.header import read_header
from services.checkpoints.key_map import Rows, Rule
from services.checkpoints.source import Checkpoint, open_checkpoint
from services.common.weights import (
    DTYPES,
    join_rows,
    load_parameters,
    read_tensor,
    read_tensors,
    split_rows,
)
from tests.weight_files import write_sparse

QKV = ("q", "k", "v")


def rows(*values: float) -> torch.Tensor:
    """A matrix `[rows, 2]` whose rows hold these values."""
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 2)


def first_column(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    return [tensor[:, 0].tolist() for tensor in tensors]


@pytest.mark.parametrize(
    ("rule", "stored", "expected"),
    [
        (Rule(("a",)), [0, 1, 2, 3], [[0, 1, 2, 3]]),
        (Rule(QKV, Rows.STACKED), [0, 1, 2, 3, 4, 5], [[0, 1], [2, 3], [4, 5]]),
        # two heads of one row, then one head of two
        (Rule(QKV, Rows.PER_HEAD, num_heads=2), [0, 1, 2, 3, 4, 5], [[0, 3], [1, 4], [2, 5]]),
        (Rule(QKV, Rows.PER_HEAD, num_heads=1), [0, 1, 2, 3, 4, 5], [[0, 1], [2, 3], [4, 5]]),
        (Rule(("a",), Rows.SWAPPED_HALVES), [0, 1, 2, 3], [[2, 3, 0, 1]]),
    ],
)
def test_rows_are_cut_and_ordered_as_the_rule_says(
    rule: Rule, stored: list[float], expected: list[list[float]]
) -> None:
    parameters = split_rows(rule, rows(*stored))
    assert first_column(parameters) == expected
    assert torch.equal(join_rows(rule, parameters), rows(*stored))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", [Rows.STACKED, Rows.PER_HEAD, Rows.SWAPPED_HALVES])
def test_what_was_cut_keeps_nothing_of_the_stored_tensor_alive(order: Rows, dtype: torch.dtype | None) -> None:
    rule = Rule(("a",) if order is Rows.SWAPPED_HALVES else QKV, order, num_heads=2)
    stored = torch.randn(12, 5)
    for part in split_rows(rule, stored, dtype):
        assert part.dtype == (dtype or torch.float32)
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes
        assert part.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr()


def test_a_tensor_that_needs_no_change_is_not_copied() -> None:
    stored = torch.randn(3)
    assert split_rows(Rule(("a",)), stored)[0] is stored
    assert split_rows(Rule(("a",)), stored, torch.float32)[0] is stored


@given(
    order=st.sampled_from(list(Rows)),
    num_heads=st.integers(1, 4),
    head_rows=st.integers(1, 3),
    trailing=st.lists(st.integers(1, 3), max_size=2),
)
def test_joining_is_the_inverse_of_cutting(order: Rows, num_heads: int, head_rows: int, trailing: list[int]) -> None:
    targets = QKV if order in (Rows.STACKED, Rows.PER_HEAD) else ("a",)
    rule = Rule(targets, order, num_heads)
    size = (2 * num_heads * head_rows * len(targets), *trailing)
    stored = torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size)
    parameters = split_rows(rule, stored)
    assert sorted(torch.cat(parameters).flatten().tolist()) == stored.flatten().tolist()
    assert torch.equal(join_rows(rule, parameters), stored)


def test_rows_without_memory_have_shapes() -> None:
    parameters = split_rows(Rule(QKV, Rows.PER_HEAD, 56), torch.empty(21504, 5376, dtype=torch.bfloat16, device="meta"))
    assert [(tuple(part.shape), part.device.type) for part in parameters] == [((7168, 5376), "meta")] * 3


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two files: `qkv` [6, 2] bfloat16, `fc` [4, 2] float32, `spare` and `norm`."""
    save_file({"qkv": rows(0, 1, 2, 3, 4, 5).bfloat16(), "spare": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"fc": rows(0, 1, 2, 3), "norm": torch.full((2,), 0.1).double()}, tmp_path / "2.safetensors")
    return open_checkpoint(tmp_path)


MAP = {
    "qkv": Rule(QKV, Rows.PER_HEAD, num_heads=2),
    "fc": Rule(("ff",), Rows.SWAPPED_HALVES),
    "norm": Rule(("norm",)),
    "spare": Rule(()),
}


def test_parameters_come_from_all_files_in_the_dtypes_asked_for(checkpoint: Checkpoint) -> None:
    wanted = {"q": torch.float32, "norm": torch.float32}
    parameters = load_parameters(checkpoint.tensors, MAP, wanted.get)
    assert first_column([parameters[name] for name in (*QKV, "ff")]) == [[0, 3], [1, 4], [2, 5], [2, 3, 0, 1]]
    assert parameters.keys() == {*QKV, "ff", "norm"}
    assert parameters["norm"].tolist() == torch.full((2,), 0.1).tolist()
    assert {name: tensor.dtype for name, tensor in parameters.items()} == dict.fromkeys(
        (*QKV, "ff", "norm"), torch.float32
    )
    assert load_parameters(checkpoint.tensors, MAP)["q"].dtype == torch.bfloat16


def test_what_is_not_wanted_is_not_read(checkpoint: Checkpoint) -> None:
    os.truncate(checkpoint.tensors["fc"].path, 8)
    assert load_parameters(checkpoint.tensors, {"qkv": MAP["qkv"]}).keys() == set(QKV)
    with pytest.raises(CheckpointError, match=r"2\.safetensors has changed: it ends within"):
        load_parameters(checkpoint.tensors, MAP)


def test_a_file_that_is_gone_is_named(checkpoint: Checkpoint) -> None:
    checkpoint.tensors["fc"].path.unlink()
    with pytest.raises(CheckpointError, match=r"2\.safetensors is missing"):
        load_parameters(checkpoint.tensors, MAP)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_every_dtype_and_shape_is_read(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(DTYPES[dtype])
    save_file({"before": torch.ones(3), "x": values}, tmp_path / "x.safetensors")
    stored = open_checkpoint(tmp_path / "x.safetensors").tensors["x"]
    assert stored.info.dtype == dtype
    found = read_tensor("x", stored)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert torch.equal(found.float(), values.float())


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", {"x": ((4,), "F8_E5M2")})
    with pytest.raises(CheckpointError, match=r"x\.safetensors: 'x' is F8_E5M2, which is not read here"):
        read_tensor("x", open_checkpoint(path).tensors["x"])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are read from /proc")
def test_at_most_one_file_is_open(checkpoint: Checkpoint) -> None:
    def open_files() -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return [
            target for link in links if link.is_symlink() and (target := os.readlink(link)).endswith(".safetensors")
        ]

    seen = [open_files() for _ in read_tensors(checkpoint.tensors)]
    assert {len(paths) for paths in seen} == {1}
    assert {path for paths in seen for path in paths} == {str(header.path) for header in checkpoint.headers}
    assert open_files() == []


def test_reading_may_be_given_up(checkpoint: Checkpoint) -> None:
    reading = read_tensors(checkpoint.tensors)
    next(reading)
    reading.close()
    assert read_header(checkpoint.headers[0].path).tensors.keys() == {"qkv", "spare"}
