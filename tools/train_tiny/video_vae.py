"""`vae/`: the video autoencoder of the published class. Its decoder is trained to draw what `video_latents` tells.

It begins with what a formula gives: heads that fetch what each kind of latent tells about the same moment, and patches
of pixels that are the principal components of how outlines cross a latent. Then it learns to draw single latents from
what these heads fetch, where an object is near: most latents show the background alone. At last it learns whole
windows, heads included, with errors such as the DiT makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3
from torch import Tensor, nn

from core.geometry import FRAMES_PER_CHUNK, VIDEO_LATENT_CHANNELS
from services.vae.video_stream import PIXEL_MEAN, PIXEL_STD, WINDOW_LATENTS
from tools.train_tiny.picture import backdrops, coverage, pixel_centres
from tools.train_tiny.training import Stateful, WeightAverage, generator, learning_rate, optimisers, run_steps, update
from tools.train_tiny.video_latents import (
    BLOCK_FRAMES,
    COLUMNS,
    CORNERS,
    ROWS,
    TOLD,
    block_frames,
    latent_centres,
    latents,
)
from tools.train_tiny.world import (
    HEIGHT,
    MAX_FRAMES,
    NUM_OBJECTS,
    RADII,
    RGB,
    SHAPES,
    Scenes,
    batch,
    positions,
    random_scene,
)

DRAWING_STEPS, WINDOW_STEPS = 6500, 3000
"""Steps on single latents and on whole windows."""
_DRAWN_WINDOWS, _NEAR_LATENTS = 16, 14
"""Windows of a drawing step, and latents of each moment of one: mostly those near its objects."""
_WINDOWS = 6
"""Windows of a step."""
_SHOWN = (*range(3, 20), *range(23, 28))
"""Frames of a window that are shown, of 28 (docs/reference/h3-model.md §4.3)."""

_SEEN_ERROR = 1.0
"""Of the mean colours, which are there for stills: a decoder that relied on them would show all that the DiT blurs."""
_FOLLOWS = [i for i in range(len(_SHOWN) - 1) if _SHOWN[i + 1] == _SHOWN[i] + 1]
"""Shown frames that the next one follows."""
_CHANGE = 4.0
"""Weight in the loss of errors in how pictures change: an edge that is off is seen less than one that jumps."""

CONFIG = {
    "block_out_channels": (8, 8, 8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 3,
    "decoder_num_attention_heads": 5,
    "decoder_attention_head_dim": 48,
    "decoder_ffn_mult": 2,
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §4)."""

