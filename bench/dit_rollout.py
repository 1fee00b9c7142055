"""What the DiT's cache, its modulation table, its storages and its modes are worth: ratios measured in one process.

    python -m bench.dit_rollout [--threads N] [--repeats N]

Random weights of the published class, small enough for a CPU; the conditions are printed. Each figure is the fastest of
the repeats, and the variants of a ratio are timed in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch

from core.budget import kv_rows
from core.geometry import chunk_table, latent_size, num_clip_rows, num_rows
from core.schedule import context_timestep
from h3stream.request import ClipSpec
from services.checkpoints.dit_modules import module_rows, official_modules
from services.checkpoints.key_map import Rule
from services.common.residency import resolve_device
from services.dit.adaln import clip_timesteps, distinct, modulation, modulation_table
from services.dit.adapters import Adapter, AdapterBank, LowRankPair
from services.dit.dense import DenseSampler
from services.dit.kv_cache import KvCache
from services.dit.kv_storage import KvShape
from services.dit.model import H3Dit
from services.dit.noise import ClipNoise, dense_noise
from services.dit.rollout import Rollout, renoised

CLIP = ClipSpec(
    num_frames=90,
    width=256,
    height=160,
    steps=4,
    video_shift=12.0,
    audio_shift=3.0,
    sink=2,
    window=2,
    kv_storage="gpu",
    seed=0,
)
DENSE = dataclasses.replace(CLIP, mode="dense", sink=0, window=None)
NUM_TOKENS = 64
MODEL = {
    "hidden_size": 384,
    "num_layers": 6,
    "num_attention_heads": 3,
    "ffn_dim": 1024,
    "text_dim": 256,
    "time_embed_hidden_dim": 384,
    "time_embed_dim": 192,
}
RANK = 8
MEASURED_CHUNK = 4
"""The cache is full there: text, chunk 0 and two recent chunks."""


def make_model(device: torch.device) -> tuple[H3Dit, AdapterBank]:
    """Random weights in bfloat16 with float32 islands, and an adapter on every module."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    transformer = MiniMaxH3Transformer3DModel(**MODEL).requires_grad_(False)
    for name, parameter in transformer.named_parameters():
        if not name.startswith(("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")):
            parameter.data = parameter.data.bfloat16()
    pairs = []
    for official, names in official_modules(MODEL["num_layers"], 2).items():
        weights = [transformer.get_submodule(name).weight for name in names]
        rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
        pair = LowRankPair(torch.randn(RANK, columns) * 0.02, torch.randn(rows, RANK) * 0.02, RANK)
        pairs.append((Rule(names, module_rows(official, "comfyui")), pair))
    bank = AdapterBank(transformer, {"raven": Adapter(pairs)})
    return H3Dit(transformer.to(device)), bank.to(device)


def fastest(repeats: int, *variants: Callable[[], object]) -> list[float]:
    """Seconds of each variant, the fastest of the repeats; the variants take turns."""
    seconds = [float("inf")] * len(variants)
    for _ in range(repeats + 1):
        for i, variant in enumerate(variants):
            start = time.perf_counter()
            variant()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


