"""Weight files and folders of them: what opens, what is refused, and that a hostile folder costs little."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h3stream.errors import CheckpointError
from services.checkpoints import source
from services.checkpoints.source import Checkpoint, find_config, open_checkpoint, read_json_object
from services.common.weights import read_tensor, read_tensors
from tests.weight_files import file_bytes, write_sparse

INDEX = "model.safetensors.index.json"


def folder(path: Path, files: dict[str, list[str]], index: dict[str, Any] | None = None) -> Path:
    """A folder of weight files, each holding F32 tensors `[2]` of these names."""
    path.mkdir(exist_ok=True)
    for name, keys in files.items():
        write_sparse(path / name, {key: ([2], "F32") for key in keys})
    if index is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": index}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_a_file_alone_is_a_checkpoint_without_index_or_configuration(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", {"a": ([2, 3], "F32"), "b": ([4], "BF16")}, {"by": "us"})
    found = open_checkpoint(path)
    assert (found.path, found.has_index, found.config) == (path, False, None)
    assert (found.num_parameters, found.num_bytes, found.dtypes()) == (10, 32, ("F32", "BF16"))
    assert found.metadata == {"by": "us"}
    assert set(found.digests()) == {"x.safetensors"}


def test_a_folder_with_an_index_holds_the_files_that_it_names(tmp_path: Path) -> None:
    shards = {"b.safetensors": ["y"], "a.safetensors": ["x"], "other.safetensors": ["z"]}
    path = folder(tmp_path / "f", shards, {"x": "a.safetensors", "y": "b.safetensors"})
    found = open_checkpoint(path)
    assert found.has_index
    assert {key: tensor.path.name for key, tensor in found.tensors.items()} == {
        "x": "a.safetensors",
        "y": "b.safetensors",
    }
    assert [header.path.name for header in found.headers] == ["a.safetensors", "b.safetensors"]


def test_a_folder_without_index_holds_all_of_its_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"b.safetensors": ["y"], "a.safetensors": ["x"]})
    (path / "config.json").write_text('{"layers": 2}')
    found = open_checkpoint(path)
    assert not found.has_index
    assert list(found.tensors) == ["x", "y"]
    assert found.config == {"layers": 2}


def test_of_several_files_the_first_that_says_something_has_the_say(tmp_path: Path) -> None:
    write_sparse(tmp_path / "a.safetensors", {"x": ([1], "U8")}, {"k": "first"})
    write_sparse(tmp_path / "b.safetensors", {"y": ([1], "U8")}, {"k": "second", "other": "b"})
    assert open_checkpoint(tmp_path).metadata == {"k": "first", "other": "b"}


# ---- folders that are not what they should be -----------------------------------------------------------------------


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds no safetensors file" in refusal(tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    assert "not a regular file" in refusal(tmp_path)
    assert "holds no safetensors file" in refusal(tmp_path / "x.safetensors")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a.safetensors": ["x"], "b.safetensors": ["x"]})
    assert "b.safetensors holds 'x', which a.safetensors holds too" in refusal(path)


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "sub/a.safetensors",
        "./a.safetensors",
        "..",
        "",
        "a.bin",
        "a.safetensors/",
        "a\0.safetensors",
        "\x1b[31m.safetensors",
        "a\n.safetensors",
    ],
)
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {}, {"x": name})
    for place in (tmp_path, path / "sub"):
        write_sparse(place / "a.safetensors", {"x": ([1], "U8")})
    assert "no safetensors file of its folder" in refusal(path)


@pytest.mark.parametrize("value", [None, 1, 1.5, True, ["a.safetensors"], {"a": "a.safetensors"}, []], ids=repr)
def test_an_index_that_names_no_file_is_refused(value: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a.safetensors": ["x"]}, {"x": value})
    assert "names no file for 'x'" in refusal(path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 1], ids=repr)
def test_an_index_without_a_weight_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a.safetensors": ["x"]})
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "has no weight_map" in refusal(path)


def test_missing_shards_are_named_however_many(tmp_path: Path) -> None:
    index = {f"k{number}": f"s{number:03}.safetensors" for number in range(200)}
    message = refusal(folder(tmp_path / "f", {"s001.safetensors": ["k1"]}, index))
    assert "lacks s000.safetensors, s002.safetensors" in message
    assert message.endswith("and 189 more, which its index names")


def test_an_index_that_disagrees_with_the_files_is_refused(tmp_path: Path) -> None:
    files = {"a.safetensors": ["x"], "b.safetensors": ["y"]}
    right = {"x": "a.safetensors", "y": "b.safetensors"}
    assert "disagree on 1 tensors, such as 'z'" in refusal(
        folder(tmp_path / "f", files, {**right, "z": "a.safetensors"})
    )
    assert "disagree on 2 tensors" in refusal(folder(tmp_path / "f", files, {"x": right["y"], "y": right["x"]}))
    more = {**files, "a.safetensors": ["x", "hidden"]}
    assert "disagree on 1 tensors, such as 'hidden'" in refusal(folder(tmp_path / "f", more, right))


def test_several_indexes_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a.safetensors": ["x"]}, {"x": "a.safetensors"})
    (path / "other.safetensors.index.json").write_text("{}")
    assert "several indexes" in refusal(path)


def test_names_that_a_terminal_would_obey_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a\x1b[2J.safetensors": ["x"]})
    assert "control characters" in refusal(path)


def test_too_many_files_are_refused_before_any_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {f"k{number}": f"s{number}.safetensors" for number in range(source.MAX_FILES + 1)}
    path = folder(tmp_path / "f", {}, index)
    monkeypatch.setattr(os.path, "exists", lambda path: pytest.fail("looked at a file"))
    assert f"{source.MAX_FILES + 1} weight files" in refusal(path)


def test_an_index_of_a_million_entries_is_refused_for_its_size(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a.safetensors": ["x"]})
    entries = ",".join(f'"k{number}":"a.safetensors"' for number in range(1_000_000))
    (path / INDEX).write_text(f'{{"weight_map":{{{entries}}}}}')
    assert f"more than {source.MAX_JSON_BYTES} bytes" in refusal(path)


def test_headers_of_many_files_share_one_limit(tmp_path: Path) -> None:
    for number in range(3):
        text = json.dumps({f"k{number}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
        (tmp_path / f"{number}.safetensors").write_bytes(file_bytes(text + b" " * (6 << 20)))
    assert f"more than {source.MAX_ALL_HEADERS_BYTES} bytes" in refusal(tmp_path)


def test_a_link_that_runs_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "cannot be read" in refusal(tmp_path / "a")
    assert "cannot be read" in refusal(tmp_path / ("x" * 5000))


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", deny)
    assert refusal(tmp_path) == f"{tmp_path} cannot be read: Permission denied"


# ---- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a":1,"a":2}', "the key 'a' is there twice"),
        (b'{"eps":1e999}', "too large a number"),
        (b'{"eps":NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 64 + b"{}" + b"}" * 64, "nested too deeply"),
        (b'{"a":"\\udc00"}', "surrogate"),
        (b"\x80\x04", "utf-8"),
    ],
)
def test_a_broken_configuration_is_named(text: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        find_config(tmp_path)
    assert expected in str(caught.value)


def test_a_configuration_that_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    assert find_config(tmp_path) is None
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        find_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="is missing"):
        find_config(tmp_path)


# ---- files that change while they are read --------------------------------------------------------------------------


def test_a_file_that_shrinks_after_its_header_was_read_is_a_typed_error(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", {"a": ([1000], "F32"), "b": ([1000], "F32")})
    found = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 100)
    assert read_tensor("a", found.tensors["a"]).shape == (1000,)
    with pytest.raises(CheckpointError, match="has changed: it ends within 'b'"):
        list(read_tensors(found.tensors))


def test_a_file_that_is_gone_after_its_header_was_read_is_a_typed_error(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", {"a": ([4], "F32")})
    found = open_checkpoint(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        list(read_tensors(found.tensors))
    with pytest.raises(CheckpointError, match="is missing"):
        found.digests()


# ---- fuzzing --------------------------------------------------------------------------------------------------------

NAMES = st.one_of(st.sampled_from(["a.safetensors", "b.safetensors", "c.safetensors", ".."]), st.text(max_size=5))
VALUES: st.SearchStrategy[Any] = st.one_of(NAMES, st.none(), st.integers(), st.lists(NAMES, max_size=2))
WEIGHT_MAPS = st.one_of(st.dictionaries(st.sampled_from(["x", "y", "z"]), VALUES), VALUES)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.one_of(st.builds(dict, weight_map=WEIGHT_MAPS), WEIGHT_MAPS), flip=st.binary(max_size=3))
def test_any_index_opens_what_is_there_or_is_refused(index: Any, flip: bytes, tmp_path: Path) -> None:
    path = folder(tmp_path / "f", {"a.safetensors": ["x"], "b.safetensors": ["y"]})
    text = json.dumps(index).encode()
    (path / INDEX).write_bytes(text[: len(text) - len(flip)] + flip)
    try:
        found = open_checkpoint(path)
    except CheckpointError as error:
        message = str(error)
    else:
        assert isinstance(found, Checkpoint)
        assert set(found.tensors) <= {"x", "y"}
        return
    assert message.isprintable()
    assert len(message) < 1000


def test_read_json_object_reads_no_more_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"{")
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="more than"):
        read_json_object(path)
