from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints.adapter_registry import AdapterHeader, bind, read_adapter, read_registry
from services.checkpoints.dit_modules import Architecture, official_modules, parameter_shapes
from services.common.config import AdapterSource
from tests.adapter_files import FORMATS, Tensors, named, official_pairs, published_pairs, with_alphas, write
from tests.raven_vectors import FIXTURES
from tests.weight_files import write_sparse

RAVEN_FILE = FIXTURES / "lora_raven.safetensors"
RAVEN = "base_model.model.dit."
VECTORS = Architecture(
    num_layers=3,
    num_refiner_layers=2,
    num_attention_heads=2,
    hidden_size=96,
    ffn_dim=112,
    text_dim=64,
    freq_dim=64,
    time_embed_hidden_dim=48,
    time_embed_dim=32,
)
FULL = Architecture()
A, B = torch.zeros(2, 8), torch.zeros(8, 2)


def header_of(path: Path, *, is_streaming: bool = False) -> AdapterHeader:
    return dataclasses.replace(read_adapter(AdapterSource("a", path)), is_streaming=is_streaming)


def write_style(path: Path) -> Path:
    return write(path, with_alphas(named({"blocks.0.mlp.fc2": (A, B)}, "diffusion_model.")))


# --- headers ----------------------------------------------------------------------------------------------------------


def test_a_header_tells_what_there_is_to_know_of_a_file() -> None:
    header = read_adapter(AdapterSource("extra", FIXTURES / "lora_extra.safetensors", 0.5))
    assert (header.name, header.file_name, header.format) == ("extra", "lora_extra.safetensors", "comfyui")
    assert (header.min_rank, header.max_rank, header.min_alpha, header.max_alpha) == (2, 4, 1, 4)
    assert (header.num_modules, header.default_strength, header.is_streaming) == (20, 0.5, False)
    assert header.num_parameters == sum(m.down.info.num_elements + m.up.info.num_elements for m in header.modules)
    assert (header.partition, header.trained_steps, header.trained_video_shift) == ("", None, None)


@pytest.mark.parametrize(
    ("name", "steps", "video_shift", "partition"),
    [
        ("minimax_h3_fl2v_turbo_4step_v0.1", 4, 12, "fl2va"),
        ("minimax_h3_fl2v_turbo_8step_v1.0_bf16", 8, 12, "fl2va"),
        ("minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16", 4, 6, "fl2va"),
        ("minimax_h3_fl2v_turbo_8step_v1.0_768p_comfyui_bf16", 8, 6, "fl2va"),
        ("minimax_h3_ref2v_turbo_8step_v1.0_768p_comfyui_resized_avg_rank_64_bf16", 8, 6, "ref2va"),
        ("minimax_h3_fl2v_lightx2v_turbo_4step_v0.1_comfy", 4, 12, "fl2va"),
        ("minimax_h3_turbo_4step", None, None, ""),  # another producer's, whose shifts are not told
        ("minimax_h3_fl2v_turbo_0step", None, None, "fl2va"),
        ("my_fl2v_turbo_4step_768p", None, None, "fl2va"),
    ],
)
def test_turbo_adapters_carry_their_schedules_in_their_names(
    name: str, steps: int | None, video_shift: float | None, partition: str, tmp_path: Path
) -> None:
    header = header_of(write_style(tmp_path / f"{name}.safetensors"))
    assert (header.trained_steps, header.trained_video_shift, header.partition) == (steps, video_shift, partition)
    assert header.trained_audio_shift == (None if video_shift is None else 3)


