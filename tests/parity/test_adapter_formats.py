"""One update of every linear module, written in each format that is read: the clip is the same to the last bit.

The arithmetic is the same in all of them: rows are copied, alpha / rank is 2 in each, and doubling B (in formats that
state no alpha) is exact. Only a file in fewer bits holds another update, and that one is the same as its float32 copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.dit.adapters import Adapter, AdapterBank
from services.dit.weights import load_transformer
from tests.adapter_files import FORMATS, named, official_pairs, with_alphas, write
from tests.raven_vectors import Recording, load, write_transformer

CASE = "c"
Latents = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def transformer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("formats") / "transformer"
    write_transformer(path)
    return load_transformer(path, request.param)


@pytest.fixture(scope="module")
def reference(transformer: Any, tmp_path_factory: pytest.TempPathFactory) -> Latents:
    """The clip that the file in RAVEN's own format makes."""
    _, write_raven = FORMATS["raven"]
    return clip(transformer, load(transformer, write_raven(tmp_path_factory.mktemp("reference"))))


def clip(transformer: Any, adapter: Adapter | None) -> Latents:
    bank = AdapterBank(transformer, {} if adapter is None else {"a": adapter})
    mix = () if adapter is None else (("a", 0.5),)
    recorded = Recording(transformer, bank, mix, CASE).tensors
    return {name: tensor for name, tensor in recorded.items() if name.startswith("x0.")}


def worst(actual: Latents, expected: Latents) -> float:
    assert actual.keys() == expected.keys()
    return max((actual[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("written", FORMATS)
def test_every_format_makes_the_same_clip(
    written: str, transformer: Any, reference: Latents, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    difference = worst(clip(transformer, load(transformer, FORMATS[written][1](tmp_path))), reference)
    with capsys.disabled():
        print(f"\n{written}, {transformer.context_embedder.weight.dtype}: difference {difference:.1e}")
    assert difference == 0


def test_the_adapter_is_felt(transformer: Any, reference: Latents) -> None:
    assert worst(clip(transformer, None), reference) > 0.1


@pytest.mark.parametrize("written", ["comfyui", "comfyui down and up", "bare", "musubi-tuner", "diffsynth"])
def test_diffusers_own_converter_orders_rows_the_same(written: str, transformer: Any, tmp_path: Path) -> None:
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers

    path = FORMATS[written][1](tmp_path)
    theirs = _convert_non_diffusers_minimax_h3_lora_to_diffusers(load_file(path))
    ours = load(transformer, path).residuals
    assert {key.rpartition(".lora_")[0] for key in theirs} == {f"transformer.{name}" for name in ours}
    for name, (down, up, scale) in ours.items():
        a, b = (theirs[f"transformer.{name}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(scale * up @ down, b @ a, rtol=0, atol=0)  # all scales are powers of two


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_file_in_fewer_bits_makes_the_clip_of_its_float32_copy(
    dtype: torch.dtype, transformer: Any, reference: Latents, tmp_path: Path
) -> None:
    short = {key: tensor.to(dtype) for key, tensor in named(official_pairs(), "diffusion_model.").items()}
    wide = {key: tensor.float() for key, tensor in short.items()}
    clips = []
    for name, tensors in (("short", short), ("wide", wide)):
        adapter = load(transformer, write(tmp_path / f"{name}.safetensors", with_alphas(tensors)))
        clips.append(clip(transformer, adapter))
        kept = {tensor.dtype for tensor in adapter.parameters()}
        assert kept == {dtype if name == "short" else torch.float32}
    assert worst(*clips) == 0
    assert worst(clips[0], reference) > 0
