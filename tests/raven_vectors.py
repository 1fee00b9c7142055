"""The RAVEN golden vectors: their model in the published layout, their cases, and a rollout that records everything."""

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from h3stream.request import ClipSpec
from services.checkpoints.adapter_registry import bind, read_adapter
from services.checkpoints.dit_modules import Architecture, key_map
from services.common.config import AdapterSource
from services.common.weights import split_rows
from services.dit.adapters import Adapter, AdapterBank, AdapterMix, load_adapter
from services.dit.model import H3Dit
from services.dit.rollout import Rollout
from services.dit.rows import ChunkLatents

FIXTURES = Path(__file__).parent / "fixtures" / "raven"
LAYERS = 3


@cache
def settings() -> dict:
    return json.loads((FIXTURES / "set.json").read_text())


@cache
def case_facts(case: str) -> dict:
    return json.loads((FIXTURES / f"{case}.json").read_text())


def tensors(name: str) -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / f"{name}.safetensors")


def case_clip(case: str, kv_storage: str = "gpu") -> ClipSpec:
    request, sampler = settings()["cases"][case]["request"], settings()["cases"][case]["sampler"]
    return ClipSpec(
        num_frames=request["frames"],
        width=request["width"],
        height=request["height"],
        steps=sampler["steps"],
        video_shift=sampler["video_shift"],
        audio_shift=sampler["audio_shift"],
        sink=sampler["sink"],
        window=sampler["window"],
        kv_storage=kv_storage,
        seed=sampler["seed"],
    )


