"""Key maps: what is wrong with a checkpoint is told in full, briefly, and safely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.checkpoints.header import TensorInfo
from services.checkpoints.key_map import Rows, Rule, identity, problems, stored_shape, summary
from services.checkpoints.printable import MAX_LENGTH, printable
from services.checkpoints.source import StoredTensor
from tests.weight_files import TABLES


def stored(dtype: str, *shape: int) -> StoredTensor:
    return StoredTensor(Path("x"), TensorInfo(dtype, shape, 0, 0))


SHAPES = {"q": (4, 3), "k": (4, 3), "v": (4, 3), "b": (5,)}
MAP = {"qkv": Rule(("q", "k", "v"), Rows.STACKED), "b": Rule(("b",)), "rope": Rule(())}


def faults(found: dict[str, StoredTensor], *, unread: str = "-") -> list[str]:
    return problems(found, MAP, SHAPES, lambda target: ("BF16", "F32"), lambda key: key.startswith(unread))


def test_a_stored_tensor_has_the_rows_of_all_its_parameters() -> None:
    assert stored_shape(MAP["qkv"], SHAPES) == (12, 3)
    assert stored_shape(MAP["b"], SHAPES) == (5,)


def test_nothing_is_wrong_with_what_the_map_says() -> None:
    good = {"qkv": stored("BF16", 12, 3), "b": stored("F32", 5)}
    assert faults(good) == []
    assert faults({**good, "rope": stored("I8", 1)}) == []  # known and not needed
    assert faults({**good, "vision.a": stored("I8", 1)}, unread="vision.") == []


def test_every_fault_is_told_at_once() -> None:
    found = {"qkv": stored("I8", 3, 12), "other.0": stored("F32"), "other.1": stored("F32")}
    assert faults(found) == [
        "2 unknown: other.{0-1}",
        "1 missing: b",
        "1 of shape [3, 12], expected [12, 3]: qkv",
        "1 I8, expected BF16 or F32: qkv",
    ]


def test_an_identity_map_names_every_key_once() -> None:
    assert identity(["a", "b"]) == {"a": Rule(("a",)), "b": Rule(("b",))}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], ""),
        (["a"], "a"),
        (["a.0", "a.1", "a.2", "a.5"], "a.{0-2,5}"),
        (["a.0.b.1", "a.0.b.2", "a.1.b.1", "a.1.b.2"], "a.{0-1}.b.{1-2}"),
        (["a.0.b.1", "a.1.b.2"], "a.0.b.1, a.1.b.2"),
        (["b", "a"], "a, b"),
        (["a.01", "a.1"], "a.1, a.01"),
        (["a.²", "a.٣"], "a.², a.٣"),
        (["1", "2"], "{1-2}"),
        (["a\x1b[31m\n"], "a\\x1b[31m\\n"),
    ],
)
def test_keys_that_differ_in_numbers_are_told_together(keys: list[str], expected: str) -> None:
    assert summary(keys) == expected


@pytest.mark.parametrize("table", sorted(path.name for path in TABLES.glob("*.json")))
def test_every_key_of_a_published_file_fits_into_a_message(table: str) -> None:
    told = summary(json.loads((TABLES / table).read_text())["tensors"])
    assert len(told) < 4000
    assert "others" not in told
    assert "…" not in told


def test_keys_without_end_are_told_in_a_bounded_message() -> None:
    words = summary(f"k{'x' * number}" for number in range(1000))
    assert words.endswith(", and others")
    assert words.count(",") == 200
    assert len(summary(str(2 * number) for number in range(100_000))) < 1000
    assert len(summary(["9" * 100_000])) < 1000


@given(st.lists(st.text(max_size=20)))
def test_any_keys_are_told_on_one_visible_line(keys: list[str]) -> None:
    assert summary(keys).isprintable()


@given(st.text(st.characters(), max_size=2 * MAX_LENGTH))
def test_printable_text_is_visible_short_and_encodable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= 10 * (MAX_LENGTH + 1)
    shown.encode("utf-8")
    if text.isprintable() and len(text) <= MAX_LENGTH:
        assert shown == text


def test_printable_text_escapes_halves_of_surrogate_pairs_and_direction_marks() -> None:
    assert printable("a\ud800\u202eb\x7f") == "a\\ud800\\u202eb\\x7f"
