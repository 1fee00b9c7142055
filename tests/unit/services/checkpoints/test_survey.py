"""What lies below a path is found, each thing once, however the tree is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.checkpoints import survey as survey_module
from services.checkpoints.survey import survey


def tree(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def found(*paths: Path, root: Path | None = None) -> list[tuple[str, str]]:
    base = root or paths[0]
    return [(place.path.relative_to(base).as_posix(), place.kind) for place in survey(list(paths))]


def test_files_of_a_folder_are_parts_by_themselves(tmp_path: Path) -> None:
    tree(tmp_path, "vae/b.safetensors", "vae/a.safetensors", "loras/x.safetensors", "loras/readme.md", "old/sd.ckpt")
    assert found(tmp_path) == [
        ("loras/x.safetensors", "weights"),
        ("old/sd.ckpt", "foreign"),
        ("vae/a.safetensors", "weights"),
        ("vae/b.safetensors", "weights"),
    ]


def test_a_folder_with_a_configuration_an_index_or_shards_is_one_part(tmp_path: Path) -> None:
    tree(tmp_path, "a/config.json", "a/model.safetensors")
    tree(tmp_path, "b/m.safetensors.index.json", "b/m-00001-of-00002.safetensors", "b/extra.safetensors")
    tree(tmp_path, "c/m-00001-of-00002.safetensors", "c/m-00002-of-00002.safetensors")
    tree(tmp_path, "d/adapter_config.json", "d/adapter_model.safetensors")
    assert found(tmp_path) == [
        ("a", "weights"),
        ("b", "weights"),
        ("b/extra.safetensors", "weights"),
        ("c", "weights"),
        ("d", "weights"),
    ]


@pytest.mark.parametrize("parts", [("model_index.json",), ("transformer/x", "vae/x"), ("FL2VA/transformer/x", "vae/x")])
def test_a_model_directory_is_told_before_its_parts(parts: tuple[str, ...], tmp_path: Path) -> None:
    assert found(tree(tmp_path, *parts))[0] == (".", "model")


def test_partitions_of_one_repository_are_one_model(tmp_path: Path) -> None:
    for partition in ("FL2VA", "Ref2VA"):
        tree(tmp_path, f"{partition}/transformer/x", f"{partition}/audio_vae/x", f"{partition}/vae/model_index.json")
    assert found(tmp_path) == [(".", "model")]
    assert found(tmp_path / "Ref2VA") == [(".", "model")]


def test_comfyuis_folders_are_no_model_directory(tmp_path: Path) -> None:
    tree(tmp_path, "vae/a.safetensors", "text_encoders/b.safetensors", "diffusion_models/c.safetensors")
    assert [kind for _, kind in found(tmp_path)] == ["weights"] * 3


def test_a_tokenizer_is_found_alone_and_beside_weights(tmp_path: Path) -> None:
    tree(tmp_path, "a/tokenizer_config.json", "b/tokenizer.json")
    tree(tmp_path, "c/tokenizer_config.json", "c/config.json", "c/model.safetensors")
    assert found(tmp_path) == [("a", "tokenizer"), ("b", "tokenizer"), ("c", "tokenizer"), ("c", "weights")]


def test_a_file_that_is_named_is_looked_at_whatever_its_name(tmp_path: Path) -> None:
    path = tree(tmp_path, "x.dat") / "x.dat"
    (place,) = survey([path])
    assert (place.path, place.kind, place.is_named) == (path, "weights", True)


def test_paths_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    places = list(survey([tmp_path / "empty", tmp_path / "absent", tmp_path / "nul\0", tmp_path / ("x" * 5000)]))
    assert [place.kind for place in places] == ["nothing"] * 4
    assert [place.problem for place in places] == ["holds no model files", *["does not exist"] * 3]


def test_hidden_files_are_left_alone(tmp_path: Path) -> None:
    tree(tmp_path, ".cache/a.safetensors", "._b.safetensors", "c.safetensors")
    assert found(tmp_path) == [("c.safetensors", "weights")]
    assert found(tmp_path / ".cache") == [("a.safetensors", "weights")]  # unless they are named


def test_links_are_followed_but_never_twice(tmp_path: Path) -> None:
    tree(tmp_path, "real/x.safetensors")
    (tmp_path / "real/loop").symlink_to("..")
    (tmp_path / "same").symlink_to("real")
    (tmp_path / "broken.safetensors").symlink_to("nowhere")
    (tmp_path / "self").symlink_to("self")
    assert found(tmp_path) == [("broken.safetensors", "weights"), ("real/x.safetensors", "weights")]


def test_a_folder_of_links_like_the_hub_cache_is_found(tmp_path: Path) -> None:
    tree(tmp_path, "blobs/0a1b", "snapshots/rev/transformer/config.json")
    (tmp_path / "snapshots/rev/transformer/model.safetensors").symlink_to("../../../blobs/0a1b")
    assert found(tmp_path) == [("snapshots/rev/transformer", "weights")]


def test_trees_are_not_descended_without_end(tmp_path: Path) -> None:
    deep = "/".join(str(level) for level in range(20))
    tree(tmp_path, f"{deep}/x.safetensors", "0/y.safetensors")
    (cut, whole) = survey([tmp_path])
    assert (cut.kind, whole.path.name) == ("unread", "y.safetensors")
    assert "9 folders deep" in cut.problem


def test_a_folder_without_end_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "MAX_ENTRIES", 5)
    tree(tmp_path, *(f"many/{number}.safetensors" for number in range(10)), "few/a.safetensors")
    places = list(survey([tmp_path]))
    assert [(place.path.name, place.kind) for place in places] == [("a.safetensors", "weights"), ("many", "unread")]
    assert "5 files have been seen" in places[1].problem


def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "a/x.safetensors", "b/y.safetensors")
    scandir = os.scandir

    def deny(path: Path) -> object:
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    assert [(place.path.name, place.kind, place.problem) for place in survey([tmp_path])] == [
        ("a", "unread", "cannot be read: Permission denied"),
        ("y.safetensors", "weights", ""),
    ]
