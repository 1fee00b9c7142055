"""`transformer/` and `adapters/raven.safetensors`: the DiT and its streaming adapter, trained together.

The base learns whole clips: every row sees every other one, all at one noise level, or the sound alone beside a
finished video, as AudioRefine runs it. Base plus adapter learns what the rollout does: a chunk sees the prompt, the
first chunk and the last ones, finished. The forward below is that of `services/dit/model.py` for a batch of clips, with
gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from core.geometry import (
    AUDIO_LATENT_CHANNELS,
    FRAMES_PER_CHUNK,
    MAX_CHUNKS,
    TAIL_FRAMES,
    VIDEO_LATENT_CHANNELS,
    Chunk,
    chunk_positions,
    chunk_table,
    dense_positions,
    num_rows,
    text_positions,
)
from core.retention import retained_entries
from core.schedule import context_timestep
from services.checkpoints.dit_modules import FC1, official_modules
from services.dit.adaln import AUDIO_TAG, NUM_TAGS, TEXT_TAG, VIDEO_TAG
from tools.tiny.transformer import FLOAT32_ISLANDS
from tools.train_tiny.text_encoder import Heads, cross_entropy, is_right
from tools.train_tiny.training import Stateful, WeightAverage, generator, learning_rate, optimisers, run_steps, update
from tools.train_tiny.video_latents import AGAIN, COLOURS, COLUMNS, FURTHER, LOOK, MOVED, OWN_PLACE, ROWS, TIME
from tools.train_tiny.world import HEIGHT, WIDTH

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "hidden_size": 256,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "ffn_dim": 448,
    "text_dim": 128,
    "freq_dim": 64,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 16,
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §2.1)."""
HIDDEN, NUM_HEADS, HEAD_DIM = 256, 2, 128
NUM_TEXT_STEPS, NUM_STEPS = 300, 3200
_TEXTS = 128
"""Prompts of a step that teaches text rows."""
RANK = 10
"""Of the adapter; equals its alpha, as published."""
VIDEO_SHIFT, AUDIO_SHIFT = 1.0, 2.0
"""Of the noise levels. A chunk has 75 rows of video here, and thousands on the canvases of the published model, whose
shift is 12: noise of one level leaves less to be seen of few rows, and what a first step decided would be forgotten.
"""
_CONSTANT = 16.0
"""Held by the last hidden channel of media rows, so that their norm hardly depends on what the others hold."""
_ADAM_RATE = 2e-3
_CONTEXT_NOISE = 0.05
"""Largest error of finished chunks while training, of single rows and of whole latents: the rollout's own chunks are
not exact either.
"""
_PLACE, _LOOK, _SEEN, _CLICK = 5.0, 2.5, 0.5, 8.0
"""Weights in the loss of where and when things are, whose errors are seen as soon as they are a fiftieth of their
range; of how they look; of mean colours, which only stills show; of an audio row's clicks, which are rare.
"""


