"""What the frozen cache is worth when a sound is refined: ratios of steps that are measured in one process.

    python -m bench.refine [MODEL] [--frames N] [--width N] [--height N] [--steps N] [--threads N] [--repeats N]
    python -m bench.refine --hidden N --layers N [...]

MODEL: a model directory; without one, random weights of the published class with so many channels and blocks. Latents
and text are random too, so the distances say what the cache does to this model, not what it does to a sound. Every
figure is the fastest of its steps; the canvas is chosen so that most rows are the video's, as in real clips.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.budget import gib
from core.cache_policy import bytes_per_row
from core.latents_file import latent_shapes
from core.request import clip_violations
from h3stream.refine import FrozenCacheSpec, RefineSpec
from h3stream.request import ClipSpec
from services.checkpoints.components import part_path
from services.common.refusal import refuse
from services.common.residency import resolve_device
from services.dit.adapters import AdapterBank
from services.dit.model import H3Dit
from services.dit.refine.codecs import make_codec
from services.dit.refine.frozen_cache import RowSplit
from services.dit.refine.refiner import Branch, StepReport
from services.dit.refine.room import CacheRooms
from services.dit.refine.verb import AudioRefinement, RefineInputs, RefineListener, relative_distance
from services.dit.rows import ChunkLatents
from services.dit.weights import open_transformer

NUM_TOKENS = 64
HEAD_DIM = 128
TEXT_DIM = 256
ISLANDS = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
"""Modules that a checkpoint keeps in float32."""
EXACT = FrozenCacheSpec(enabled=False)


@dataclass(frozen=True)
class Timed:
    """The steps of some refinements."""

    exact_s: float
    """Fastest of the steps that neither built nor used a cache; infinite without any, as are the others."""
    build_s: float
    cached_s: float
    cached_block_s: float
    """Of the fastest cached step, the seconds in the blocks."""
    audio: Tensor


def random_model(hidden: int, num_layers: int, device: torch.device) -> H3Dit:
    """Random weights with the proportions of the published model.

    In bfloat16 with float32 islands; all in float32 for a CPU, on which bfloat16 would be timed and not the cache.
    """
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    transformer = MiniMaxH3Transformer3DModel(
        hidden_size=hidden,
        num_layers=num_layers,
        num_attention_heads=math.ceil(hidden * 4 / 3 / HEAD_DIM),
        ffn_dim=hidden * 8 // 3,
        text_dim=TEXT_DIM,
        time_embed_hidden_dim=hidden,
        time_embed_dim=hidden // 2,
    ).requires_grad_(False)
    for name, parameter in transformer.named_parameters():
        if device.type == "cuda" and not name.startswith(ISLANDS):
            parameter.data = parameter.data.bfloat16()
    return H3Dit(transformer)


class Bench:
    """A model and a clip, refined over and over."""

    def __init__(self, model: H3Dit, clip: ClipSpec, steps: int, repeats: int, scratch: Path) -> None:
        device = resolve_device("auto")
        model.transformer.to(device)
        self.model, self.clip, self.device = model, clip, device
        self._steps, self._repeats = steps, repeats
        rooms = CacheRooms(device, directory=scratch, pinned=True, max_shared_bytes=0)
        bank = AdapterBank(model.transformer, {})
        self._refinement = AudioRefinement(model, bank, device, rooms, {})
        generator = torch.Generator().manual_seed(0)
        shapes = latent_shapes(clip)
        self._latents = ChunkLatents(*(torch.randn(shapes[name], generator=generator) for name in ("video", "audio")))
        context = torch.randn(NUM_TOKENS, model.text_dim, generator=generator)
        self._branch = Branch(context, torch.ones(NUM_TOKENS, dtype=torch.int64))

    def timed(self, *caches: FrozenCacheSpec) -> list[Timed]:
        """Refinements with these caches, which take turns."""
        reports: list[list[StepReport]] = [[] for _ in caches]
        sounds: list[Tensor] = [torch.empty(0)] * len(caches)
        for _ in range(self._repeats):
            for index, cache in enumerate(caches):
                spec = RefineSpec(steps=self._steps, seed=0, cache=cache)
                inputs = RefineInputs(self.clip, spec, self._latents, (self._branch,))
                told = reports[index]
                listener = RefineListener(
                    started=lambda plan: None,
                    stepped=lambda report, done, total, told=told: told.append(report),  # type: ignore[misc]
                    cancelled=lambda: False,
                )
                sounds[index] = self._refinement.run(inputs, listener).latents.audio
        return [_timed(told, audio) for told, audio in zip(reports, sounds, strict=True)]

    def decode_rate(self, contents: str, precision: str) -> float:
        """Bytes of rows in the compute dtype that a codec makes in a second, of one block's."""
        size = self.model.size
        split = RowSplit.of_clip(self.clip, NUM_TOKENS, is_text_live=True)
        width = size.hidden if contents == "hidden" else size.inner
        codec = make_codec(precision)
        rows = torch.randn(split.num_frozen, width, device=self.device).to(self.model.dtype)
        payload = codec.payload(len(rows), width, device=self.device)
        scales = codec.scales(len(rows), width, device=self.device)
        codec.encode(rows, payload, scales)
        seconds = math.inf
        for _ in range(10):
            self._finish()
            began = time.perf_counter()
            codec.decode(payload, scales, rows)
            self._finish()
            seconds = min(seconds, time.perf_counter() - began)
        return rows.nbytes / seconds

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    clip = ClipSpec(
        num_frames=arguments.frames,
        width=arguments.width,
        height=arguments.height,
        steps=8,
        video_shift=12.0,
        audio_shift=3.0,
        sink=0,
        window=None,
        kv_storage="gpu",
        seed=0,
        mode="dense",
    )
    refuse(clip_violations(clip))
    if arguments.model is None:
        model = random_model(arguments.hidden, arguments.layers, resolve_device("auto"))
    else:
        model = H3Dit(open_transformer(part_path(arguments.model, "dit")).load("auto"))
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, clip, arguments.steps, arguments.repeats, Path(scratch))
        print_conditions(bench, arguments)
        print_caches(bench)
        print_backends(bench)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="model directory")
    for name, value in (
        ("hidden", 384),
        ("layers", 4),
        ("frames", 22),
        ("width", 512),
        ("height", 288),
        ("steps", 3),
        ("threads", 1),
        ("repeats", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: one that builds and one that is cached")
    return arguments


def print_conditions(bench: Bench, arguments: argparse.Namespace) -> None:
    """What everything below was measured on."""
    size, clip = bench.model.size, bench.clip
    split = RowSplit.of_clip(clip, NUM_TOKENS, is_text_live=True)
    print(
        f"{bench.device}, torch {torch.__version__}, {arguments.threads} threads, {bench.model.dtype}; "
        f"{arguments.model or 'random weights'}: hidden {size.hidden}, inner {size.inner}, {size.num_layers} blocks; "
        f"{clip.num_frames} frames {clip.width}x{clip.height}, {arguments.steps} steps, {arguments.repeats} repeats; "
        f"{split.num_rows} rows, of which {split.num_live} are live ({split.num_text} text, {split.num_audio} audio)"
    )


def print_caches(bench: Bench) -> None:
    """Exact steps against cached ones, for every form of the cache."""
    print(
        "\nexact/cached  build/exact  from exact       cache  in blocks  decoded\n"
        "      (time)       (time)   (rel. L2)                (cached)"
    )
    for contents, precision, text in itertools.product(("hidden", "kv"), ("int4", "fp8", "bf16"), ("live", "kept")):
        values: dict[str, Any] = {"contents": contents, "precision": precision, "text": text}
        cache = FrozenCacheSpec(backend="vram", **values)
        exact, cached = bench.timed(EXACT, cache)
        print(
            f"{exact.exact_s / cached.cached_s:11.2f}x {cached.build_s / exact.exact_s:11.2f}x "
            f"{relative_distance(cached.audio, exact.audio):11.1e} {gib(_num_bytes(bench, cache)):>13} "
            f"{cached.cached_block_s / cached.cached_s:9.0%} {bench.decode_rate(contents, precision) / 1e9:5.2f} GB/s"
            f"  {contents}, {precision}, text {text}: {exact.exact_s:.3f} s against {cached.cached_s:.3f} s",
            flush=True,
        )


def print_backends(bench: Bench) -> None:
    """Cached steps by where the cache lives, whose results must be the same."""
    print()
    for contents in ("hidden", "kv"):
        values: dict[str, Any] = {"contents": contents, "allow_disk": True}
        caches = [FrozenCacheSpec(backend=backend, **values) for backend in ("vram", "ram", "disk")]
        vram, *others = bench.timed(*caches)
        for backend, timed in zip(("ram", "disk"), others, strict=True):
            same = "same" if torch.equal(timed.audio, vram.audio) else "OTHER"
            print(
                f"{timed.cached_s / vram.cached_s:11.2f}x a cached step, {timed.build_s / vram.build_s:.2f}x a build, "
                f"with {contents}, int4 in {backend} against vram; {same} result"
            )


def _num_bytes(bench: Bench, cache: FrozenCacheSpec) -> int:
    split = RowSplit.of_clip(bench.clip, NUM_TOKENS, is_text_live=cache.text == "live")
    return split.num_frozen * bytes_per_row(cache.contents, cache.precision, bench.model.size)


def _timed(reports: list[StepReport], audio: Tensor) -> Timed:
    seconds = {
        mode: min((r.block_s + r.outside_s for r in reports if r.mode == mode), default=math.inf)
        for mode in ("exact", "build", "cached")
    }
    blocks = min(
        ((r.block_s + r.outside_s, r.block_s) for r in reports if r.mode == "cached"), default=(math.inf, math.inf)
    )
    return Timed(seconds["exact"], seconds["build"], seconds["cached"], blocks[1], audio)


if __name__ == "__main__":
    main()