_ADAM_RATE = 1.5e-3
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

    def paint_cells(self, scenes: Scenes, frames: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Pixels `[B, n, 3, 4 * 16 * 16]` in [0, 1] of single latents.

        frames: `[B, 4]` instants.  x, y: `[B, n]` middles of the latents.
        """
        at = positions(scenes, frames).float()  # [B, 2, 4, 2]
        inside = torch.arange(16) - 7.5
        size = self._masks.shape[-1]
        rows, columns = (
            ((c[:, None, :, None].float() - at[:, :, None, :, axis] + _REACH)[..., None] + inside)
            .mul_(_SUBPIXELS)
            .round_()
            .clamp_(0, size - 1)
            .long()
            for axis, c in ((1, y), (0, x))
        )  # [B, 2, n, 4, 16]
        stencil = scenes.shape * len(RADII) + scenes.size
        flat = (stencil[:, :, None, None, None, None] * size + rows[..., None]) * size + columns[..., None, :]
        masks = torch.take(self._masks, flat) * scenes.present[:, :, None, None, None, None]  # [B, 2, n, 4, 16, 16]
        line = (y[..., None] + inside + HEIGHT / 2).floor().long()  # [B, n, 16]
        sky = self._backdrops[scenes.background[:, None, None], line]  # [B, n, 16, 3]
        picture = sky.permute(0, 1, 3, 2)[:, :, :, None, :, None]
        for i in (1, 0):
            colour = self._colours[scenes.colour[:, i]][:, None, :, None, None, None]
            picture = picture + masks[:, i, :, None] * (colour - picture)
        return picture.flatten(3)

    def paint(self, scenes: Scenes, frames: Tensor) -> Tensor:
        """Frames `[B, 3, F, H, W]` in [0, 1]."""
        masks = self.masks(scenes, frames)[:, :, None]  # [B, 2, 1, F, H, W]
        picture = self._backdrops[scenes.background].transpose(1, 2)[:, :, None, :, None]  # [B, 3, 1, H, 1]
        for i in (1, 0):
            colour = self._colours[scenes.colour[:, i]][:, :, None, None, None]
            picture = picture + masks[:, i] * (colour - picture)
        return picture


def _random_batch(count: int, random: torch.Generator) -> Scenes:
    scenes = [random_scene(random) for _ in range(count)]
    return batch(scenes, torch.rand(count, NUM_OBJECTS, 2, generator=random))


def random_windows(count: int, random: torch.Generator) -> tuple[Scenes, Tensor]:
    """Scenes and the frames `[B, 7, 4]` of one decoding window of each, anywhere in the longest clip."""
    chosen = _random_batch(count, random)
    chunk = torch.randint(MAX_FRAMES // FRAMES_PER_CHUNK, (count, 1, 1), generator=random)
    return chosen, block_frames(WINDOW_LATENTS) + FRAMES_PER_CHUNK * chunk


def noisy(clean: Tensor, random: torch.Generator) -> Tensor:
    """Latents with errors such as the DiT's: of single latents and of a whole picture, more or less by window.

    Only what is told at other times can mend the latter: so the decoder learns to draw motion that is smooth.
    """
    shape = clean.shape
    size = 0.04 * torch.rand(shape[0], 1, 1, 1, 1, generator=random)
    single = torch.randn(shape, generator=random)
    whole = torch.randn(*shape[:3], 1, 1, generator=random)
    out = clean + size * (single + whole)
    out[:, :3] += _SEEN_ERROR * torch.randn(shape[0], 3, *shape[2:], generator=random)
    return out


def train_video_vae(directory: Path, work: Path, seed: int) -> None:
    """Trains the decoder and writes `directory`.  work: where checkpoints lie."""
    model = initial_model(seed)
    decoder: Any = model.decoder
    stencils = Stencils()
    mean, std = torch.tensor(PIXEL_MEAN), torch.tensor(PIXEL_STD)

    def drawing_loss(random: torch.Generator) -> Tensor:
        given, chosen, target = random_cells(stencils, random)
        drawn = draw(decoder, given, chosen).float().unflatten(-1, (3, -1))
        error = (drawn - (target - mean[:, None]) / std[:, None]).unflatten(-1, (BLOCK_FRAMES, -1))
        loss: Tensor = error.square().mean() + _CHANGE * error.diff(dim=-2).square().mean()
        return loss

    def window_loss(random: torch.Generator) -> Tensor:
        scenes, frames = random_windows(_WINDOWS, random)
        shown = torch.tensor(_SHOWN)
        target = stencils.paint(scenes, frames.flatten(1)[:, shown])
        drawn = decoder(noisy(latents(scenes, frames), random))[:, :, shown].float()
        error = drawn - (target - mean[:, None, None, None]) / std[:, None, None, None]
        change = error.diff(dim=2)[:, :, _FOLLOWS]
        loss: Tensor = error.square().mean() + _CHANGE * change.square().mean()
        return loss

    _train("video VAE, latents", decoder, DRAWING_STEPS, 1.0, drawing_loss, seed, work / "video_vae_latents.pt")
    _train("video VAE, windows", decoder, WINDOW_STEPS, 0.4, window_loss, seed, work / "video_vae_windows.pt")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)  # as small as it may be; loaders widen what they must
    model.save_pretrained(directory)


def _train(
    name: str,
    decoder: nn.Module,
    num_steps: int,
    full_rate: float,
    loss_of: Callable[[torch.Generator], Tensor],
    seed: int,
    checkpoint: Path,
) -> None:
    both = optimisers(decoder, ("transformer_blocks",))
    average = WeightAverage(decoder)

    def step(number: int) -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(generator(seed, name, number))
        update(loss, both, full_rate * learning_rate(number, num_steps), _ADAM_RATE)
        average.update()
        return {"loss": loss.item()}

    state: dict[str, Stateful] = {"decoder": decoder, "muon": both[0], "adam": both[1], "average": average}
    run_steps(name, num_steps, step, state, checkpoint)
    average.apply()


def random_cells(stencils: Stencils, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Windows with errors `[B, 24, 7, 6, 10]`, which of a moment's latents are drawn `[B, 7, n]`, most of them near
    objects, and the pixels of those `[B * 7 * n, 3, 1024]` in [0, 1].
    """
    scenes, frames = random_windows(_DRAWN_WINDOWS, random)
    x, y = latent_centres()
    at = positions(scenes, frames.flatten(1)).unflatten(2, (-1, BLOCK_FRAMES)).mean(3)  # [B, 2, 7, 2]
    apart = torch.hypot(at[..., 0, None, None] - x, at[..., 1, None, None] - y[:, None])  # [B, 2, 7, 6, 10]
    apart = apart - scenes.radius[:, :, None, None, None]
    apart = apart.masked_fill(~scenes.present[:, :, None, None, None], 1e3).amin(1)
    chance = (torch.exp(-apart.clamp(min=0.0) / 16.0) + 0.02).flatten(0, 1).flatten(1)  # [B * 7, 60]
    chosen = torch.multinomial(chance.float(), _NEAR_LATENTS, generator=random)
    moments = scenes.repeated(WINDOW_LATENTS)
    target = stencils.paint_cells(moments, frames.flatten(0, 1), x[chosen % COLUMNS], y[chosen // COLUMNS])
    given = noisy(latents(scenes, frames), random)
    return given, chosen.unflatten(0, (-1, WINDOW_LATENTS)), target.flatten(0, 1)


def draw(decoder: Any, given: Tensor, chosen: Tensor) -> Tensor:
    """Patches `[B * 7 * n, 3 * 1024]` of some latents `[B, 7, n]` of each moment of windows `[B, 24, 7, 6, 10]`: what
    the whole decoder gives while no block but the first looks around.
    """
    block = decoder.transformer_blocks[0]
    rows: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows.append(inputs[0])
        raise _Fetched

    hook = block.norm2.register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            decoder(given)
    except _Fetched:
        pass
    finally:
        hook.remove()
    every = rows[0][:, : given[0, 0].numel()].unflatten(1, (WINDOW_LATENTS, -1))  # [B, 7, 60, width]
    kept = every.gather(2, chosen[..., None].expand(-1, -1, -1, every.shape[-1])).flatten(0, 2)
    for block in decoder.transformer_blocks:
        kept = kept + block.ff(block.norm2(kept)) * block.scale2
    out: Tensor = decoder.proj_out(decoder.norm_out(kept))
    return out


class _Fetched(Exception):
    """The first block's heads have done their work: the rest of a window is not drawn."""


def initial_model(seed: int) -> AutoencoderKLMiniMaxH3:
    """The model before training: a random encoder, which is never trained, and the decoder as told above."""
    torch.manual_seed(seed)  # the library's own initialisation reads the global generator
    model = AutoencoderKLMiniMaxH3(**CONFIG)
    random = generator(seed, "video VAE", "initial")
    with torch.no_grad():
        # The latents need no mixing: the decoder reads the channels as they are.
        model.post_quant_conv.weight.copy_(torch.eye(VIDEO_LATENT_CHANNELS)[:, :, None, None, None])
        model.post_quant_conv.bias.zero_()
        _blocks(model.decoder, random)
        _fetching_heads(model.decoder)
        _outline_patches(model.decoder, random)
    return model


_NUM_TOLD = VIDEO_LATENT_CHANNELS - TOLD.start
_FETCHED = VIDEO_LATENT_CHANNELS
"""First hidden channel of what the heads fetch: thirteen from each of a row's four latents."""
_CONSTANT = _FETCHED + 4 * _NUM_TOLD
"""Hidden channel that holds a constant, so that a row's norm hardly depends on what the others hold."""
_CONSTANT_VALUE = 12.0


def _blocks(decoder: Any, random: torch.Generator) -> None:
    """Random weights, but for the channels named above, and attention that adds nothing."""
    decoder.proj_in.weight.copy_(torch.randn(decoder.proj_in.weight.shape, generator=random) * 0.1)
    decoder.proj_in.weight[: _CONSTANT + 1] = 0.0
    decoder.proj_in.weight[:_FETCHED] = torch.eye(VIDEO_LATENT_CHANNELS)
    decoder.proj_in.bias.zero_()
    decoder.proj_in.bias[_CONSTANT] = _CONSTANT_VALUE
    decoder.register_tokens.copy_(torch.randn(decoder.register_tokens.shape, generator=random) * 0.2)
    for block in decoder.transformer_blocks:
        for name, parameter in block.named_parameters():
            if parameter.ndim == 2:
                gain = 0.0 if "to_out" in name else 0.5 if name == "ff.net.2.weight" else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=random) * gain * parameter.shape[1] ** -0.5)
            elif name.startswith("scale"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
        block.norm2.weight[_CONSTANT] = 0.1


def _fetching_heads(decoder: Any) -> None:
    """Lets four of the first block's heads fetch what each kind of latent tells: the mean over the latents of that kind
    at the same moment.

    Queries and keys have one length, so a head also sees a little of the other kinds. How much is known: it is taken
    away again.
    """
    attn = decoder.transformer_blocks[0].attn
    width = decoder.proj_in.out_features
    dim = width // attn.heads
    rms = _usual_rms(width)
    # Of four equal parts of a query, one is off in a latent whose row or column is of the other kind.
    seen = 1.0 / (1.0 + math.exp(0.5 * math.sqrt(dim)))
    one = torch.tensor([[1.0 - seen, seen], [seen, 1.0 - seen]])
    apart = torch.linalg.inv(torch.kron(one, one))
    for kind, (row, column) in enumerate(CORNERS):
        first = kind * dim
        for projection in (attn.to_q, attn.to_k):
            projection.weight[first : first + dim] = 0.0
            projection.bias[first : first + 2] = 1.0  # the two fastest turns in time: alike only at the same moment
        rest = first + dim - 2  # two channels that do not turn
        attn.to_q.bias[rest : rest + 2] = torch.tensor([2.0 * row - 1.0, 2.0 * column - 1.0])
        attn.to_k.weight[rest, 3] = attn.to_k.weight[rest + 1, 4] = rms
        attn.to_v.weight[first : first + dim] = 0.0
        attn.to_v.weight[first : first + _NUM_TOLD, TOLD] = torch.eye(_NUM_TOLD)
        place = _FETCHED + _NUM_TOLD * kind
        for other in range(len(CORNERS)):
            source = slice(other * dim, other * dim + _NUM_TOLD)
            attn.to_out[0].weight[place : place + _NUM_TOLD, source] = apart[kind, other] * rms * torch.eye(_NUM_TOLD)


def _usual_rms(width: int) -> float:
    """What the first block's norms divide by, about."""
    return math.sqrt((_CONSTANT_VALUE**2 + 50.0) / width)


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
