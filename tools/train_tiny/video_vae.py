"""`vae/`: the video autoencoder of the published class. Its decoder is trained to draw what `video_latents` tells.

It begins with what a formula gives: heads that fetch what each kind of latent tells about the same moment, and patches
of pixels that are the principal components of the world's outlines.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch import Tensor, nn

from core.geometry import FRAMES_PER_CHUNK, MAX_CHUNKS, VIDEO_LATENT_CHANNELS
from tools.train_tiny.picture import backdrops, coverage, pixel_centres
from tools.train_tiny.training import WeightAverage, adam, generator, learning_rate, muon, run_steps, set_learning_rate
from tools.train_tiny.video_latents import BLOCK_FRAMES, COLUMNS, ROWS, block_frames, latents
from tools.train_tiny.world import MAX_FRAMES, NUM_OBJECTS, RADII, RGB, SHAPES, Scenes, batch, positions, random_scene

NUM_STEPS = 3600
_BATCH = 8
_WINDOW_LATENTS = 7
"""Latents that the decoder sees at a time: a chunk's and two of the next one's."""
_SHOWN = tuple(range(3, 20)) + tuple(range(23, 28))
"""Frames of a window that are shown, of 28 (docs/reference/h3-model.md §4.3)."""

CONFIG = {
    "block_out_channels": (8, 8, 8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 3,
    "decoder_num_attention_heads": 3,
    "decoder_attention_head_dim": 64,
    "decoder_ffn_mult": 4,
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §4)."""

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_PATCH_PIXELS = BLOCK_FRAMES * 16 * 16
_SUBPIXELS = 8
"""Places within a pixel that outlines are drawn at while training."""
_REACH = 40
"""Pixels from a shape's centre to the edge of its stencil, more than its largest radius."""


class Stencils:
    """Every shape in every size, drawn once; a window is painted by looking its pixels up."""

    def __init__(self) -> None:
        points = torch.arange(-_REACH * _SUBPIXELS, _REACH * _SUBPIXELS + 1) / _SUBPIXELS
        self._masks = torch.stack(
            [torch.stack([coverage(s, points, points[:, None], r) for r in RADII]) for s in range(len(SHAPES))]
        )  # [4, 3, N, N]
        self._colours = torch.tensor(RGB)
        self._backdrops = backdrops()
        self._x, self._y = pixel_centres()

    def masks(self, scenes: Scenes, frames: Tensor) -> Tensor:
        """How much of each pixel the objects cover, `[B, 2, F, H, W]`.  frames: `[B, F]` instants."""
        at = positions(scenes, frames).float()
        size = self._masks.shape[-1]
        rows, columns = (
            ((points - at[..., axis, None] + _REACH) * _SUBPIXELS).round_().clamp_(0, size - 1).long()
            for axis, points in ((1, self._y), (0, self._x))
        )  # [B, 2, F, H], [B, 2, F, W]
        flat = (rows * size)[..., None] + columns[..., None, :]
        out = torch.empty(flat.shape)
        for b in range(len(scenes)):
            for i in range(NUM_OBJECTS):
                stencil = self._masks[scenes.shape[b, i], scenes.size[b, i]].flatten()
                torch.take(stencil, flat[b, i], out=out[b, i])
        return out * scenes.present[:, :, None, None, None]

    def paint(self, scenes: Scenes, frames: Tensor) -> Tensor:
        """Frames `[B, 3, F, H, W]` in [0, 1]."""
        masks = self.masks(scenes, frames)[:, :, None]  # [B, 2, 1, F, H, W]
        picture = self._backdrops[scenes.background].transpose(1, 2)[:, :, None, :, None]  # [B, 3, 1, H, 1]
        for i in (1, 0):
            colour = self._colours[scenes.colour[:, i]][:, :, None, None, None]
            picture = picture + masks[:, i] * (colour - picture)
        return picture


