from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file
from torch import nn

from h3stream.errors import CheckpointError, ConfigError
from h3stream.job import ModelPart
from services.checkpoints.dit import ISLANDS
from services.checkpoints.dit_modules import (
    INV_FREQ,
    Architecture,
    DitLayout,
    key_map,
    official_modules,
    parameter_shapes,
)
from services.checkpoints.source import open_checkpoint
from services.common.weights import split_rows
from services.dit.config import DitConfig
from services.dit.weights import load_transformer, open_transformer
from services.dit.worker import DitWorker
from tests.dit_layouts import LAYOUTS, class_config, described, state, write_folder, write_layout
from tests.h3_vectors import case
from tests.peak_memory import SLACK_BYTES
from tests.weight_files import fill, published, write_shards, write_sparse

ROOT = Path(__file__).parents[4]

TABLE_OF = {"diffusers": "dit.diffusers", "official": "dit.official", "comfyui": "dit.comfy_bf16"}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
VELOCITY_TOLERANCE = 5e-5
"""Absolute, of the golden forwards: an independent forward in float32 differs by 1.5e-6."""


@pytest.fixture(scope="module")
def published_class() -> MiniMaxH3Transformer3DModel:
    """The published class at full size, without weights."""
    with torch.device("meta"):
        return MiniMaxH3Transformer3DModel()