def test_a_folder_of_peft_is_called_as_somebody_called_it(tmp_path: Path) -> None:
    folder = FORMATS["peft"][1](tmp_path).rename(tmp_path / "minimax_h3_ref2v_turbo_4step")
    header = header_of(folder)
    assert header.path == folder / "adapter_model.safetensors"
    assert header.file_name == "minimax_h3_ref2v_turbo_4step/adapter_model.safetensors"
    assert (header.format, header.trained_steps, header.partition) == ("peft", 4, "ref2va")
    assert {module.alpha for module in header.modules} == {8}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"blocks.0.mlp.fc2.lora_A.weight": A, "blocks.0.mlp.fc2.hada_w1_a": A},
            r"a\.safetensors is no plain LoRA",
        ),
        ({"some.weight": A}, "is not recognised as any part of the model; expected the adapter"),
        (named({"img_in": (A, B)}), "is an adapter of another model: 0 of its 1 modules"),
    ],
)
def test_a_file_that_is_no_adapter_for_the_dit_is_refused(tensors: Tensors, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        header_of(write(tmp_path / "a.safetensors", tensors))


def test_a_file_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk.safetensors").write_bytes(b"no safetensors file")
    for name, named_file in (("folder", "adapter_model"), ("junk.safetensors", "junk")):
        with pytest.raises(CheckpointError, match=named_file):
            header_of(tmp_path / name)


# --- the registry -----------------------------------------------------------------------------------------------------


def test_given_adapters_come_first_then_the_folders_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "adapters"
    shutil.copytree(FORMATS["peft"][1](tmp_path), folder / "a style.v2")
    write_style(folder / "zeta.safetensors")
    write_style(folder / "beta (1).safetensors")
    (folder / "._beta.safetensors").write_text("what a Mac leaves beside files")
    (folder / "notes").mkdir()
    (folder / "readme.md").write_text("no adapter")
    given = (AdapterSource("y", write_style(tmp_path / "given.safetensors"), 2.0), AdapterSource("x", RAVEN_FILE))
    registry = read_registry(given, tmp_path / "model")
    assert [header.name for header in registry] == ["y", "x", "a-style.v2", "beta-1", "zeta"]
    assert [header.default_strength for header in registry] == [2, 1, 1, 1, 1]
    assert [header.is_streaming for header in registry] == [False, True, False, False, False]


def test_what_is_given_or_has_a_name_that_is_given_is_left_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    again = write_style(folder / "again.safetensors")
    write_style(folder / "taken.safetensors")
    link = tmp_path / "link.safetensors"
    link.symlink_to(again)
    given = (AdapterSource("first", link), AdapterSource("taken", write_style(tmp_path / "other.safetensors")))
    registry = read_registry(given, tmp_path)
    assert [(header.name, header.path) for header in registry] == [
        ("first", link),
        ("taken", tmp_path / "other.safetensors"),
    ]


def test_nothing_given_and_no_folder_is_no_adapter(tmp_path: Path) -> None:
    assert read_registry((), None) == read_registry((), tmp_path) == ()


def test_two_adapters_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [write_style(tmp_path / "adapters" / name) for name in ("a b.safetensors", "a-b.safetensors")]
    with pytest.raises(ConfigError, match=r"a b\.safetensors and .*a-b\.safetensors are both called a-b"):
        read_registry((), tmp_path)
    with pytest.raises(ConfigError, match="are both called x"):
        read_registry([AdapterSource("x", path) for path in paths], None)


def test_a_file_of_the_folder_whose_name_leaves_none_is_refused(tmp_path: Path) -> None:
    write_style(tmp_path / "adapters" / "___.safetensors")
    with pytest.raises(ConfigError, match="the name is ''"):
        read_registry((), tmp_path)


def test_streaming_takes_the_only_adapter_of_ravens_format_or_the_one_called_raven(tmp_path: Path) -> None:
    style = AdapterSource("raven", write_style(tmp_path / "style.safetensors"))
    first, second = AdapterSource("first", RAVEN_FILE), AdapterSource("raven", RAVEN_FILE)

    def streaming(*sources: AdapterSource) -> list[str]:
        return [f"{header.name} {header.format}" for header in read_registry(sources, None) if header.is_streaming]

    assert streaming(style) == []  # its name is no evidence
    assert streaming(first, style) == ["first raven"]
    assert streaming(first, second) == ["raven raven"]
    with pytest.raises(ConfigError, match=r"2 adapters can be the one that streaming uses: .*--adapter raven=PATH"):
        streaming(first, AdapterSource("second", RAVEN_FILE))


def test_one_file_under_two_names_is_told_by_both_and_with_what_became_of_the_models_own(tmp_path: Path) -> None:
    own = tmp_path / "adapters" / "raven.safetensors"
    own.parent.mkdir()
    shutil.copy(RAVEN_FILE, own)
    with pytest.raises(ConfigError) as caught:
        read_registry((AdapterSource("a", own), AdapterSource("b", own)), tmp_path)
    assert str(caught.value) == (
        f"2 adapters can be the one that streaming uses: a={own}, b={own}; give one of them the name raven (--adapter "
        "raven=PATH), or give one alone. A file that is given takes the place of the same file in the model "
        "directory, whatever its name there"
    )


def test_the_schedule_of_streaming_is_its_shifts_for_any_steps() -> None:
    (header,) = read_registry((AdapterSource("raven", RAVEN_FILE),), None)
    assert (header.trained_steps, header.trained_video_shift, header.trained_audio_shift) == (None, 12, 3)
    assert header.partition == "fl2va"


def with_metadata(path: Path, **metadata: str) -> Path:
    """RAVEN's adapter, its metadata saying more."""
    tensors = load_file(RAVEN_FILE)
    with safe_open(RAVEN_FILE, "pt") as file:
        save_file(tensors, path, {**(file.metadata() or {}), **metadata})
    return path


def test_metadata_says_what_shifts_an_adapter_was_trained_with_in_place_of_its_kind_s(tmp_path: Path) -> None:
    header = header_of(with_metadata(tmp_path / "a.safetensors", video_shift="2.0"))
    assert (header.trained_video_shift, header.trained_audio_shift) == (2, 3)
    header = header_of(with_metadata(tmp_path / "b.safetensors", video_shift="1", audio_shift="0.5"))
    assert (header.trained_video_shift, header.trained_audio_shift) == (1, 0.5)


@pytest.mark.parametrize("shift", ["", "twelve", "0", "-1", "101", "nan", "inf"])
def test_a_shift_that_is_none_is_refused(tmp_path: Path, shift: str) -> None:
    path = with_metadata(tmp_path / "a.safetensors", audio_shift=shift)
    with pytest.raises(CheckpointError) as caught:
        header_of(path)
    rule = "which is no number from 0.01 to 100"
    assert str(caught.value) == f"{path}: its metadata says audio_shift {shift!r}, {rule}"


# --- fitting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", FORMATS)
def test_every_module_of_every_format_fits(written: str, tmp_path: Path) -> None:
    header = header_of(FORMATS[written][1](tmp_path), is_streaming=written.startswith("raven"))
    binding = bind(header, VECTORS)
    assert (binding.modules, binding.faults) == (header.modules, ())


def published_raven(path: Path) -> Path:
    """RAVEN's published file without its weights: 532 tensors of float32 in 5 GB that take no room."""
    shapes, tensors = parameter_shapes(FULL), {}
    for official, names in official_modules(50, 2).items():
        weights = [shapes[f"{name}.weight"] for name in names]
        tensors[f"{RAVEN}{official}.lora_A.weight"] = ((128, weights[0][1]), "F32")
        tensors[f"{RAVEN}{official}.lora_B.weight"] = ((sum(rows for rows, _ in weights), 128), "F32")
    return write_sparse(path, tensors, {"lora_alpha": "128"})


def test_ravens_published_file_fits_the_published_dit(tmp_path: Path) -> None:
    header = header_of(published_raven(tmp_path / "raven.safetensors"), is_streaming=True)
    # docs/reference/raven-streaming.md §8.1
    assert (header.num_modules, header.num_parameters) == (266, 1_264_353_280)
    assert header.path.stat().st_size > 4 * header.num_parameters == 5_057_413_120
    shapes = {module.name: module.up.info.shape[0] for module in header.modules}
    assert shapes["blocks.49.attn.qkv_proj"] == 21504
    assert shapes["blocks.0.adaln_proj.linear"] == 96768
    assert shapes["token_refiner.blocks.1.mlp.fc1"] == 28672
    binding = bind(header, FULL, partition="fl2va")
    assert (len(binding.modules), binding.faults) == (266, ())
    targets = [f"{target}.weight" for module in binding.modules for target in module.rule.targets]
    linears = {name for name, shape in parameter_shapes(FULL).items() if len(shape) == 2}
    assert len(targets) == 370
    assert set(targets) == linears


def test_lightx2vs_published_file_fits_the_published_dit(tmp_path: Path) -> None:
    linears = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
    blocks = [f"transformer_blocks.{i}" for i in range(50)] + [f"token_refiner.refiner_blocks.{i}" for i in range(2)]
    tensors = {}
    for name in (f"{block}.{linear}" for block in blocks for linear in linears):
        rows, columns = parameter_shapes(FULL)[f"{name}.weight"]
        tensors[f"{name}.lora_A.default.weight"] = ((128, columns), "BF16")
        tensors[f"{name}.lora_B.default.weight"] = ((rows, 128), "BF16")
    name = "minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors"
    header = header_of(write_sparse(tmp_path / name, tensors, {"alpha": "128", "key_format": "minimax-h3-diffusers"}))
    assert (header.format, header.min_alpha, header.trained_steps, header.trained_video_shift) == (
        "lightx2v",
        128,
        4,
        6,
    )
    assert round(header.path.stat().st_size / 2**30, 2) == 1.29  # as published
    assert len(bind(header, FULL, partition="fl2va").modules) == 312


def test_the_streaming_adapter_must_change_everything_in_one_rank(tmp_path: Path) -> None:
    pairs = official_pairs()
    a, b = pairs.pop("blocks.1.mlp.fc2")
    pairs["blocks.0.mlp.fc2"] = (a[:2], b[:, :2])
    path = write(tmp_path / "a.safetensors", named(pairs, RAVEN))
    expected = r"30 of 31 modules match; 1 missing: blocks\.1\.mlp\.fc2; ranks from 2 to 4, expected one"
    for allow_partial in (False, True):
        with pytest.raises(CheckpointError, match=expected):
            bind(header_of(path, is_streaming=True), VECTORS, allow_partial=allow_partial)
    assert len(bind(header_of(path), VECTORS).modules) == 30  # any other may


def test_an_adapter_that_fits_in_part_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    pairs = official_pairs() | {
        "blocks.3.mlp.fc2": official_pairs()["blocks.2.mlp.fc2"],
        "blocks.0.attn.gate": (A, B),
        "condition_proj": (torch.zeros(4, 63), torch.zeros(96, 4)),
    }
    header = header_of(write(tmp_path / "a.safetensors", with_alphas(named(pairs, "diffusion_model."))))
    assert header.num_modules == 33
    with pytest.raises(CheckpointError) as raised:
        bind(header, VECTORS)
    assert str(raised.value) == (
        f"{header.path} does not fit the DiT: 30 of 33 modules match; "
        "1 that this DiT does not have: blocks.3.mlp.fc2; "
        "1 of A [4, 63] and B [96, 4], which do not fit a weight [96, 64]: condition_proj; "
        "1 that no DiT has: blocks.0.attn.gate; "
        "to use it in part, set allow_partial_adapters"
    )
    binding = bind(header, VECTORS, allow_partial=True)
    assert len(binding.modules) == 30
    assert len(binding.faults) == 3


@pytest.mark.parametrize("allow_partial", [False, True])
def test_an_adapter_of_which_nothing_fits_is_always_refused(allow_partial: bool, tmp_path: Path) -> None:
    # Other models of the same library have modules of these names, in other sizes.
    pairs = {f"transformer_blocks.{i}.attn.to_q": (A, B) for i in range(3)}
    header = header_of(write(tmp_path / "a.safetensors", named(pairs, "transformer.")))
    message = r"0 of 3 modules match; 3 of A \[2, 8\] and B \[8, 2\], .*: transformer_blocks\.\{0-2\}\.attn\.to_q$"
    with pytest.raises(CheckpointError, match=message):
        bind(header, VECTORS, allow_partial=allow_partial)


def test_an_adapter_for_the_other_weights_is_refused_where_both_are_known(tmp_path: Path) -> None:
    tensors = named(published_pairs(official_pairs()), "transformer_ref.")
    header = header_of(write(tmp_path / "a.safetensors", tensors))
    with pytest.raises(CheckpointError, match="was trained on the ref2va DiT, and the one that is loaded is fl2va"):
        bind(header, VECTORS, partition="fl2va", allow_partial=True)
    for partition in ("ref2va", ""):
        assert len(bind(header, VECTORS, partition=partition).modules) == 41
