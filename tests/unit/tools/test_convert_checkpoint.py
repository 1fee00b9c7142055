"""Conversions between the published layouts: right to the bit, whole or not at all, in little memory."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints.dit_modules import INV_FREQ, Architecture, DitLayout
from services.checkpoints.header import TensorInfo, read_header
from services.checkpoints.key_map import Rows, Rule, stored_shape
from services.checkpoints.layout import Layout
from services.checkpoints.report import exit_status, inspect
from services.checkpoints.source import StoredTensor, open_checkpoint
from services.common.weights import join_rows, split_rows
from services.dit.weights import load_transformer
from services.text_encoder.weights import load_language_model
from services.vae.weights import load_models
from tests import dit_layouts, text_encoder_files, vae_layouts
from tests.peak_memory import SLACK_BYTES
from tests.weight_files import TABLES, fill, published, write_sparse
from tools.convert import content
from tools.convert.content import Folded, Parameters, SourceFiles, Unfolded
from tools.convert.plan import make_plan
from tools.convert.writing import lay_out
from tools.convert_checkpoint import convert, main

ROOT = Path(__file__).parents[3]
State = dict[str, torch.Tensor]


def target(folder: Path, layout: str, name: str = "out") -> Path:
    return folder / (f"{name}.safetensors" if layout == "comfyui" else name)


def converted(source: Path, destination: Path, to: Layout, **options: Any) -> State:
    """Converts; returns the tensors of the result, which inspection finds nothing wrong with."""
    convert(source, destination, to, **options)
    (finding,) = inspect([destination])
    assert finding.is_fine, finding
    assert finding.layout == to
    return tensors_of(destination)


def tensors_of(path: Path) -> State:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def everything_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- the DiT --------------------------------------------------------------------------------------------------------

DIT_PAIRS = list(itertools.product(dit_layouts.LAYOUTS, repeat=2))


@pytest.mark.parametrize("stack_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "to"), DIT_PAIRS)
def test_a_dit_in_any_layout_becomes_any_other_bit_for_bit(
    layout: DitLayout, to: DitLayout, stack_dtype: torch.dtype, tmp_path: Path
) -> None:
    source = dit_layouts.write_layout(tmp_path / "in", layout, stack_dtype)
    found = converted(source, target(tmp_path, to), to)
    assert_same(found, dit_layouts.state(to, stack_dtype))


def test_a_converted_dit_loads_as_what_it_was(tmp_path: Path) -> None:
    source = dit_layouts.write_layout(tmp_path / "in", "official", torch.bfloat16)
    expected = load_transformer(source, "auto")
    for to in dit_layouts.LAYOUTS:
        destination = target(tmp_path, to, to)
        convert(source, destination, to)
        found = load_transformer(destination, "auto")
        assert_same(found.state_dict(), expected.state_dict())
        assert dict(found.config) == dict(expected.config)


def test_precision_islands_stay_float32_whatever_the_rest_becomes(tmp_path: Path) -> None:
    source = dit_layouts.write_layout(tmp_path / "in", "official")
    assert_same(
        converted(source, tmp_path / "out", "diffusers", dtype="BF16"), dit_layouts.state("diffusers", torch.bfloat16)
    )


def test_the_configuration_of_a_dit_is_kept_with_all_that_it_says(tmp_path: Path) -> None:
    config = {**dit_layouts.class_config(), "norm_eps": 1e-6, "_diffusers_version": "0.42.1"}
    source = dit_layouts.write_folder(tmp_path / "in", dit_layouts.state("diffusers"), config)
    convert(source, tmp_path / "official", "official")
    convert(tmp_path / "official", tmp_path / "back", "diffusers")
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    with pytest.raises(CheckpointError, match=r"tells shapes only: norm_eps is 1e-06, read as 1e-05"):
        convert(source, tmp_path / "x.safetensors", "comfyui")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "in", "official"]


def test_a_dit_whose_order_of_rows_nothing_tells_is_converted_when_it_is_said(tmp_path: Path) -> None:
    folder = dit_layouts.write_folder(tmp_path / "in", dit_layouts.state("official"))
    with pytest.raises(ConfigError, match="official"):
        convert(folder, tmp_path / "out", "diffusers")
    assert_same(converted(folder, tmp_path / "out", "diffusers", layout="official"), dit_layouts.state("diffusers"))


# ---- the VAEs -------------------------------------------------------------------------------------------------------


def write_vae(folder: Path, component: Any, layout: Any) -> Path:
    """A VAE in a layout with the configuration that the small one needs."""
    path = vae_layouts.write_vae(folder, component, layout)
    beside = path if path.is_dir() else path.parent
    vae_layouts.write_json(beside / "config.json", vae_layouts.class_config(component))
    return path


@pytest.mark.parametrize(("layout", "to"), list(itertools.product(vae_layouts.LAYOUTS, repeat=2)))
def test_a_video_vae_in_any_layout_becomes_any_other_bit_for_bit(
    layout: vae_layouts.Layout, to: vae_layouts.Layout, tmp_path: Path
) -> None:
    source = write_vae(tmp_path / "in", "video", layout)
    vae_layouts.write_json(tmp_path / "config.json", vae_layouts.class_config("video"))  # beside a single file
    assert_same(converted(source, target(tmp_path, to), to), vae_layouts.state("video", to))
    if to != "comfyui":
        told = json.loads((tmp_path / "out/config.json").read_text())
        assert told == told | vae_layouts.class_config("video")


def test_a_single_file_that_does_not_tell_how_it_is_computed_with_says_so(tmp_path: Path) -> None:
    source = write_vae(tmp_path / "in", "audio", "diffusers")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    notes = convert(source, tmp_path / "out.safetensors", "comfyui")
    assert "Keep the config.json of this model beside it" in notes[-1]
    assert "num_attention_heads is 4, read as 8" in notes[-1]


def test_video_weights_are_converted_to_half_precision_and_their_statistics_are_not(tmp_path: Path) -> None:
    source = write_vae(tmp_path / "in", "video", "diffusers")
    vae_layouts.write_json(tmp_path / "config.json", vae_layouts.class_config("video"))
    found = converted(source, tmp_path / "out.safetensors", "comfyui", dtype="F16")
    statistics = vae_layouts.statistics("video")
    assert_same(
        found, {key: tensor.half() for key, tensor in vae_layouts.state("video", "official").items()} | statistics
    )


def test_folding_weight_norm_gives_what_the_class_computes(tmp_path: Path) -> None:
    source = write_vae(tmp_path / "in", "audio", "diffusers")
    found = converted(source, tmp_path / "out.safetensors", "comfyui")
    golden = vae_layouts.state("audio", "comfyui")  # without an encoder
    assert {key for key in found if not key.startswith("encoder.")} == golden.keys()
    for key, tensor in golden.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-7, msg=key)


def test_a_folded_weight_that_is_unfolded_folds_to_the_same_bits(tmp_path: Path) -> None:
    source = write_vae(tmp_path / "in", "audio", "comfyui")
    notes = convert(source, tmp_path / "diffusers", "diffusers")
    assert any("is not what they were made from" in note for note in notes)
    assert any("no encoder" in note for note in notes)
    assert tensors_of(tmp_path / "diffusers").keys() == {
        key for key in vae_layouts.state("audio", "diffusers") if not key.startswith("encoder.")
    }
    back = converted(tmp_path / "diffusers", tmp_path / "back.safetensors", "comfyui")
    assert_same(back, vae_layouts.state("audio", "comfyui"))


def test_converted_vaes_load_as_what_they_were(tmp_path: Path) -> None:
    paths: dict[str, dict[str, Path]] = {"video": {}, "audio": {}}
    for component, layouts in (("video", vae_layouts.LAYOUTS), ("audio", ("diffusers", "comfyui"))):
        source = write_vae(tmp_path / component, component, "diffusers")
        for to in layouts:
            folder = tmp_path / f"{component}_{to}"
            vae_layouts.write_json(folder / "config.json", vae_layouts.class_config(component))
            paths[component][to] = target(folder, to)
            convert(source, paths[component][to], to)
        paths[component]["source"] = source
    expected = load_models(
        None, torch.float32, video_path=paths["video"]["source"], audio_path=paths["audio"]["source"]
    )
    for video, audio in (("diffusers", "diffusers"), ("official", "comfyui"), ("comfyui", "comfyui")):
        found = load_models(None, torch.float32, video_path=paths["video"][video], audio_path=paths["audio"][audio])
        assert_same(found.video.state_dict(), expected.video.state_dict())
        assert_same(found.audio.state_dict(), expected.audio.state_dict())
        assert found.video_statistics == expected.video_statistics
        assert found.audio_statistics == expected.audio_statistics


# ---- the text encoder -----------------------------------------------------------------------------------------------


def test_a_text_encoder_is_cut_to_what_h3_reads_and_back(tmp_path: Path) -> None:
    state, layers = text_encoder_files.golden_state(), text_encoder_files.TAP_LAYER
    source = text_encoder_files.write_folder(tmp_path / "in", state)
    file, folder = tmp_path / "x.safetensors", tmp_path / "back"
    assert_same(converted(source, file, "comfyui"), text_encoder_files.comfyui_state(state, layers))
    back = converted(file, folder, "transformers")
    assert_same(back, {key: state[key] for key in back})
    assert len(back) == len(text_encoder_files.comfyui_state(state, layers))
    expected = load_language_model(source, "auto")
    for path in (file, folder):
        found = load_language_model(path, "auto")
        assert_same(found.module.state_dict(), expected.module.state_dict())


def test_a_text_encoder_of_its_own_layout_is_kept_whole(tmp_path: Path) -> None:
    state = text_encoder_files.golden_state()
    source = text_encoder_files.write_folder(tmp_path / "in", state, dtype="float32")
    found = converted(source, tmp_path / "out", "transformers", dtype="BF16")
    assert_same(found, {key: tensor.bfloat16() for key, tensor in state.items()})
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**config, "dtype": "bfloat16"}


def test_settings_that_a_single_file_cannot_tell_are_not_lost(tmp_path: Path) -> None:
    source = text_encoder_files.write_folder(tmp_path / "in", text_encoder_files.golden_state())
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 10_000
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"rope_theta is 10000, read as 5000000"):
        convert(source, tmp_path / "x.safetensors", "comfyui")


# ---- everything at full size ----------------------------------------------------------------------------------------


def planned(source: Path, to: Layout, **options: Any) -> dict[str, tuple[list[int], str]]:
    return {key: (list(new.shape), new.dtype) for key, new in make_plan(source, to, **options).tensors.items()}


def listed(name: str) -> dict[str, tuple[list[int], str]]:
    return {key: (list(shape), dtype) for key, (shape, dtype) in published(name).items()}


def test_the_published_dits_become_each_other(tmp_path: Path) -> None:
    diffusers = write_sparse(tmp_path / "d.safetensors", published("dit.diffusers"))
    comfyui = write_sparse(tmp_path / "c.safetensors", published("dit.comfy_bf16"))
    fill(comfyui, INV_FREQ, Architecture().inv_freq())
    assert planned(diffusers, "official") == listed("dit.official")
    assert planned(diffusers, "comfyui") == listed("dit.comfy_bf16")
    assert planned(comfyui, "diffusers") == listed("dit.diffusers")
    assert planned(comfyui, "official") == listed("dit.official")


def test_the_published_vaes_become_each_other(tmp_path: Path) -> None:
    statistics = {"latents_mean": [0.0] * 24, "latents_std": [1.0] * 24}
    vae_layouts.write_json(tmp_path / "v/config.json", {"_class_name": "AutoencoderKLMiniMaxH3", **statistics})
    diffusers = write_sparse(tmp_path / "v/m.safetensors", published("video_vae.diffusers")).parent
    assert planned(diffusers, "official") == listed("video_vae.official")
    kept_exact = {key: ([24], "F32") for key in statistics}
    assert planned(diffusers, "comfyui", dtype="F16") == listed("video_vae.comfy_fp16") | kept_exact
    audio = write_sparse(tmp_path / "a.safetensors", published("audio_vae.comfy_fp32"))
    fill(audio, "latents_std", [1.0] * 32)
    assert planned(audio, "diffusers") == listed("audio_vae.diffusers_and_official")


def test_the_published_text_encoders_become_each_other(tmp_path: Path) -> None:
    whole = write_sparse(tmp_path / "t.safetensors", published("text_encoder.transformers"))
    cut = write_sparse(tmp_path / "c.safetensors", published("text_encoder.comfy_bf16"))
    assert planned(whole, "comfyui") == listed("text_encoder.comfy_bf16")
    assert planned(cut, "transformers").items() <= listed("text_encoder.transformers").items()
    assert len(planned(cut, "transformers")) == len(listed("text_encoder.comfy_bf16"))


def test_a_published_dit_is_cut_into_about_as_many_files_as_the_published_one(tmp_path: Path) -> None:
    plan = make_plan(write_sparse(tmp_path / "d.safetensors", published("dit.diffusers")), "diffusers")
    files = lay_out(plan, 5_000_000_000)
    assert len(files) == 14
    assert sum(len(file.tensors) for file in files) == 638
    assert max(file.size_bytes for file in files) < 5_000_100_000


# ---- rows -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    source=st.sampled_from([Rows.PER_HEAD, Rows.STACKED, Rows.SWAPPED_HALVES, Rows.SAME]),
    wanted=st.sampled_from(list(Rows)),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 3),
    width=st.integers(0, 2),
    block_bytes=st.sampled_from([1, 8, 1 << 20]),
)
def test_rows_are_copied_to_where_the_loader_would_put_them(
    source: Rows,
    wanted: Rows,
    heads: int,
    head_dim: int,
    width: int,
    block_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    is_fused = {Rows.PER_HEAD, Rows.STACKED}
    if (source in is_fused) != (wanted in is_fused):
        wanted = source
    names = ("q", "k", "v") if source in is_fused else ("w",)
    old, new = Rule(names, source, heads), Rule(names, wanted, heads)
    rows = len(names) * heads * head_dim * (2 if source is Rows.SWAPPED_HALVES or wanted is Rows.SWAPPED_HALVES else 1)
    stored = torch.arange(rows * max(1, width), dtype=torch.float32).reshape((rows, width) if width else (rows,))
    path = tmp_path_factory.mktemp("rows") / "x.safetensors"
    save_file({"w": stored}, path)
    shape = stored_shape(new, {name: (rows // len(names), *stored.shape[1:]) for name in names})
    found = Parameters(open_checkpoint(path).tensors, {"w": old}).rows(new, shape, None)
    with SourceFiles() as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "BLOCK_BYTES", block_bytes)
        made = torch.cat(list(found.blocks(files)))
    assert torch.equal(made, join_rows(new, split_rows(old, stored)))


def test_consecutive_rows_are_read_together(tmp_path: Path) -> None:
    save_file({key: torch.zeros(6, 2) for key in ("q", "k", "v")}, path := tmp_path / "x.safetensors")
    same = {key: Rule((key,)) for key in ("q", "k", "v")}
    parameters = Parameters(open_checkpoint(path).tensors, same)
    assert len(parameters.rows(Rule(("q", "k", "v"), Rows.STACKED), (18, 2), None).runs) == 3
    assert len(parameters.rows(Rule(("q", "k", "v"), Rows.PER_HEAD, 2), (18, 2), None).runs) == 6


def test_parameters_of_several_dtypes_become_one_tensor_only_if_it_is_said_of_which(tmp_path: Path) -> None:
    save_file({"q": torch.ones(2, 2), "k": torch.ones(2, 2, dtype=torch.bfloat16)}, path := tmp_path / "x.safetensors")
    parameters = Parameters(open_checkpoint(path).tensors, {key: Rule((key,)) for key in ("q", "k")})
    rule = Rule(("q", "k"), Rows.STACKED)
    with pytest.raises(CheckpointError, match="BF16 and F32; say with --dtype"):
        parameters.rows(rule, (4, 2), None)
    with SourceFiles() as files:
        made = torch.cat(list(parameters.rows(rule, (4, 2), "BF16").blocks(files)))
    assert torch.equal(made, torch.ones(4, 2, dtype=torch.bfloat16))


def test_a_row_of_zeros_has_weight_norm(tmp_path: Path) -> None:
    weight = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])
    save_file({"w": weight}, path := tmp_path / "x.safetensors")
    stored = open_checkpoint(path).tensors["w"]
    with SourceFiles() as files:
        norms, directions = (torch.cat(list(Unfolded(stored, is_norm=half).blocks(files))) for half in (True, False))
    assert norms.tolist() == [[[5.0]], [[0.0]]]
    save_file({"g": norms, "v": directions}, path)
    tensors = open_checkpoint(path).tensors
    with SourceFiles() as files:
        assert torch.equal(torch.cat(list(Folded(tensors["g"], tensors["v"]).blocks(files))), weight)


def test_an_empty_tensor_and_a_scalar_are_copied(tmp_path: Path) -> None:
    state = {"none": torch.zeros(0, 3), "width": torch.zeros(2, 0), "scalar": torch.tensor(2.5)}
    save_file(state, path := tmp_path / "x.safetensors")
    parameters = Parameters(open_checkpoint(path).tensors, {key: Rule((key,)) for key in state})
    with SourceFiles() as files:
        for key, tensor in state.items():
            blocks = list(parameters.rows(Rule((key,)), tuple(tensor.shape), None).blocks(files))
            assert torch.equal(torch.cat([block.flatten() for block in (*blocks, torch.empty(0))]), tensor.flatten())


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small DiT in ComfyUI's layout."""
    return dit_layouts.write_layout(tmp_path / "in", "comfyui")