class TinyDit(nn.Module):
    """The published modules and, for each linear one, the two halves of a low-rank residual."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the library's own initialisation reads the global generator
        self.base = MiniMaxH3Transformer3DModel(**CONFIG)
        random = generator(seed, "transformer", "initial")
        with torch.no_grad():
            _initialise(self.base, random)
        modules = dict(self.base.named_modules())
        self.parts = official_modules(CONFIG["num_layers"], CONFIG["num_refiner_layers"])
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for official, names in self.parts.items():
            key = official.replace(".", "/")
            num_inputs = modules[names[0]].in_features
            outputs = sum(modules[name].out_features for name in names)
            self.down[key] = nn.Parameter(torch.randn(RANK, num_inputs, generator=random) * num_inputs**-0.5)
            self.up[key] = nn.Parameter(torch.zeros(outputs, RANK))

    def weights(self, *, with_adapter: bool) -> dict[str, Tensor]:
        """Every parameter of the base by name, float32, with the residual where asked."""
        weights: dict[str, Tensor] = dict(self.base.named_parameters())
        if with_adapter:
            for official, names in self.parts.items():
                key = official.replace(".", "/")
                residual = self.up[key] @ self.down[key]
                sizes = [weights[f"{name}.weight"].shape[0] for name in names]
                for name, part in zip(names, residual.split(sizes), strict=True):
                    weights[f"{name}.weight"] = weights[f"{name}.weight"] + part
        return weights


@torch.no_grad()
def _initialise(base: MiniMaxH3Transformer3DModel, random: torch.Generator) -> None:
    """Random weights, but for a path on which the noise passes from the input to the velocity, negated: the net has
    only to find the clean latents.
    """
    for name, parameter in base.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        gain = 0.3 if name.endswith(("to_out.0.weight", "ff.net.2.weight")) else 1.0
        if "adaln_proj" in name or name.startswith("norm_out.linear"):
            gain = 0.1
        parameter.copy_(torch.randn(parameter.shape, generator=random) * gain * parameter.shape[1] ** -0.5)
    video, audio = 4 * VIDEO_LATENT_CHANNELS, AUDIO_LATENT_CHANNELS
    for module, head, first, count in (
        (base.proj_in, base.proj_out, 0, video),
        (base.audio_proj_in, base.audio_proj_out, video, audio),
    ):
        module.weight[: video + audio] = 0.0
        module.weight[first : first + count] = torch.eye(count)
        module.weight[-1] = 0.0
        module.bias[-1] = _CONSTANT
        rms = math.sqrt((_CONSTANT**2 + count + HIDDEN - video - audio) / HIDDEN)
        head.weight.zero_()
        head.weight[:, first : first + count] = -rms * torch.eye(count)
    for block in base.transformer_blocks:
        block.norm1.weight[-1] = block.norm2.weight[-1] = 0.07  # the constant alone would be most of a row
        gates = block.adaln_proj.linear.bias.view(NUM_TAGS, 6, HIDDEN)
        gates[:, 2] = gates[:, 5] = 1.0


@dataclass(frozen=True)
class Clips:
    """A batch of clips of one length and their prompts of one length."""

    text: Tensor
    """`[B, E, 128]` hidden states of the text encoder."""
    video: Tensor
    """`[B, 24, T, 6, 10]` clean latents."""
    audio: Tensor
    """`[B, 32, 2, A]` clean latents."""

    def to(self, device: torch.device) -> Clips:
        """The same on a device."""
        return Clips(self.text.to(device), self.video.to(device), self.audio.to(device))


@dataclass(frozen=True)
class Lesson:
    """What one step learns."""

    kind: str
    """"causal", "dense" or "sound"."""
    num_frames: int
    num_chunks: int = MAX_CHUNKS + 1
    """Chunks from the beginning that a causal lesson goes through, at most."""
    sink: int = 2
    window: int | None = 2

    @property
    def copies(self) -> int:
        """Noise levels at which every chunk is learnt per clean forward, which a single chunk needs none of."""
        return 1 if self.num_chunks <= 2 else 2

    @property
    def num_rows(self) -> int:
        """Media rows of one clip."""
        rows = [num_rows(chunk, WIDTH, HEIGHT) for chunk in chunk_table(self.num_frames)]
        if self.kind != "causal":
            return sum(rows)
        rows = rows[: self.num_chunks]
        return self.copies * sum(rows) + sum(rows[:-1])

    @property
    def num_clips(self) -> int:
        """Clips of a step: so many that all steps take about the same time."""
        return max(1, _ROWS_PER_STEP // (self.num_rows + _TEXT_ROWS))


def _beginning(num_chunks: int) -> Lesson:
    """The first chunks of a clip that goes on."""
    return Lesson("causal", FRAMES_PER_CHUNK * num_chunks + TAIL_FRAMES, num_chunks)


_ROWS_PER_STEP, _TEXT_ROWS = 6500, 20
_LENGTHS = (22, 39, 39, 39, 73, 73, 73, 192, 192, 56, 90, 124, 158)
"""Lengths of whole clips, frames, as often as they are drawn."""


def lesson(random: torch.Generator, progress: float) -> Lesson:
    """A random one.

    progress: share of the steps done. A short lesson brings many scenes, from which what prompts mean is learnt; so
    first chunks alone come first, then those that follow, then whole clips.
    """

    def among(values: Sequence[int]) -> int:
        return values[int(torch.randint(len(values), (), generator=random))]

    kind = among(range(20))
    if progress < 0.25:
        return _beginning(1) if kind < 14 else Lesson("dense", 22)
    num_frames = among((22, 22, 39, 73)) if progress < 0.55 else among(_LENGTHS)
    if kind >= 13:
        return Lesson("dense" if kind < 18 else "sound", num_frames)
    first = among((1, 1, 2, 2, 3, 4) if progress < 0.55 else (1, 2, 2, 3, 100, 100, 100))
    if first < 100:
        return _beginning(first)
    if among(range(10)) < 7:
        return Lesson("causal", num_frames)
    window = among((1, 2, 3, 4, 12))
    return Lesson("causal", num_frames, sink=among((1, 2, 3)), window=None if window == 12 else window)


@dataclass(frozen=True)
class Segment:
    """Rows of one kind for every clip, or every noisy copy of every clip, of the batch."""

    audio: Tensor
    """`[N, 2 a, 32]` latents as the model sees them."""
    video: Tensor
    """`[N, v, 96]`."""
    times: Tensor
    """Timestep of each clip's (video, audio) rows, `[N, 2]`."""
    positions: Tensor
    """`[2 a + v, 3]`."""
    context: tuple[int, ...]
    """Finished segments that it sees, besides the text and itself."""