class Bench:
    """A model with one chunk's history in a cache, so that single forwards can be timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model, self.adapters = make_model(device)
        self.chunks = chunk_table(CLIP.num_frames)
        self.size = latent_size(CLIP.height), latent_size(CLIP.width)
        self.steps = clip_timesteps(CLIP.steps, CLIP.video_shift, CLIP.audio_shift)
        context = (context_timestep(), context_timestep())
        self.table = modulation_table(self.model.transformer, (*self.steps, context))
        self.noise = ClipNoise(CLIP, device)
        self.context = torch.randn(NUM_TOKENS, MODEL["text_dim"], device=device)
        self.tags = torch.ones(NUM_TOKENS, dtype=torch.int64, device=device)
        self.text = self.model.refine_text(self.context, dense=True)
        self.clip_noise = dense_noise(DENSE, device)
        self.dense_layout = self.model.dense_layout(DENSE.num_frames, self.tags, *self.size)
        self.layouts = [self.model.chunk_layout(chunk, NUM_TOKENS, *self.size) for chunk in self.chunks]

    def history(self) -> KvCache:
        """A cache with the text and every chunk before the measured one, by clean forwards."""
        rows = [num_rows(chunk, CLIP.width, CLIP.height) for chunk in self.chunks]
        shape = KvShape(
            MODEL["num_layers"],
            MODEL["num_attention_heads"],
            self.model.head_dim,
            self.model.dtype,
            self.device,
            kv_rows(CLIP, NUM_TOKENS).widest_attention,
            max(rows),
        )
        cache = KvCache(shape, (NUM_TOKENS, *rows), sink=CLIP.sink, window=CLIP.window, storage="gpu")
        t = context_timestep()
        self.model.prefill_text(self.context, self.tags, self.table[distinct(t)], cache)
        cache.commit()
        for chunk in self.chunks[:MEASURED_CHUNK]:
            latents = renoised(self.noise.initial(chunk), self.noise.context(chunk))
            layout = self.layouts[chunk.index]
            self.model.forward_chunk(latents, (t, t), layout, self.table[distinct(t)], cache, stage=True)
            cache.commit()
        return cache

    def noise_forward(self, cache: KvCache, *, with_table: bool = True) -> None:
        """One noise forward of the measured chunk."""
        timesteps = self.steps[1]
        key = distinct(*timesteps)
        table = self.table[key] if with_table else modulation(self.model.transformer, key)
        latents = self.noise.initial(self.chunks[MEASURED_CHUNK])
        layout = self.layouts[MEASURED_CHUNK]
        self.model.forward_chunk(latents, timesteps, layout, table, cache, stage=False)

    def clip(self, clip: ClipSpec, *, adapter: bool = True) -> None:
        """A whole rollout."""
        mix = (("raven", 1.0),) if adapter else ()
        rollout = Rollout(self.model, self.adapters, mix, clip, NUM_TOKENS, self.device)
        rollout.prefill(self.context, self.tags)
        for chunk in self.chunks:
            rollout.sample(chunk.index, lambda step: None, lambda: False)
            if not chunk.is_tail:
                rollout.commit(chunk.index)

    def dense_forward(self) -> None:
        """One forward of the whole clip."""
        timesteps = self.steps[1]
        table = self.table[distinct(*timesteps)]
        self.model.forward_dense(self.text, self.clip_noise, timesteps, self.dense_layout, table)

    def dense_clip(self) -> None:
        """A whole dense clip, with the adapter."""
        mix = (("raven", 1.0),)
        sampler = DenseSampler(self.model, self.adapters, mix, DENSE, self.context, self.tags, self.device)
        for _ in range(DENSE.steps):
            sampler.step()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    device = resolve_device("auto")
    bench = Bench(device)
    rows = num_rows(bench.chunks[MEASURED_CHUNK], CLIP.width, CLIP.height)
    cache = bench.history()
    print(
        f"{device}, torch {torch.__version__}, {arguments.threads} threads, bfloat16; hidden {MODEL['hidden_size']}, "
        f"{MODEL['num_layers']} layers; {CLIP.num_frames} frames {CLIP.width}x{CLIP.height}, {CLIP.steps} steps, "
        f"sink {CLIP.sink}, window {CLIP.window}; chunk {MEASURED_CHUNK}: {rows} rows over {cache.retained_rows}"
    )

    cached, recomputed = fastest(
        arguments.repeats, lambda: bench.noise_forward(cache), lambda: bench.noise_forward(bench.history())
    )
    report("a forward with its whole history recomputed, against a cached one", recomputed, cached)
    with_table, without = fastest(
        arguments.repeats, lambda: bench.noise_forward(cache), lambda: bench.noise_forward(cache, with_table=False)
    )
    report("a forward that computes its modulation, against one that reads the table", without, with_table)
    weights = dict(bench.model.transformer.named_parameters())
    unread = sum(t.nbytes for name, t in weights.items() if "adaln_proj" in name or "norm_out.linear" in name)
    print(f"{unread / sum(t.nbytes for t in weights.values()):5.0%}   of the weight bytes are not read while sampling")
    variants = [dataclasses.replace(CLIP, kv_storage=storage) for storage in ("gpu", "cpu")]
    on_device, on_host = fastest(arguments.repeats, *(lambda clip=clip: bench.clip(clip) for clip in variants))
    report("a clip with its cache in host memory, against one on the device", on_host, on_device)
    on, off = fastest(arguments.repeats, lambda: bench.clip(CLIP), lambda: bench.clip(CLIP, adapter=False))
    report(f"a clip with the rank {RANK} adapter, against one without", on, off)

    dense_rows = NUM_TOKENS + num_clip_rows(DENSE.num_frames, DENSE.width, DENSE.height)
    dense, cached = fastest(arguments.repeats, bench.dense_forward, lambda: bench.noise_forward(cache))
    report(f"a dense forward of {dense_rows} rows, against that of the chunk", dense, cached)
    streaming, dense = fastest(arguments.repeats, lambda: bench.clip(CLIP), bench.dense_clip)
    num_forwards = len(bench.chunks) * (CLIP.steps + 1)  # the text's takes the place of the last chunk's clean one
    report(f"a streaming clip of {num_forwards} forwards, against a dense one of {DENSE.steps}", streaming, dense)


def report(what: str, slow_s: float, fast_s: float) -> None:
    """One line."""
    print(f"{slow_s / fast_s:5.2f}x  {what} ({1000 * slow_s:.1f} ms against {1000 * fast_s:.1f} ms)")


if __name__ == "__main__":
    main()
