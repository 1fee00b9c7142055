"""The golden vectors of refining a clip's sound: model, inputs and recorded passes."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file

from h3stream.refine import FrozenCacheSpec, RefineSpec
from h3stream.request import ClipSpec
from services.dit.adapters import AdapterBank
from services.dit.model import H3Dit
from services.dit.refine.frozen_cache import NUM_TENSORS, FrozenCache
from services.dit.refine.masks import Masks, uniform_video_mask
from services.dit.refine.refiner import Branch, Keyframes, Refiner
from services.dit.refine.stores import StoreShape, make_store
from services.dit.rows import ChunkLatents

FIXTURES = Path(__file__).parent / "fixtures" / "audio_refine"
CPU = torch.device("cpu")
NUM_TOKENS = 9
CLIP = ClipSpec(
    num_frames=22,
    width=64,
    height=64,
    steps=8,
    video_shift=12.0,
    audio_shift=3.0,
    sink=0,
    window=None,
    kv_storage="gpu",
    seed=7,
    mode="dense",
)


@cache
def transformer() -> MiniMaxH3Transformer3DModel:
    """The vectors' model, float32."""
    model = MiniMaxH3Transformer3DModel(**json.loads((FIXTURES / "config.json").read_text()))
    weights = load_file(FIXTURES / "model_a.safetensors") | load_file(FIXTURES / "model_b.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.requires_grad_(False).eval()


@cache
def half_transformer() -> MiniMaxH3Transformer3DModel:
    """The same in bfloat16, but for the modules that the published model keeps in float32."""
    model = copy.deepcopy(transformer()).to(torch.bfloat16)
    for island in (model.proj_in, model.audio_proj_in, model.proj_out, model.audio_proj_out, model.time_embedder):
        island.float()
    return model


@cache
def tensors(file: str) -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / f"{file}.safetensors")


@cache
def passes() -> dict[str, dict[str, Any]]:
    """Facts of every recorded pass, by name."""
    return json.loads((FIXTURES / "passes.json").read_text())


def recorded(name: str) -> dict[int, torch.Tensor]:
    """The sound after each step of a pass that was recorded."""
    file = tensors("passes_exact") | tensors("passes_cached")
    prefix = f"{name}.audio."
    return {int(key.removeprefix(prefix)): tensor for key, tensor in file.items() if key.startswith(prefix)}


def latents() -> ChunkLatents:
    return ChunkLatents(tensors("inputs")["video"], tensors("inputs")["audio"])


def noise() -> ChunkLatents:
    return ChunkLatents(tensors("inputs")["noise_video"], tensors("inputs")["noise_audio"])


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the prompt and its token tags."""
    return tensors("inputs")["text"], torch.ones(NUM_TOKENS, dtype=torch.int64)


def frozen_cache(spec: FrozenCacheSpec, backend: str = "vram", directory: Path | None = None) -> FrozenCache:
    """A cache over a store of the vectors' model."""
    size = H3Dit(transformer()).size
    width = size.hidden if spec.contents == "hidden" else size.num_heads * size.head_dim

    def new_store(rows: int) -> Any:
        shape = StoreShape(size.num_layers, NUM_TENSORS[spec.contents], rows, width, spec.precision, CPU)
        return make_store(backend, shape, directory=directory, pinned=False)

    return FrozenCache(
        new_store,
        contents=spec.contents,
        is_text_live=spec.text == "live",
        refresh_interval=spec.refresh_interval,
    )


def keyframes() -> Keyframes:
    return Keyframes((0,), tensors("inputs")["keyframe_rows"])


def masks(name: str) -> Masks:
    """What a recorded pass may move."""
    frozen = uniform_video_mask(0.0, (7, 4, 4))
    if name.startswith("exact_video_open"):
        return Masks(video=uniform_video_mask(0.3, (7, 4, 4)))
    if name.startswith("exact_video_cells"):
        return Masks(video=tensors("inputs")["mask_video_cells"])
    if name.startswith("exact_audio_partial"):
        return Masks(video=frozen, audio=tensors("inputs")["mask_audio"])
    return Masks(video=frozen, injection=passes()[name]["inject"])


def spec_of(name: str, **values: Any) -> RefineSpec:
    """The request that a recorded pass stands for."""
    facts = passes()[name]
    cache_spec = FrozenCacheSpec(enabled=False)
    if facts["contents"]:
        cache_spec = FrozenCacheSpec(
            contents=facts["contents"],
            precision=facts["precision"],
            text="live" if "text" in facts["live_rows"] else "kept",
            refresh_interval=facts["refresh_interval"],
        )
    return RefineSpec(
        **{"steps": facts["steps"], "audio_denoise": facts["audio_denoise"], "cache": cache_spec} | values
    )


def refiner(name: str, cache: FrozenCache | None = None, model: Any = None, **values: Any) -> Refiner:
    """A recorded pass, about to take its first step; `values` replace arguments of Refiner."""
    model = model or transformer()
    arguments = {
        "model": H3Dit(model),
        "adapters": AdapterBank(model, {}),
        "mix": (),
        "clip": CLIP,
        "spec": spec_of(name),
        "latents": latents(),
        "branches": [Branch(*text(), cache)],
        "device": CPU,
        "noise": noise(),
        "masks": masks(name),
        "keyframes": keyframes() if passes()[name]["layout"] == "keyframe" else None,
    }
    return Refiner(**arguments | values)


def relative_l2(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return difference.item()
