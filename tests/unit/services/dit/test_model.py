"""The cached forward, fast, against one packed forward over text and all chunks, slow: same inputs, same velocity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from core.budget import kv_rows
from core.geometry import chunk_table, num_rows, text_positions
from core.schedule import context_timestep
from h3stream.request import ClipSpec
from services.dit.adaln import AUDIO_TAG, VIDEO_TAG, Modulation, clip_timesteps, distinct, modulation_table
from services.dit.attention import Rotary, rotate
from services.dit.kv_cache import KvCache
from services.dit.kv_storage import KvShape
from services.dit.model import H3Dit
from services.dit.noise import ClipNoise
from services.dit.rows import ChunkLatents, audio_rows, chunk_position_ids, rows_to_audio, rows_to_video, video_rows
from services.dit.weights import load_transformer

CPU = torch.device("cpu")
CONTEXT = (context_timestep(), context_timestep())


@dataclass
class Group:
    """Rows that see themselves and all groups before them."""

    hidden: torch.Tensor
    rotary: Rotary
    modulation: Modulation
    table_rows: torch.Tensor


@pytest.fixture(scope="module")
def model(model_directory: Path) -> H3Dit:
    return H3Dit(load_transformer(model_directory / "transformer", "float32"))


def packed_forward(model: H3Dit, groups: list[Group]) -> torch.Tensor:
    """All blocks over all rows at once under a block-causal mask; no cache."""
    sizes = [len(group.hidden) for group in groups]
    owner = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes))
    mask = owner[:, None] >= owner[None, :]
    rotary = tuple(torch.cat([group.rotary[i] for group in groups]) for i in (0, 1))
    hidden = torch.cat([group.hidden for group in groups])
    for layer, block in enumerate(model.transformer.transformer_blocks):

        def per_row(name: str, layer: int = layer) -> torch.Tensor:
            return torch.cat([getattr(g.modulation.blocks[layer], name)[g.table_rows] for g in groups])

        normed = block.norm1(hidden) * per_row("attn_scale") + per_row("attn_shift")
        q, k, v = (getattr(block.attn, f"to_{part}")(normed).unflatten(-1, (2, 128)) for part in "qkv")
        q, k = rotate(block.attn.norm_q(q), rotary), rotate(block.attn.norm_k(k), rotary)
        out = scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), attn_mask=mask)
        hidden = hidden + per_row("attn_gate") * block.attn.to_out[0](out.transpose(0, 1).flatten(1))
        normed = block.norm2(hidden) * per_row("ffn_scale") + per_row("ffn_shift")
        hidden = hidden + per_row("ffn_gate") * block.ff(normed)
    return hidden


def test_a_cached_forward_equals_one_packed_forward_over_everything(
    model: H3Dit,
    clip: ClipSpec,
    context: torch.Tensor,
    token_tags: torch.Tensor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transformer, chunks = model.transformer, chunk_table(clip.num_frames)[:3]
    steps = clip_timesteps(clip.steps, clip.video_shift, clip.audio_shift)
    table = modulation_table(transformer, (*steps, CONTEXT))
    noise = ClipNoise(clip, CPU)
    timesteps = (CONTEXT, CONTEXT, steps[1])

    rows = [num_rows(chunk, clip.width, clip.height) for chunk in chunks]
    shape = KvShape(3, 2, 128, torch.float32, CPU, kv_rows(clip, 5).widest_attention + sum(rows), max(rows))
    cache = KvCache(shape, (5, *rows), sink=1, window=None, storage="cpu")
    model.prefill_text(context, token_tags, table[distinct(*CONTEXT)], cache)
    cache.commit()
    for chunk, (video_t, audio_t) in zip(chunks, timesteps, strict=True):
        is_context = chunk.index < 2
        cached = model.forward_chunk(
            noise.initial(chunk),
            (video_t, audio_t),
            model.chunk_layout(chunk, 5, 2, 4),
            table[distinct(video_t, audio_t)],
            cache,
            stage=is_context,
        )
        if is_context:
            cache.commit()

    refined = transformer.token_refiner(transformer.context_embedder(context)[None])[0]
    text_table = table[distinct(*CONTEXT)]
    groups = [Group(refined, rotary_of(model, text_positions(5)), text_table, token_tags)]
    for chunk, (video_t, audio_t) in zip(chunks, timesteps, strict=True):
        latents = noise.initial(chunk)
        audio, video = audio_rows(latents.audio), video_rows(latents.video)
        modulation = table[distinct(video_t, audio_t)]
        groups.append(
            Group(
                torch.cat((transformer.audio_proj_in(audio), transformer.proj_in(video))),
                rotary_of(model, chunk_position_ids(chunk, 5, 2, 4).tolist()),
                modulation,
                torch.tensor(
                    [modulation.row(audio_t, AUDIO_TAG)] * len(audio)
                    + [modulation.row(video_t, VIDEO_TAG)] * len(video)
                ),
            )
        )
    hidden = packed_forward(model, groups)[-rows[-1] :]
    at = groups[-1].table_rows // 3
    out = (
        transformer.norm_out.norm(hidden) * groups[-1].modulation.final_scale[at]
        + groups[-1].modulation.final_shift[at]
    )
    num_audio = 2 * chunks[2].num_audio_latents
    packed = ChunkLatents(
        rows_to_video(transformer.proj_out(out[num_audio:]), 5, 2, 4),
        rows_to_audio(transformer.audio_proj_out(out[:num_audio])),
    )
    worst = max((packed.video - cached.video).abs().max().item(), (packed.audio - cached.audio).abs().max().item())
    with capsys.disabled():
        print(f"\ncached against packed forward, float32: difference at most {worst:.1e}")
    assert worst <= 3e-5  # another order of summation; velocities are of size 1


def rotary_of(model: H3Dit, positions: list[tuple[float, float, float]]) -> Rotary:
    cos, sin = model.transformer.rope(torch.tensor(positions, dtype=torch.float64))
    return cos[:, None, :48], sin[:, None, :48]
