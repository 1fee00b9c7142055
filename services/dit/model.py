"""Our forward over the published DiT modules: text prefill and chunk forwards, read from top to bottom.

Every weight is used by calling its module, never by reading it, so adapters attached to the modules apply.
Numerics: docs/reference/raven-streaming.md §5.4, §7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.budget import ModelSize
from core.geometry import Chunk, num_audio_rows, text_positions
from core.schedule import context_timestep
from services.dit.adaln import AUDIO_TAG, VIDEO_TAG, Modulation, add_gated, modulate
from services.dit.attention import Rotary, self_attention
from services.dit.kv_cache import KvCache
from services.dit.rows import (
    ChunkLatents,
    audio_rows,
    chunk_position_ids,
    rows_to_audio,
    rows_to_video,
    video_rows,
)

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel


@dataclass(frozen=True)
class ChunkLayout:
    """What all forwards of one chunk share."""

    rotary: Rotary
    """Of the chunk's rows."""
    num_audio_rows: int
    """Rows before the first video row."""


class CausalDit:
    """The DiT as the streaming rollout uses it: a chunk's rows see the KV cache and themselves."""

    def __init__(self, transformer: MiniMaxH3Transformer3DModel) -> None:
        self.transformer = transformer
        self.num_layers: int = transformer.config.num_layers
        self.num_heads: int = transformer.config.num_attention_heads
        self.head_dim: int = transformer.config.attention_head_dim
        self.text_dim: int = transformer.config.text_dim
        self.dtype: torch.dtype = transformer.context_embedder.weight.dtype

    @property
    def size(self) -> ModelSize:
        """What the model's memory depends on."""
        config = self.transformer.config
        return ModelSize(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            hidden=config.hidden_size,
            ffn=config.ffn_dim,
            compute_bytes=self.dtype.itemsize,
        )

    def prefill_text(self, context: Tensor, token_tags: Tensor, modulation: Modulation, cache: KvCache) -> Tensor:
        """Runs the text alone and stages every block's K and V.

        context: `[E, text_dim]` hidden states of the text encoder.  token_tags: `[E]` modality of each token.
        Returns the rows after the last block, `[E, hidden]`; the rollout has no use for them.
        """
        hidden = self.transformer.context_embedder(context.to(self.dtype))  # [E, hidden]
        for block in self.transformer.token_refiner.refiner_blocks:
            hidden = hidden + self_attention(block.attn, block.norm1(hidden))
            hidden = hidden + block.ff(block.norm2(hidden))
        hidden = self.transformer.token_refiner.final_norm(hidden)
        rotary = self._rotary(torch.tensor(text_positions(hidden.shape[0]), dtype=torch.float64))
        rows = token_tags + modulation.row(context_timestep(), 0)
        return self._run_blocks(hidden, rotary, rows, modulation, cache, stage=True)

    def chunk_layout(self, chunk: Chunk, num_tokens: int, latent_height: int, latent_width: int) -> ChunkLayout:
        """What the forwards of a chunk need besides its latents; computed once per chunk."""
        positions = chunk_position_ids(chunk, num_tokens, latent_height, latent_width)
        return ChunkLayout(self._rotary(positions), num_audio_rows(chunk))

    def forward_chunk(
        self,
        latents: ChunkLatents,
        timesteps: tuple[float, float],
        layout: ChunkLayout,
        modulation: Modulation,
        cache: KvCache,
        *,
        stage: bool,
    ) -> ChunkLatents:
        """The velocity `x0 - eps` of a chunk, float32, from its latents at these (video, audio) timesteps.

        stage: whether the rows' K and V are staged for a commit (clean forward) or forgotten (noise forward).
        """
        audio, video = audio_rows(latents.audio), video_rows(latents.video)
        hidden = torch.cat((self.transformer.audio_proj_in(audio), self.transformer.proj_in(video)))
        hidden = hidden.to(self.dtype)  # [N, hidden]; the patch projections are float32 islands

        video_t, audio_t = timesteps
        rows = _per_stream(modulation.row(audio_t, AUDIO_TAG), modulation.row(video_t, VIDEO_TAG), layout, hidden)
        hidden = self._run_blocks(hidden, layout.rotary, rows, modulation, cache, stage=stage)

        rows = _per_stream(modulation.timestep_row(audio_t), modulation.timestep_row(video_t), layout, hidden)
        normed = self.transformer.norm_out.norm(hidden)
        out = modulate(normed, modulation.final_shift, modulation.final_scale, rows).float()  # the heads are islands
        return ChunkLatents(
            video=rows_to_video(self.transformer.proj_out(out[layout.num_audio_rows :]), *latents.video.shape[2:]),
            audio=rows_to_audio(self.transformer.audio_proj_out(out[: layout.num_audio_rows])),
        )

    def _run_blocks(
        self, hidden: Tensor, rotary: Rotary, rows: Tensor, modulation: Modulation, cache: KvCache, *, stage: bool
    ) -> Tensor:
        """All blocks over rows `[N, hidden]` of one forward.  rows: `[N]` rows of the modulation tables."""
        for layer, (block, table) in enumerate(
            zip(self.transformer.transformer_blocks, modulation.blocks, strict=True)
        ):
            normed = modulate(block.norm1(hidden), table.attn_shift, table.attn_scale, rows)
            branch = self_attention(block.attn, normed, rotary, partial(cache.gather, layer))
            if stage:
                cache.stage(layer)
            hidden = add_gated(hidden, branch, table.attn_gate, rows)
            normed = modulate(block.norm2(hidden), table.ffn_shift, table.ffn_scale, rows)
            hidden = add_gated(hidden, block.ff(normed), table.ffn_gate, rows)
        return hidden

    def _rotary(self, positions: Tensor) -> Rotary:
        """Angles of `[N, 3]` float64 positions: built in float32, then rounded to the compute dtype."""
        rope = self.transformer.rope
        half = 3 * self.transformer.config.rope_freq_dim  # the module repeats the angles for the second half
        cos, sin = rope(positions.to(rope.inv_freq.device))
        return cos[:, None, :half].to(self.dtype), sin[:, None, :half].to(self.dtype)


def _per_stream(audio: int, video: int, layout: ChunkLayout, hidden: Tensor) -> Tensor:
    """`[N]` indices: one value for the audio rows, one for the video rows behind them."""
    index = torch.full((hidden.shape[0],), video, dtype=torch.int64, device=hidden.device)
    index[: layout.num_audio_rows] = audio
    return index