def test_shards_are_no_larger_than_asked_for(source: Path, tmp_path: Path) -> None:
    found = converted(source, tmp_path / "out", "diffusers", max_shard_bytes=20_000)
    assert_same(found, dit_layouts.state("diffusers"))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"diffusion_pytorch_model-00001-of-{len(files):05}.safetensors"
    for file in files:
        sizes = [info.num_bytes for info in read_header(file).tensors.values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    index = json.loads((tmp_path / "out/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()


def test_even_one_official_file_has_an_index(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "official")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]


def test_tensors_are_aligned_and_marked_for_torch(tmp_path: Path) -> None:
    source = dit_layouts.write_layout(tmp_path / "in", "official", torch.bfloat16)
    convert(source, tmp_path / "x.safetensors", "comfyui")
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"}
    assert header.data_start % 8 == 0
    assert all(info.start % (2 if info.dtype == "BF16" else 4) == 0 for info in header.tensors.values())


def test_the_same_conversion_writes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(source, tmp_path / name, "official", max_shard_bytes=50_000)
    assert everything_in(tmp_path / "a") == everything_in(tmp_path / "b")
    convert(tmp_path / "a", tmp_path / "x.safetensors", "comfyui")
    convert(tmp_path / "x.safetensors", tmp_path / "c", "official", max_shard_bytes=50_000)
    assert everything_in(tmp_path / "a") == everything_in(tmp_path / "c")


def test_what_exists_is_left_alone_unless_it_shall_be_replaced(source: Path, tmp_path: Path) -> None:
    for to in ("official", "comfyui"):
        destination = target(tmp_path, to)
        converted(source, destination, to)
        before = everything_in(tmp_path)
        with pytest.raises(ConfigError, match="exists; remove it, choose another name, or give --force"):
            convert(source, destination, to)
        assert everything_in(tmp_path) == before
        if to == "official":
            (destination / "old.safetensors").write_bytes(b"")
        convert(source, destination, to, force=True)
        assert everything_in(tmp_path) == before


def test_a_file_may_be_replaced_by_its_own_conversion(source: Path) -> None:
    assert_same(
        converted(source, source, "comfyui", dtype="BF16", force=True), dit_layouts.state("comfyui", torch.bfloat16)
    )


@pytest.mark.parametrize("name", ["notes.txt", "sub/x.safetensors", "model.ckpt"])
def test_a_folder_with_other_things_is_never_replaced(name: str, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "out" / name
    other.parent.mkdir(parents=True)
    other.touch()
    with pytest.raises(ConfigError, match="holds more than weights"):
        convert(source, tmp_path / "out", "official", force=True)
    assert other.exists()


def test_destinations_that_will_not_do_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(source)
    for destination, to, expected in (
        (tmp_path / "no/such/x.safetensors", "comfyui", "no/such does not exist"),
        (tmp_path / "out", "comfyui", r"must end in .safetensors"),
        (source.parent, "official", "is the folder that"),
        (source.parent / "x" / "..", "official", "is the folder that"),
        (tmp_path / "link.safetensors", "comfyui", "neither a file nor a folder"),
        (source / "x", "official", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=expected):
            convert(source, destination, to, force=True)
    assert_same(tensors_of(source), dit_layouts.state("comfyui"))


def test_a_full_disk_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    before = everything_in(tmp_path)
    with pytest.raises(ConfigError, match=r"needs 0\.\d+ GB, its disk has 0\.000 GB free"):
        convert(source, tmp_path / "out", "official", report=lambda *_: pytest.fail("wrote"))
    assert everything_in(tmp_path) == before


def interruptions(source: Path) -> dict[str, tuple[Callable[[int, int], None], type[BaseException], str]]:
    def raise_(error: BaseException) -> None:
        raise error

    return {
        "Ctrl-C": (lambda *_: raise_(KeyboardInterrupt("pressed")), KeyboardInterrupt, "pressed"),
        "disk full": (
            lambda *_: raise_(OSError(errno.ENOSPC, "No space left on device")),
            ConfigError,
            "out cannot be written: No space left on device",
        ),
        "source cut": (lambda *_: os.truncate(source, 5000), CheckpointError, "has changed while it was read"),
    }


@pytest.mark.parametrize("what", ["Ctrl-C", "disk full", "source cut"])
@pytest.mark.parametrize("is_replacing", [False, True])
def test_nothing_is_left_of_a_conversion_that_fails(
    what: str, is_replacing: bool, source: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    if is_replacing:
        convert(source, place / "out", "diffusers")
    before = everything_in(place)
    report, error, expected = interruptions(source)[what]
    with pytest.raises(error, match=expected):
        convert(source, place / "out", "diffusers", force=True, report=report)
    assert everything_in(place) == before
    assert [path.name for path in place.iterdir()] == (["out"] if is_replacing else [])


def test_progress_is_counted_to_the_end(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "x.safetensors", "comfyui", report=lambda *told: seen.append(told))
    header = read_header(tmp_path / "x.safetensors")
    assert [written for written, _ in seen] == sorted(written for written, _ in seen)
    assert seen[-1] == (header.size_bytes - header.data_start,) * 2


# ---- what cannot be converted ---------------------------------------------------------------------------------------


def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path) -> None:
    nvfp4 = write_sparse(tmp_path / "n.safetensors", published("text_encoder.comfy_nvfp4_awq"))
    fp8 = {key: (shape, "F8_E4M3") for key, (shape, _) in published("text_encoder.comfy_bf16").items()}
    audio = write_sparse(tmp_path / "a.safetensors", published("audio_vae.comfy_fp32"))
    broken = dict(published("dit.comfy_bf16"))
    broken.popitem()
    adapter = TABLES.parent / "raven" / "lora_raven.safetensors"
    for path, to, expected in (
        (nvfp4, "transformers", "has 4-bit weights"),
        (write_sparse(tmp_path / "f.safetensors", fp8), "transformers", "has FP8 weights"),
        (audio, "official", "layouts of the audio VAE are diffusers and comfyui; the official repository has diffuse"),
        (audio, "transformers", "layouts of the audio VAE are diffusers and comfyui"),
        (write_sparse(tmp_path / "u.safetensors", {"a": ([1], "F32")}), "diffusers", "not recognised"),
        (write_sparse(tmp_path / "b.safetensors", broken), "diffusers", "1 missing"),
        (adapter, "diffusers", "is an adapter"),
        (tmp_path / "absent", "diffusers", "is missing"),
        (tmp_path, "diffusers", "holds"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=expected):
            convert(path, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "F16"}, "the DiT is converted to BF16 or F32 only"),
        ({"layout": "diffusers"}, "dit_layout"),
        ({"max_shard_bytes": 0}, "must be at least 1"),
    ],
)
def test_options_that_will_not_do_are_refused(
    options: dict[str, Any], expected: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        convert(source, tmp_path / "out", "official", **options)


def test_options_for_something_else_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for folders; the comfyui layout is one file"):
        convert(source, tmp_path / "x.safetensors", "comfyui", max_shard_bytes=1000)
    audio = write_vae(tmp_path / "audio", "audio", "diffusers")
    with pytest.raises(ConfigError, match="--layout is for a DiT"):
        convert(audio, tmp_path / "x.safetensors", "comfyui", layout="comfyui")
    with pytest.raises(ConfigError, match="audio VAE is converted to F32 only"):
        convert(audio, tmp_path / "x.safetensors", "comfyui", dtype="F16")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_made(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(source), str(tmp_path / "out"), "--to", "official"])
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == f"{tmp_path / 'out'}: {source} in the official layout"
    assert said.out.splitlines()[1].startswith("note: The source has no config.json")
    assert said.err == ""  # which is no terminal
    assert exit_status(inspect([tmp_path / "out"])) == 0
    with pytest.raises(SystemExit, match=r"convert_checkpoint: .* exists"):
        main([str(source), str(tmp_path / "out"), "--to", "official"])


def test_every_layout_may_be_asked_for() -> None:
    assert set(get_args(Layout)) >= set(get_args(DitLayout))


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 130)])
def test_a_signal_leaves_nothing(name: str, status: int, source: Path, tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from tools import convert_checkpoint
convert_checkpoint._Progress.report = lambda self, *_: os.kill(os.getpid(), signal.{name})
convert_checkpoint.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out"), "--to", "diffusers"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert (result.returncode, result.stderr.splitlines()[-1:]) == (
        status,
        ["convert_checkpoint: interrupted; nothing has been written"],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# ---- memory ---------------------------------------------------------------------------------------------------------

LARGE = Architecture(
    num_layers=1,
    num_refiner_layers=1,
    num_attention_heads=16,
    hidden_size=1024,
    ffn_dim=16384,
    text_dim=64,
    time_embed_hidden_dim=64,
    time_embed_dim=64,
)
"""One block, whose largest tensor counts."""
MEASURE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from services.checkpoints.source import open_checkpoint
from services.common.weights import read_tensor
from tests.peak_memory import peak_of
from tools.convert_checkpoint import convert

warm_up, source, out = map(Path, sys.argv[1:])
convert(warm_up, out / "warm", "diffusers")
tensors = open_checkpoint(source).tensors
largest = max(tensors, key=lambda key: tensors[key].info.num_bytes)
print(json.dumps({
    "peak": peak_of(lambda: convert(source, out / "large", "diffusers"))[0],
    "one tensor": peak_of(lambda: read_tensor(largest, tensors[largest]))[0],
    "bytes": tensors[largest].info.num_bytes,
}))
"""


def test_no_more_than_a_part_of_a_tensor_is_in_memory(source: Path, tmp_path: Path) -> None:
    large = write_sparse(tmp_path / "minimax_h3.safetensors", dit_layouts.described("comfyui", LARGE))
    fill(large, INV_FREQ, LARGE.inv_freq())
    command = [sys.executable, "-c", MEASURE, str(source), str(large), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["bytes"] == 2 * 16384 * 1024 * 2
    assert measured["one tensor"] > measured["bytes"] * 0.9  # so the measure would see a tensor that is held
    assert measured["peak"] < SLACK_BYTES < measured["bytes"] / 2


def test_stored_tensors_are_told_apart_by_identity() -> None:
    """Two tensors may be alike in everything: rows must still come from the right one."""
    alike = [StoredTensor(Path("x"), TensorInfo("F32", (2,), 0, 8)) for _ in range(2)]
    parameters = Parameters({"q": alike[0], "k": alike[1]}, {"q": Rule(("q",)), "k": Rule(("k",))})
    runs = parameters.rows(Rule(("q", "k"), Rows.STACKED), (4,), None).runs
    assert [run.stored is one for run, one in zip(runs, alike, strict=True)] == [True, True]