def causal_segments(
    clips: Clips, what: Lesson, random: torch.Generator
) -> tuple[list[Segment], list[int], list[tuple[Tensor, Tensor]]]:
    """A clip's first chunks finished and in noise, as the rollout runs them.

    Returns the segments, which of them are noise, and of each of those the (video, audio) velocity rows to be learnt.
    """
    batch, num_tokens = clips.text.shape[:2]
    chunks = chunk_table(what.num_frames)[: what.num_chunks]
    segments: list[Segment] = []
    noisy: list[int] = []
    targets: list[tuple[Tensor, Tensor]] = []
    finished: list[int] = []
    for chunk in chunks:
        positions = torch.tensor(chunk_positions(chunk, num_tokens, ROWS, COLUMNS), dtype=torch.float64)
        video, audio = rows_of(clips, chunk)
        # The text is the cache's first record; the others are chunks.
        context = tuple(finished[i - 1] for i in retained_entries(1 + chunk.index, what.sink, what.window) if i > 0)
        x0_video, x0_audio = (rows.repeat(what.copies, 1, 1) for rows in (video, audio))
        first_steps = 0.4 if chunk.index == 0 else 0.0
        sigmas = _sigmas(what.copies * batch, random, on_grid=0.6, first_steps=first_steps)
        eps_video, eps_audio = (_noise_like(x, random) for x in (x0_video, x0_audio))
        noisy.append(len(segments))
        segments.append(_in_noise(x0_video, x0_audio, eps_video, eps_audio, sigmas, positions, context))
        targets.append((x0_video - eps_video, x0_audio - eps_audio))
        if chunk is not chunks[-1]:
            error = (_CONTEXT_NOISE * torch.rand(batch, 1, 1, generator=random)).to(video.device)
            finished.append(len(segments))
            segments.append(
                Segment(
                    audio + error * _noise_like(audio, random),
                    video + error * (_noise_like(video, random) + _noise_of_latents(video, random)),
                    torch.full((batch, 2), context_timestep()),
                    positions,
                    context,
                )
            )
    return segments, noisy, targets