def random_windows(count: int, random: torch.Generator) -> tuple[Scenes, Tensor]:
    """Scenes and the frames `[B, 7, 4]` of one decoding window of each, anywhere in the longest clip."""
    scenes = [random_scene(random) for _ in range(count)]
    chosen = batch(scenes, torch.rand(count, NUM_OBJECTS, 2, generator=random))
    chunk = torch.randint(MAX_FRAMES // FRAMES_PER_CHUNK, (count, 1, 1), generator=random)
    assert MAX_FRAMES // FRAMES_PER_CHUNK <= MAX_CHUNKS
    return chosen, block_frames(_WINDOW_LATENTS) + FRAMES_PER_CHUNK * chunk


def noisy(clean: Tensor, random: torch.Generator) -> Tensor:
    """Latents with errors such as the DiT's: of single latents and of a whole picture, more or less by window."""
    shape = clean.shape
    size = 0.10 * torch.rand(shape[0], 1, 1, 1, 1, generator=random)
    single = torch.randn(shape, generator=random)
    whole = torch.randn(*shape[:3], 1, 1, generator=random)
    return clean + size * (single + 0.2 * whole)


def train_video_vae(directory: Path, work: Path, seed: int) -> None:
    """Trains the decoder and writes `directory`.  work: where checkpoints lie."""
    model = initial_model(seed)
    decoder = model.decoder
    matrices = [p for n, p in decoder.named_parameters() if p.ndim == 2 and n.startswith("transformer_blocks")]
    others = [p for n, p in decoder.named_parameters() if not (p.ndim == 2 and n.startswith("transformer_blocks"))]
    orthogonal, adamw = muon(matrices), adam(others)
    average = WeightAverage(decoder)
    stencils = Stencils()
    mean, std = (torch.tensor(v)[:, None, None, None] for v in (_IMAGENET_MEAN, _IMAGENET_STD))
    shown = torch.tensor(_SHOWN)

    def step(number: int) -> dict[str, float]:
        random = generator(seed, "video_vae", number)
        scenes, frames = random_windows(_BATCH, random)
        with torch.no_grad():
            target = (stencils.paint(scenes, frames.flatten(1)[:, shown]) - mean) / std
            given = noisy(latents(scenes, frames), random)
        with torch.autocast("cpu", torch.bfloat16):
            drawn = decoder(given)[:, :, shown]
        loss = (drawn.float() - target).square().mean()
        rate = learning_rate(number, NUM_STEPS)
        set_learning_rate(orthogonal, 0.02 * rate)
        set_learning_rate(adamw, 1.5e-3 * rate)
        for optimiser in (orthogonal, adamw):
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        for optimiser in (orthogonal, adamw):
            optimiser.step()
        average.update()
        return {"loss": float(loss)}

    state = {"decoder": decoder, "muon": orthogonal, "adam": adamw, "average": average}
    run_steps("video VAE", NUM_STEPS, step, state, work / "video_vae.pt")
    average.apply()
    model.to(torch.bfloat16)
    model.save_pretrained(directory)


def initial_model(seed: int) -> AutoencoderKLMiniMaxH3:
    """The model before training: a random encoder, which is never trained, and the decoder as told above."""
    torch.manual_seed(seed)  # the library's own initialisation reads the global generator
    model = AutoencoderKLMiniMaxH3(**CONFIG)
    random = generator(seed, "video_vae", "initial")
    with torch.no_grad():
        # The latents need no mixing: the decoder reads the channels as they are.
        model.post_quant_conv.weight.copy_(torch.eye(VIDEO_LATENT_CHANNELS)[:, :, None, None, None])
        model.post_quant_conv.bias.zero_()
        _fetching_heads(model.decoder, random)
        _outline_patches(model.decoder, random)
    model.post_quant_conv.requires_grad_(False)
    return model


def _fetching_heads(decoder: Any, random: torch.Generator) -> None:
    """Lets the first block's heads look at one kind of latent each, at the same moment, and one of the second block's
    at the kind that is left; everything else is small and random.
    """
    heads = decoder.transformer_blocks[0].attn.heads
    dim = decoder.proj_in.out_features // heads
    decoder.proj_in.weight.copy_(torch.randn(decoder.proj_in.weight.shape, generator=random) * 0.2)
    decoder.proj_in.weight[:VIDEO_LATENT_CHANNELS] = torch.eye(VIDEO_LATENT_CHANNELS)
    decoder.proj_in.bias.zero_()
    decoder.register_tokens.copy_(torch.randn(decoder.register_tokens.shape, generator=random))
    for block in decoder.transformer_blocks:
        for name, parameter in block.named_parameters():
            if parameter.ndim == 2:
                gain = 0.5 if "to_out" in name or name == "ff.net.2.weight" else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=random) * gain * parameter.shape[1] ** -0.5)
            elif name.startswith("scale"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
    kinds = ((-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0))
    for kind, (row, column) in enumerate(kinds):
        attn = decoder.transformer_blocks[kind // heads].attn
        first = kind % heads * dim
        for projection in (attn.to_q, attn.to_k):
            projection.weight[first : first + dim] *= 0.1
            projection.bias[first : first + 3] = 1.0  # the three fastest turns in time: alike only at the same moment
        rest = first + dim - 2  # two channels that do not turn
        attn.to_q.bias[rest], attn.to_q.bias[rest + 1] = row, column
        attn.to_k.weight[rest : rest + 2] = 0.0
        attn.to_k.weight[rest, 16] = attn.to_k.weight[rest + 1, 17] = 1.0


def _outline_patches(decoder: Any, random: torch.Generator) -> None:
    """Makes the output's patches the principal components of how outlines cross a latent, for each colour channel."""
    stencils, cells = Stencils(), []
    for _ in range(12):
        scenes, frames = random_windows(8, random)
        masks = stencils.masks(scenes, frames.flatten(1)).flatten(0, 1)  # [2 B, 28, H, W]
        blocks = masks.unflatten(1, (-1, BLOCK_FRAMES)).unflatten(3, (ROWS, 16)).unflatten(5, (COLUMNS, 16))
        blocks = blocks.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(0, 3)  # [cells, 1024]
        crossed = blocks.mean(dim=1)
        cells.append(blocks[(crossed > 1e-3) & (crossed < 0.999)])
    outlines = torch.cat(cells).double()
    _, vectors = torch.linalg.eigh(outlines.T @ outlines)
    width = decoder.proj_out.in_features
    per_colour = width // 3
    weight = torch.zeros(3, _PATCH_PIXELS, width)
    for colour in range(3):
        basis = vectors[:, -per_colour:].flip(1).float() * math.sqrt(_PATCH_PIXELS)
        # Later components are smaller; so are their patches, for outputs that are all of one size.
        basis *= (torch.arange(per_colour) + 1.0) ** -0.5
        weight[colour, :, colour * per_colour : (colour + 1) * per_colour] = basis
    decoder.proj_out.weight.copy_(weight.flatten(0, 1))
    decoder.proj_out.bias.zero_()