def case_text(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Context `[E, text_dim]` and tags `[E]`; all text where the case has no tags."""
    inputs = tensors(f"{case}.inputs")
    context = inputs["context"][0]
    return context, inputs.get("token_tags", torch.ones(len(context), dtype=torch.int64))


def write_model_directory(directory: Path) -> Path:
    """Writes `transformer/` and `adapters/`, all that the DiT worker reads; returns the directory."""
    write_transformer(directory / "transformer")
    (directory / "adapters").mkdir()
    shutil.copy(FIXTURES / "lora_raven.safetensors", directory / "adapters" / "raven.safetensors")
    return directory


def write_transformer(directory: Path) -> None:
    """Writes the vectors' model, which has official names, as a published `transformer/` directory."""
    config = settings()["config"]
    published = {
        "_class_name": "MiniMaxH3Transformer3DModel",
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_layers"],
        "num_refiner_layers": config["token_refiner_num_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "attention_head_dim": config["attention_head_dim"],
        "ffn_dim": config["ffn_hidden_size"],
        "in_channels": config["latents_dim"],
        "audio_in_channels": config["audio_latents_dim"],
        "patch_size": [1, 2, 2],
        "text_dim": config["text_dim"],
        "freq_dim": config["timestep_input_dim"],
        "time_embed_hidden_dim": config["time_embed_hidden_size"],
        "time_embed_dim": config["time_embed_dim"],
        "rope_freq_dim": config["rope_inv_freq_len"],
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(published))
    save_file(published_tensors(tensors("model")), directory / "diffusion_pytorch_model.safetensors")


def published_tensors(official: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Official keys and stacked rows to published ones; every key is used exactly once."""
    rules = key_map("comfyui", LAYERS, 2, num_heads=2)
    assert rules.keys() == official.keys()
    return {
        target: part.contiguous()
        for key, rule in rules.items()
        if rule.targets
        for target, part in zip(rule.targets, split_rows(rule, official[key]), strict=True)
    }


def architecture(transformer) -> Architecture:
    """The sizes of a loaded model."""
    names = {field.name for field in dataclasses.fields(Architecture)}
    return Architecture(**{name: value for name, value in transformer.config.items() if name in names})


def load(transformer, path: Path, *, is_streaming: bool = False) -> Adapter:
    """An adapter's file, fitted to a model and read."""
    header = dataclasses.replace(read_adapter(AdapterSource("a", path)), is_streaming=is_streaming)
    return load_adapter(bind(header, architecture(transformer)).modules, transformer.config.num_attention_heads)


def raven_adapter(transformer) -> Adapter:
    """`lora_raven`, which has the real file's keys and changes every module."""
    return load(transformer, FIXTURES / "lora_raven.safetensors", is_streaming=True)


def extra_adapter(transformer) -> Adapter:
    """`lora_extra`, whose keys are ComfyUI's and whose ranks and alphas differ by module."""
    return load(transformer, FIXTURES / "lora_extra.safetensors")


class RecordingDit(H3Dit):
    """The model with everything that passes through it kept, under the names of the vectors."""

    def __init__(self, transformer) -> None:
        super().__init__(transformer)
        self.recorded: dict[str, torch.Tensor] = {}
        self.forwards: list[dict] = []
        self._label = ""
        self._noise_forwards: dict[int, int] = {}
        for i, block in enumerate(transformer.transformer_blocks):
            block.norm1.register_forward_pre_hook(self._hidden("embed" if i == 0 else f"block{i - 1}"))
        transformer.norm_out.norm.register_forward_pre_hook(self._hidden(f"block{LAYERS - 1}"))

    def prefill_text(self, context, token_tags, modulation, cache):
        self._label = "text"
        hidden = super().prefill_text(context, token_tags, modulation, cache)
        self.recorded[f"hidden.text.block{LAYERS - 1}"] = hidden.clone()
        return hidden

    def forward_chunk(self, latents, timesteps, layout, modulation, cache, *, stage):
        chunk = cache.num_committed - 1
        self.forwards.append(
            {
                "chunk": chunk,
                "role": "clean" if stage else "noise",
                "past_rows": cache.retained_rows,
                "retained_indices": list(cache.retained),
                "timesteps": timesteps,
            }
        )
        step = self._noise_forwards.get(chunk, 0)
        self._label = f"chunk{chunk}.clean" if stage else f"chunk{chunk}.noise{step}"
        velocity = super().forward_chunk(latents, timesteps, layout, modulation, cache, stage=stage)
        if not stage:
            self._noise_forwards[chunk] = step + 1
        name = f"clean.chunk{chunk}.velocity" if stage else f"velocity.chunk{chunk}.step{step}"
        self.recorded[f"{name}.video"], self.recorded[f"{name}.audio"] = velocity.video, velocity.audio
        return velocity

    def _hidden(self, name):
        def record(module, args):
            self.recorded[f"hidden.{self._label}.{name}"] = args[0].clone()

        return record


class Recording:
    """One case run to its end."""

    def __init__(self, transformer, bank: AdapterBank, mix: AdapterMix, case: str, kv_storage: str = "gpu") -> None:
        context, tags = case_text(case)
        self.model = RecordingDit(transformer)
        self.tensors = self.model.recorded
        embeddings: list[torch.Tensor] = []
        conditions: list[torch.Tensor] = []
        hooks = [
            transformer.time_embedder.register_forward_hook(lambda m, args, out: embeddings.append(out.clone())),
            transformer.norm_out.linear.register_forward_pre_hook(lambda m, args: conditions.append(args[0].clone())),
        ]
        clip = case_clip(case, kv_storage)
        rollout = Rollout(self.model, bank, mix, clip, len(context), torch.device("cpu"))
        for hook in hooks:
            hook.remove()
        # The table is computed in the order of its timesteps: 0 is the first step's, 0.999 text's and context's.
        for name, index in (("chunk0.noise0", 0), ("text", -1), ("chunk0.clean", -1)):
            self.tensors[f"t_emb.{name}"] = embeddings[index]
            self.tensors[f"adaln_input.{name}"] = conditions[index]
        self.commits: list[dict] = []
        self._watch_cache(rollout)
        rollout.prefill(context, tags)
        self._commit_done(rollout, "text", len(context))
        chunks = case_facts(case)["chunks"]
        for chunk in chunks:
            latents: ChunkLatents = rollout.sample(chunk["index"], lambda step: None, lambda: False)
            self.tensors[f"x0.chunk{chunk['index']}.video"] = latents.video
            self.tensors[f"x0.chunk{chunk['index']}.audio"] = latents.audio
            if not chunk["is_last"]:
                rows = rollout.cache.retained_rows
                rollout.commit(chunk["index"])
                self._commit_done(rollout, "clean", self._rows_gathered - rows)
        self.rollout = rollout

    def _watch_cache(self, rollout: Rollout) -> None:
        """Keeps what the cache hands out of entries 0 and 1 for the first and the last layer."""
        gather = rollout.cache.gather
        names = {0: "layer_first", LAYERS - 1: "layer_last"}

        def watch(layer, key, value):
            keys, values = gather(layer, key, value)
            self._rows_gathered = len(keys)
            if layer in names:
                start = 0
                for entry, rows in zip(rollout.cache.retained, self._entry_rows(rollout), strict=True):
                    name = "text" if entry == 0 else f"chunk{entry - 1}"
                    for kind, tensor in (("k", keys), ("v", values)):
                        self.tensors[f"kv.{name}.{names[layer]}.{kind}"] = tensor[start : start + rows].clone()
                    start += rows
            return keys, values

        rollout.cache.gather = watch

    def _entry_rows(self, rollout: Rollout) -> list[int]:
        return [self.commits[entry]["rows"] for entry in rollout.cache.retained]

    def _commit_done(self, rollout: Rollout, role: str, rows: int) -> None:
        self.commits.append(
            {
                "index": len(self.commits),
                "role": role,
                "rows": rows,
                "retained_indices": list(rollout.cache.retained),
                "retained_rows": rollout.cache.retained_rows,
            }
        )


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = actual.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()