def velocity(model: MiniMaxH3Transformer3DModel, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Video and audio velocity of a golden case."""
    inputs = {key: tensor for key, tensor in case("dit_cases", name).items() if not key.startswith(("out_", "num_"))}
    with torch.no_grad():
        return model(**inputs, return_dict=False)


class TestTheFullSizeModel:
    def test_the_class_has_the_parameters_that_we_count_on(self, published_class: MiniMaxH3Transformer3DModel) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in published_class.state_dict().items()}
        assert shapes == parameter_shapes(Architecture())
        config = {field.name: published_class.config[field.name] for field in dataclasses.fields(Architecture)}
        assert config == dataclasses.asdict(Architecture())

    def test_the_official_names_cover_every_linear_module(self, published_class: MiniMaxH3Transformer3DModel) -> None:
        linears = {name: module for name, module in published_class.named_modules() if isinstance(module, nn.Linear)}
        modules = official_modules(50, 2)
        assert {name for names in modules.values() for name in names} == linears.keys()
        # Rank 128 on every official module is the RAVEN adapter's published parameter count.
        sizes = [
            (linears[names[0]].in_features, sum(linears[n].out_features for n in names)) for names in modules.values()
        ]
        assert sum(128 * (num_in + num_out) for num_in, num_out in sizes) == 1_264_353_280

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_layout_s_tensors_become_the_class_s_parameters(
        self, published_class: MiniMaxH3Transformer3DModel, layout: DitLayout
    ) -> None:
        table, expected = published(TABLE_OF[layout]), published("dit.diffusers")
        parameters: dict[str, torch.Tensor] = {}
        for key, rule in key_map(layout, 50, 2, 56).items():
            shape, dtype = table.pop(key)
            if rule.targets:
                made = split_rows(rule, torch.empty(tuple(shape), dtype=DTYPES[dtype], device="meta"))
                assert parameters.keys().isdisjoint(rule.targets)
                parameters.update(zip(rule.targets, made, strict=True))
        assert table == {}
        assert {name: (list(t.shape), t.dtype) for name, t in parameters.items()} == {
            name: (list(shape), DTYPES[dtype]) for name, (shape, dtype) in expected.items()
        }
        assert len(parameters) == 638
        published_class.load_state_dict(parameters, strict=True, assign=True)


class TestTheLayouts:
    @pytest.mark.parametrize("stack_dtype", [torch.float32, torch.bfloat16])
    def test_one_model_in_three_layouts_computes_the_same_bits(self, tmp_path: Path, stack_dtype: torch.dtype) -> None:
        models = {layout: load_transformer(write_layout(tmp_path, layout, stack_dtype), "auto") for layout in LAYOUTS}
        expected = models["diffusers"].state_dict()
        assert expected.keys() == state("diffusers").keys()
        for layout, model in models.items():
            found = model.state_dict()
            assert all(torch.equal(found[key], expected[key]) for key in expected), layout
            assert torch.equal(model.rope.inv_freq, models["diffusers"].rope.inv_freq)
            # The ComfyUI file and the official folder have no config.json: the sizes come from their shapes.
            assert {k: v for k, v in class_config().items() if k != "_class_name"}.items() <= (
                {**model.config, "patch_size": list(model.config.patch_size)}.items()
            )
            for name in ("t2va", "first_last"):
                for ours, theirs in zip(velocity(model, name), velocity(models["diffusers"], name), strict=True):
                    assert torch.equal(ours, theirs), (layout, name)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_what_they_compute_is_the_golden_velocity(self, tmp_path: Path, layout: DitLayout) -> None:
        model = load_transformer(write_layout(tmp_path, layout), "auto")
        video, audio = velocity(model, "ref2va")
        expected = case("dit_cases", "ref2va")
        assert (video - expected["out_video"]).abs().max() < VELOCITY_TOLERANCE
        assert (audio - expected["out_audio"]).abs().max() < VELOCITY_TOLERANCE

    def test_rows_in_the_other_order_load_and_compute_something_else(self, tmp_path: Path) -> None:
        """Why the order is never guessed: nothing but the output shows a wrong one."""
        path = write_layout(tmp_path, "official")
        wrong, right = (
            velocity(load_transformer(path, "auto", layout), "t2va")[0] for layout in ("comfyui", "official")
        )
        assert (wrong - right).abs().max() > 0.1

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_worker_takes_each_of_them_without_a_model_directory(self, tmp_path: Path, layout: DitLayout) -> None:
        path = write_layout(tmp_path, layout)
        worker = DitWorker(DitConfig(dit=path, dit_layout=layout, device="cpu"))
        (part,) = worker.parts
        assert (part.component, part.layout, part.source) == ("dit", layout, path.name)
        folder = path if path.is_dir() else path.parent
        assert worker.weight_digests.keys() == {
            f"dit/{file.name}" for file in folder.iterdir() if file.suffix == ".safetensors"
        }
        assert worker.weights.host_bytes == part.num_bytes + 4 * class_config()["rope_freq_dim"]

    def test_a_layout_that_cannot_be_told_must_be_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = write_folder(tmp_path / "transformer", state("comfyui"))
        save_file(state("comfyui"), file := tmp_path / "h3.safetensors")
        with pytest.raises(ConfigError, match="set dit_layout to official or to comfyui"):
            load_transformer(folder, "auto")
        assert open_transformer(folder, "comfyui").layout == "comfyui"
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert open_transformer(file).layout == "comfyui"
        assert "taken to have ComfyUI's order of rows" in caplog.text
        with pytest.raises(ConfigError, match="dit_layout is 'diffusers', but"):
            load_transformer(folder, "auto", "diffusers")

    @pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
    def test_a_file_that_comfyui_saved_again_is_the_same_model(self, tmp_path: Path, prefix: str) -> None:
        save_file(
            {f"{prefix}{key}": tensor for key, tensor in state("comfyui").items()}, tmp_path / "saved.safetensors"
        )
        found = load_transformer(tmp_path / "saved.safetensors", "auto").state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in state("diffusers").items())

    def test_a_part_is_described_as_its_files_are(self, tmp_path: Path) -> None:
        files = open_transformer(write_layout(tmp_path, "official", torch.bfloat16))
        tensors = [tensor for key, tensor in state("official", torch.bfloat16).items() if key != INV_FREQ]
        assert files.part == ModelPart(
            component="dit",
            layout="official",
            source="transformer",
            data_types="BF16, F32",
            num_parameters=sum(tensor.numel() for tensor in tensors),
            num_bytes=sum(tensor.nbytes for tensor in tensors),
        )
        single = open_transformer(write_layout(tmp_path, "comfyui"))
        assert single.part.source == "minimax_h3_fl2va_bf16.safetensors"
        assert single.part.num_parameters == files.part.num_parameters


class TestDtypes:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(
        ("compute_dtype", "expected"),
        [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)],
    )
    def test_the_stack_takes_the_compute_dtype_and_the_islands_stay_float32(
        self, tmp_path: Path, layout: DitLayout, compute_dtype: str, expected: torch.dtype
    ) -> None:
        model = load_transformer(write_layout(tmp_path, layout, torch.bfloat16), compute_dtype)
        stored = state("diffusers", torch.bfloat16)
        for key, tensor in model.state_dict().items():
            assert tensor.dtype == (torch.float32 if key.startswith(ISLANDS) else expected), key
            assert torch.equal(tensor, stored[key].to(tensor.dtype)), key
            assert tensor.is_contiguous()
        assert model.rope.inv_freq.dtype == torch.float32
        assert not model.training
        assert not any(t.is_meta or t.requires_grad for t in (*model.parameters(), *model.buffers()))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_nothing_keeps_more_memory_than_it_shows(self, tmp_path: Path, layout: DitLayout) -> None:
        for name, tensor in load_transformer(write_layout(tmp_path, layout), "auto").state_dict().items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name

    @pytest.mark.parametrize("odd", [torch.float32, torch.float16])
    def test_a_mixed_stack_needs_an_explicit_dtype(self, tmp_path: Path, odd: torch.dtype) -> None:
        tensors = state("diffusers", torch.bfloat16) | {"norm_out.norm.weight": torch.full((48,), 3.0, dtype=odd)}
        folder = write_folder(tmp_path / "transformer", tensors, class_config())
        with pytest.raises(CheckpointError, match=r"stored in BF16, F(32|16), so .*; set compute_dtype to bfloat16 or"):
            load_transformer(folder, "auto")
        norm = load_transformer(folder, "bfloat16").norm_out.norm.weight
        assert torch.equal(norm, torch.full((48,), 3.0, dtype=torch.bfloat16))

    def test_float32_modules_that_were_narrowed_are_refused(self, tmp_path: Path) -> None:
        tensors = {key: tensor.bfloat16() for key, tensor in state("diffusers").items()}
        with pytest.raises(CheckpointError, match="12 stored in BF16 that run in float32, so their precision is lost"):
            load_transformer(write_folder(tmp_path / "transformer", tensors, class_config()), "bfloat16")


class TestRefusals:
    def test_everything_that_is_wrong_is_said_at_once(self, tmp_path: Path) -> None:
        tensors = dict(state("official"))
        tensors["blocks.0.surprise"] = torch.zeros(1)
        del tensors["final_layer.video_out.bias"]
        tensors["blocks.1.mlp.fc2.weight"] = torch.zeros(48, 63)
        tensors["time_embedder.proj_in.bias"] = tensors["time_embedder.proj_in.bias"].half()
        path = write_folder(tmp_path / "transformer", tensors, num_shards=2)
        with pytest.raises(CheckpointError) as raised:
            load_transformer(path, "auto")
        assert str(raised.value) == (
            f"{path}, read as a DiT in the official layout: 1 unknown: blocks.0.surprise; "
            "1 missing: final_layer.video_out.bias; "
            "1 of shape [48, 63], expected [48, 64]: blocks.1.mlp.fc2.weight; "
            "1 stored in F16 that run in float32, so their precision is lost: time_embedder.proj_in.bias; "
            "take files that keep them in F32"
        )

    @pytest.mark.parametrize(("index", "value"), [(3, 500.0 ** (-3 / 4)), (0, math.nan), (1, 0.1001)])
    def test_another_rotary_base_is_refused(self, tmp_path: Path, index: int, value: float) -> None:
        tensors = dict(state("comfyui"))
        tensors[INV_FREQ] = tensors[INV_FREQ].clone()
        tensors[INV_FREQ][index] = value
        save_file(tensors, tmp_path / "h3.safetensors")
        with pytest.raises(
            CheckpointError, match=rf"rope.inv_freq\[{index}\] is .*, expected .*: the model was trained"
        ):
            open_transformer(tmp_path / "h3.safetensors")

    @pytest.mark.parametrize("layout", ["official", "comfyui"])
    def test_the_published_rotary_frequencies_are_those_that_are_computed(self, layout: DitLayout) -> None:
        architecture = Architecture(rope_freq_dim=len(state(layout)[INV_FREQ]))
        assert state(layout)[INV_FREQ].tolist() == pytest.approx(architecture.inv_freq(), rel=2e-7)

    def test_a_variant_is_refused_with_its_reason(self, tmp_path: Path) -> None:
        tensors = {key: tensor for key, tensor in state("comfyui").items() if not key.startswith("time_embedder.")}
        save_file(tensors | {"adaln_t_table": torch.zeros(1025, 8)}, path := tmp_path / "minimax_h3_pruned.safetensors")
        with pytest.raises(CheckpointError, match=r"pruned\.safetensors is a pruned DiT: a rank-8 fit"):
            load_transformer(path, "auto")

    def test_another_part_of_the_model_is_called_by_its_name(self, tmp_path: Path) -> None:
        path = write_sparse(tmp_path / "x.safetensors", published("video_vae.diffusers"))
        with pytest.raises(CheckpointError, match=r"x.safetensors is the video VAE \(diffusers layout\), not the DiT"):
            load_transformer(path, "auto")

    def test_a_file_that_shrinks_after_it_was_checked_is_an_error(self, tmp_path: Path) -> None:
        path = write_layout(tmp_path, "comfyui")
        files = open_transformer(path)
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(CheckpointError, match="has changed: it ends within"):
            files.load("auto")

    def test_weights_for_reference_media_are_taken_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_file(state("comfyui"), path := tmp_path / "minimax_h3_ref2va_bf16.safetensors")
        open_transformer(path)
        assert any("ref2va weights" in record.message for record in caplog.records if record.levelname == "WARNING")


LARGE = Architecture(
    num_layers=2,
    num_refiner_layers=1,
    num_attention_heads=8,
    hidden_size=1024,
    ffn_dim=8192,
    text_dim=512,
    time_embed_hidden_dim=1024,
    time_embed_dim=512,
)
"""Few blocks, wide enough that their largest tensor counts."""
MEASURE = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from services.checkpoints.source import open_checkpoint
from services.common.weights import read_tensors
from services.dit.weights import load_transformer
from tests.peak_memory import peak_of

def everything_twice(path):
    return [(read, read.clone()) for _, read in read_tensors(open_checkpoint(path).tensors)]

warm_up, *cases = sys.argv[1:]
load_transformer(Path(warm_up), "auto")  # imports and buffers that every load needs are there before it is measured
for case in cases:
    path, compute_dtype = case.split("|")
    if os.fork() == 0:  # every load begins with the same heap
        peak, model = peak_of(lambda: load_transformer(Path(path), compute_dtype))
        module = sum(tensor.nbytes for tensor in model.state_dict().values())
        del model
        twice, _ = peak_of(lambda: everything_twice(Path(path)))
        print(json.dumps({"peak": peak, "module": module, "twice": twice}), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def write_large(folder: Path, layout: DitLayout) -> int:
    """Writes LARGE in bfloat16 as shards that take no room on the disk; returns the bytes of its largest tensor."""
    tensors = described(layout, LARGE)
    stored = open_checkpoint(write_shards(folder, tensors, 4)).tensors
    if INV_FREQ in stored:
        fill(stored[INV_FREQ].path, INV_FREQ, LARGE.inv_freq())
    sizes = (math.prod(shape) * (4 if dtype == "F32" else 2) for shape, dtype in tensors.values())
    return max(sizes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_a_load_takes_the_model_s_memory_and_one_tensor(tmp_path: Path) -> None:
    largest = {layout: write_large(tmp_path / layout, layout) for layout in ("official", "diffusers")}
    cases = [("official", "auto"), ("official", "float32"), ("diffusers", "bfloat16")]
    arguments = [f"{tmp_path / layout}|{compute_dtype}" for layout, compute_dtype in cases]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, write_layout(tmp_path / "small", "official"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    for (layout, compute_dtype), line in zip(cases, result.stdout.splitlines()[-len(cases) :], strict=True):
        found = json.loads(line)
        print(f"{layout} as {compute_dtype}: {found}, largest tensor {largest[layout]}")
        assert found["peak"] <= found["module"] + largest[layout] + SLACK_BYTES
        # The measurement sees what it should: the model itself, and a second copy of the files where there is one.
        assert found["peak"] > 0.95 * found["module"]
        if compute_dtype != "float32":  # there the model is twice as large as its files
            assert found["twice"] > found["module"] + largest[layout] + SLACK_BYTES