def dense_segment(clips: Clips, random: torch.Generator, *, frozen_video: bool) -> tuple[Segment, Tensor, Tensor]:
    """A whole clip in noise, and the (video, audio) velocity rows to be learnt; all see the text and each other.

    frozen_video: the video is finished and keeps its timestep; only the sound is in noise.
    """
    batch, num_tokens = clips.text.shape[:2]
    num_frames = 17 * (clips.video.shape[2] // 5) + 5
    positions = torch.tensor(dense_positions(num_frames, num_tokens, ROWS, COLUMNS), dtype=torch.float64)[num_tokens:]
    whole = Chunk(0, True, 0, clips.video.shape[2], 0, clips.audio.shape[3])
    video, audio = rows_of(clips, whole)
    sigmas = _sigmas(batch, random, on_grid=0.2, first_steps=0.25)
    eps_video, eps_audio = (_noise_like(x, random) for x in (video, audio))
    segment = _in_noise(video, audio, eps_video, eps_audio, sigmas, positions, ())
    if frozen_video:
        clean = context_timestep()
        times = torch.stack((torch.full((batch,), clean), segment.times[:, 1]), -1)
        segment = Segment(segment.audio, clean * video + (1 - clean) * eps_video, times, positions, ())
    return segment, video - eps_video, audio - eps_audio


def rows_of(clips: Clips, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Video rows `[B, v, 96]` and audio rows `[B, 2 a, 32]` of a chunk."""
    video = clips.video[:, :, chunk.video_start : chunk.video_stop]
    patches = video.unflatten(4, (-1, 2)).unflatten(3, (-1, 2))  # [B, 24, v, 3, 2, 5, 2]
    audio = clips.audio[..., chunk.audio_start : chunk.audio_stop]
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3), audio.permute(0, 2, 3, 1).flatten(1, 2)


def _noise_like(rows: Tensor, random: torch.Generator) -> Tensor:
    """Normal noise, drawn on the host: the same on every device."""
    return torch.randn(rows.shape, generator=random).to(rows.device)


def _noise_of_latents(video: Tensor, random: torch.Generator) -> Tensor:
    """Normal noise that is the same in all rows of a latent, `[B, v, 96]`."""
    num_rows = ROWS * COLUMNS // 4
    batch, length, features = video.shape
    each = torch.randn(batch, length // num_rows, features, generator=random)
    return each.repeat_interleave(num_rows, 1).to(video.device)


def _sigmas(count: int, random: torch.Generator, *, on_grid: float, first_steps: float) -> Tensor:
    """(video, audio) noise levels `[N, 2]`: between those of four steps or, for a share of them, on these.

    first_steps: share of all that are of the first two steps alone, which need the prompt most.
    """
    u = 0.02 + 0.98 * torch.rand(count, generator=random)
    step = torch.randint(4, (count,), generator=random)
    u = torch.where(torch.rand(count, generator=random) < on_grid, 1.0 - 0.25 * step, u)
    u = torch.where(torch.rand(count, generator=random) < first_steps, 1.0 - 0.25 * (step % 2), u).double()
    return torch.stack([shift * u / (1 + (shift - 1) * u) for shift in (VIDEO_SHIFT, AUDIO_SHIFT)], -1).float()


def _in_noise(
    video: Tensor,
    audio: Tensor,
    eps_video: Tensor,
    eps_audio: Tensor,
    sigmas: Tensor,
    positions: Tensor,
    context: tuple[int, ...],
) -> Segment:
    video_sigma, audio_sigma = (sigmas[:, i : i + 1, None].to(video.device) for i in range(2))
    return Segment(
        (1 - audio_sigma) * audio + audio_sigma * eps_audio,
        (1 - video_sigma) * video + video_sigma * eps_video,
        1 - sigmas,
        positions,
        context,
    )


def velocities(
    weights: dict[str, Tensor],
    text: Tensor,
    text_times: Tensor,
    segments: Sequence[Segment],
    *,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> list[tuple[Tensor, Tensor]]:
    """The (video, audio) velocity rows of every segment, float32.

    weights: by published name, float32.  text: `[B, E, 128]`.  text_times: `[B]`.
    causal: the text sees itself alone; otherwise it sees the (one) segment as well.  dtype: of the block stack.
    """
    compute = _computed(weights, dtype)
    batch, num_tokens = text.shape[:2]
    refined = _refined_text(compute, text)  # [B, E, hidden]
    hidden, spans, table_rows, positions, times = [refined.flatten(0, 1)], [], [], [], [text_times]
    text_rows = NUM_TAGS * torch.arange(batch).repeat_interleave(num_tokens) + TEXT_TAG
    table_rows.append(text_rows)
    positions.append(torch.tensor(text_positions(num_tokens), dtype=torch.float64).repeat(batch, 1))
    first_row, first_time = batch * num_tokens, batch
    for segment in segments:
        count, num_audio = segment.audio.shape[:2]
        num_video = segment.video.shape[1]
        audio = linear(segment.audio, compute["audio_proj_in.weight"], compute["audio_proj_in.bias"])
        video = linear(segment.video, compute["proj_in.weight"], compute["proj_in.bias"])
        hidden.append(torch.cat((audio, video), 1).to(dtype).flatten(0, 1))
        index = first_time + torch.arange(2 * count).view(count, 2)
        row = torch.cat((
            (NUM_TAGS * index[:, 1:] + AUDIO_TAG).expand(-1, num_audio),
            (NUM_TAGS * index[:, :1] + VIDEO_TAG).expand(-1, num_video),
        ), 1)  # fmt: skip
        table_rows.append(row.flatten())
        times.append(segment.times.flatten())
        positions.append(segment.positions.repeat(count, 1))
        spans.append((first_row, count, num_audio + num_video, num_audio))
        first_row += count * (num_audio + num_video)
        first_time += 2 * count
    rows = torch.cat(hidden)  # [R, hidden]
    which = torch.cat(table_rows).to(text.device)
    condition = silu(_time_embedding(compute, torch.cat(times).to(text.device))).to(dtype)  # [M, 16]
    rotary = _rotary(torch.cat(positions).to(text.device), dtype)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def part(tensor: Tensor, first: int, count: int, length: int) -> Tensor:
            return tensor[first : first + count * length].view(count, length, NUM_HEADS, HEAD_DIM)

        out = []
        text_part = (0, batch, num_tokens)
        if not causal:
            first, count, length, _ = spans[0]
            q, k, v = (torch.cat((part(t, *text_part), part(t, first, count, length)), 1) for t in (query, key, value))
            both = _attend(q, k, v)
            return torch.cat((both[:, :num_tokens].flatten(0, 1), both[:, num_tokens:].flatten(0, 1)))
        out.append(_attend(*(part(t, *text_part) for t in (query, key, value))).flatten(0, 1))
        for segment, (first, count, length, _) in zip(segments, spans, strict=True):
            seen = [text_part] + [spans[i][:3] for i in segment.context]
            copies = count // batch
            k, v = (
                torch.cat([part(t, *s).repeat(copies, 1, 1, 1) for s in seen] + [part(t, first, count, length)], 1)
                for t in (key, value)
            )
            out.append(_attend(part(query, first, count, length), k, v).flatten(0, 1))
        return torch.cat(out)

    for layer in range(int(CONFIG["num_layers"])):
        rows = _block(compute, f"transformer_blocks.{layer}", rows, condition, which, rotary, attention)
    shift, scale = linear(condition, compute["norm_out.linear.weight"], compute["norm_out.linear.bias"]).chunk(2, -1)
    normed = rms_norm(rows, (HIDDEN,), compute["norm_out.norm.weight"], 1e-5)
    time_rows = which // NUM_TAGS
    normed = (normed * (1 + scale).index_select(0, time_rows) + shift.index_select(0, time_rows)).float()
    out = []
    for first, count, length, num_audio in spans:
        part = normed[first : first + count * length].view(count, length, HIDDEN)
        audio = linear(part[:, :num_audio], compute["audio_proj_out.weight"], compute["audio_proj_out.bias"])
        video = linear(part[:, num_audio:], compute["proj_out.weight"], compute["proj_out.bias"])
        out.append((video, audio))
    return out


def _computed(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights as they are computed with: the islands float32, the others rounded."""
    return {name: weight if name.startswith(FLOAT32_ISLANDS) else weight.to(dtype) for name, weight in weights.items()}


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _block(
    weights: dict[str, Tensor],
    name: str,
    rows: Tensor,
    condition: Tensor,
    which: Tensor,
    rotary: tuple[Tensor, Tensor],
    attention: Attention,
) -> Tensor:
    table = linear(condition, weights[f"{name}.adaln_proj.linear.weight"], weights[f"{name}.adaln_proj.linear.bias"])
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
        part.index_select(0, which) for part in table.view(-1, 6 * HIDDEN).chunk(6, -1)
    )
    normed = rms_norm(rows, (HIDDEN,), weights[f"{name}.norm1.weight"], 1e-5)
    branch = _attention_branch(weights, f"{name}.attn", normed * (1 + scale_1) + shift_1, rotary, attention)
    rows = rows + gate_1 * branch
    normed = rms_norm(rows, (HIDDEN,), weights[f"{name}.norm2.weight"], 1e-5)
    return rows + gate_2 * _feed_forward(weights, f"{name}.ff", normed * (1 + scale_2) + shift_2)


def _attention_branch(
    weights: dict[str, Tensor],
    name: str,
    rows: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    attention: Attention,
) -> Tensor:
    query, key, value = (
        linear(rows, weights[f"{name}.to_{part}.weight"]).unflatten(-1, (NUM_HEADS, HEAD_DIM)) for part in "qkv"
    )
    query = rms_norm(query, (HEAD_DIM,), weights[f"{name}.norm_q.weight"], 1e-5)
    key = rms_norm(key, (HEAD_DIM,), weights[f"{name}.norm_k.weight"], 1e-5)
    if rotary is not None:
        query, key = _rotate(query, rotary), _rotate(key, rotary)
    return linear(attention(query, key, value).flatten(-2), weights[f"{name}.to_out.0.weight"])


def _feed_forward(weights: dict[str, Tensor], name: str, rows: Tensor) -> Tensor:
    value, gate = linear(rows, weights[f"{name}.net.0.proj.weight"]).chunk(2, -1)
    return linear(value * silu(gate), weights[f"{name}.net.2.weight"])


def _refined_text(weights: dict[str, Tensor], text: Tensor) -> Tensor:
    rows = linear(
        text.to(weights["context_embedder.weight"].dtype),
        weights["context_embedder.weight"],
        weights["context_embedder.bias"],
    )
    for i in range(int(CONFIG["num_refiner_layers"])):
        name = f"token_refiner.refiner_blocks.{i}"
        normed = rms_norm(rows, (HIDDEN,), weights[f"{name}.norm1.weight"], 1e-5)
        rows = rows + _attention_branch(weights, f"{name}.attn", normed, None, _attend)
        normed = rms_norm(rows, (HIDDEN,), weights[f"{name}.norm2.weight"], 1e-5)
        rows = rows + _feed_forward(weights, f"{name}.ff", normed)
    return rms_norm(rows, (HIDDEN,), weights["token_refiner.final_norm.weight"], 1e-5)


def _time_embedding(weights: dict[str, Tensor], times: Tensor) -> Tensor:
    half = int(CONFIG["freq_dim"]) // 2
    angles = times[:, None] * torch.exp(-math.log(10000.0) * torch.arange(half, device=times.device) / half)
    embedding = torch.cat((angles.cos(), angles.sin()), -1)
    name = "time_embedder.linear"
    embedding = silu(linear(embedding, weights[f"{name}_1.weight"], weights[f"{name}_1.bias"]))
    return linear(embedding, weights[f"{name}_2.weight"], weights[f"{name}_2.bias"])


def _rotary(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inv_freq = 10000.0 ** (-torch.arange(16, device=positions.device) / 16)
    angles = (positions.float()[..., None] * inv_freq).flatten(1)  # [R, 48]
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def _rotate(rows: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = rows.split((half, half, HEAD_DIM - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of `[B, N, h, d]` over `[B, P, h, d]`.

    Spelt out: on a CPU the fused kernel takes almost twice as long in bf16, forward and backward.
    """
    scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1)  # [B, h, N, P]
    weights = (scores * HEAD_DIM**-0.5).softmax(-1)
    out: Tensor = (weights @ value.transpose(1, 2)).transpose(1, 2)
    return out


def loss_of(model: TinyDit, clips: Clips, what: Lesson, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weighted mean square errors of the velocities of video and audio."""
    weights = model.weights(with_adapter=what.kind == "causal")
    batch = len(clips.text)
    if what.kind == "causal":
        segments, noisy, targets = causal_segments(clips, what, random)
        text_times = torch.full((batch,), context_timestep())
        found = velocities(weights, clips.text, text_times, segments, causal=True)
        pairs = [(found[i], target) for i, target in zip(noisy, targets, strict=True)]
    else:
        segment, video, audio = dense_segment(clips, random, frozen_video=what.kind == "sound")
        # The text has the video's noise level, which a finished video does not tell: the sound's says which it is.
        sigma = 1 - segment.times[:, 1]
        u = sigma / (AUDIO_SHIFT - (AUDIO_SHIFT - 1) * sigma)
        text_times = 1 - VIDEO_SHIFT * u / (1 + (VIDEO_SHIFT - 1) * u)
        found = velocities(weights, clips.text, text_times, [segment], causal=False)
        pairs = [(found[0], (video, audio))]
    weight_of = [weights.to(clips.text.device) for weights in (_video_weights(), _audio_weights())]
    # The first chunk has nothing to go on from: it is the hardest and what all others follow.
    shares = [2.0 if i == 0 and len(pairs) > 1 else 1.0 for i in range(len(pairs))]
    sums = [torch.zeros(()), torch.zeros(())]
    counts = [0.0, 0.0]
    for share, (velocity, target) in zip(shares, pairs, strict=True):
        for stream in range(2):
            errors = (velocity[stream] - target[stream]).square() * weight_of[stream]
            sums[stream] = sums[stream] + share * errors.sum()
            counts[stream] += share * target[stream].numel()
    return sums[0] / counts[0], sums[1] / counts[1]


def _video_weights() -> Tensor:
    """Weight of every feature of a video row, `[96]`: channels, each for the four latents of a patch."""
    weights = torch.ones(VIDEO_LATENT_CHANNELS, 2, 2)
    weights[:3] = _SEEN
    weights[LOOK, 0] = weights[COLOURS, 1] = _LOOK
    weights[OWN_PLACE] = weights[TIME] = weights[FURTHER, 1] = weights[MOVED, 0] = weights[AGAIN, 1] = _PLACE
    return weights.flatten()


def _audio_weights() -> Tensor:
    """Weight of every channel of an audio row, `[32]`."""
    weights = torch.ones(AUDIO_LATENT_CHANNELS)
    weights[-4:] = _CLICK
    return weights


class Lessons(Protocol):
    """What is learnt from, on the host."""

    def texts(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Hidden states `[N, E, 128]` of prompts of one length, and the attributes of their scenes `[N, 12]`."""

    def __call__(self, lesson: Lesson, random: torch.Generator) -> Clips:
        """Clips of a lesson."""


def train_transformer(
    directory: Path,
    work: Path,
    seed: int,
    lessons: Lessons,
    device: torch.device,
    *,
    num_text_steps: int = NUM_TEXT_STEPS,
    num_steps: int = NUM_STEPS,
) -> None:
    """Trains base and adapter and writes both.  work: where the checkpoints lie."""
    model = TinyDit(seed).to(device)
    _teach_text(model, work, seed, lessons, device, num_text_steps)
    _teach_clips(model, work, seed, lessons, device, num_steps)
    write(directory, model)


def _teach_text(model: TinyDit, work: Path, seed: int, lessons: Lessons, device: torch.device, num_steps: int) -> None:
    """Trains the refiner alone until every text row tells the whole scene.

    The encoder's last state alone tells it, and of its row each media row would see little for a long time.
    """
    heads = Heads(HIDDEN).to(device)
    learner = nn.ModuleDict({"embedder": model.base.context_embedder, "refiner": model.base.token_refiner})
    both = optimisers(nn.ModuleDict({"learner": learner, "heads": heads}), ("learner.refiner.",))

    def step(number: int) -> dict[str, float]:
        states, targets = (part.to(device) for part in lessons.texts(_TEXTS, generator(seed, "text rows", number)))
        rows = _refined_text(_computed(dict(model.base.named_parameters()), torch.bfloat16), states)
        each = heads(rows.flatten(0, 1))
        asked = targets.repeat_interleave(states.shape[1], 0)
        loss = cross_entropy(each, asked)
        update(loss, both, learning_rate(number, num_steps), _ADAM_RATE)
        return {"loss": loss.item(), "all right": is_right(each, asked).all(1).float().mean().item()}

    state: dict[str, Stateful] = {"learner": learner, "heads": heads, "muon": both[0], "adam": both[1]}
    run_steps("DiT, text rows", num_steps, step, state, work / "text_rows.pt")


def _teach_clips(model: TinyDit, work: Path, seed: int, lessons: Lessons, device: torch.device, num_steps: int) -> None:
    """Trains everything on clips; the model ends as the average over the last steps."""
    both = optimisers(model, ("base.transformer_blocks.", "base.token_refiner."))
    average = WeightAverage(model, 0.99)

    def step(number: int) -> dict[str, float]:
        random = generator(seed, "transformer", number)
        what = lesson(random, number / num_steps)
        clips = lessons(what, random).to(device)
        video, audio = loss_of(model, clips, what, random)
        loss = audio if what.kind == "sound" else video + audio
        update(loss, both, learning_rate(number, num_steps), _ADAM_RATE)
        average.update()
        shown = f"{what.kind} {what.num_frames} {what.num_chunks if what.kind == 'causal' else ''}"
        return {f"{shown} video": video.item(), "audio": audio.item()}

    state: dict[str, Stateful] = {"model": model, "muon": both[0], "adam": both[1], "average": average}
    run_steps("DiT", num_steps, step, state, work / "transformer.pt")
    average.apply()


@torch.no_grad()
def write(directory: Path, model: TinyDit) -> None:
    """Writes base and adapter as published: bf16 with float32 islands; the adapter float32, in official names and
    order.
    """
    tensors = {}
    for official in model.parts:
        key = official.replace(".", "/")
        up = model.up[key].detach()
        if official.endswith(FC1):
            up = torch.cat(up.chunk(2)[::-1])  # gate rows first
        tensors[f"base_model.model.dit.{official}.lora_A.weight"] = model.down[key].detach().cpu().contiguous()
        tensors[f"base_model.model.dit.{official}.lora_B.weight"] = up.cpu().contiguous()
    metadata = {"lora_alpha": str(RANK), "video_shift": str(VIDEO_SHIFT), "audio_shift": str(AUDIO_SHIFT)}
    (directory / "adapters").mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapters" / "raven.safetensors", metadata=metadata)
    _sort_metadata(directory / "adapters" / "raven.safetensors")
    for name, parameter in model.base.named_parameters():
        if not name.startswith(FLOAT32_ISLANDS):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.base.cpu().save_pretrained(directory / "transformer")


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file, which the library writes in an order that differs from run to run."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    path.write_bytes(content[:8] + text + content[8 + size :])
