"""Our forwards over the published DiT modules, read from top to bottom: text prefill, one chunk, a whole clip.

Every weight is used by calling its module, never by reading it, so adapters attached to the modules apply.
Numerics: docs/reference/raven-streaming.md §5.4, §7; the dense forward: docs/reference/h3-model.md §2.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.budget import FFN_BLOCK_ROWS, ModelSize
from core.geometry import AUDIO_CHANNELS, Chunk, num_audio_latents, num_audio_rows, text_positions
from core.schedule import context_timestep
from services.dit.adaln import AUDIO_TAG, VIDEO_TAG, Modulation, add_gated, modulate
from services.dit.attention import Rotary, self_attention
from services.dit.kv_cache import KvCache
from services.dit.rows import (
    ChunkLatents,
    audio_rows,
    chunk_position_ids,
    dense_position_ids,
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


@dataclass(frozen=True)
class DenseLayout:
    """What all forwards of one dense clip share."""

    rotary: Rotary
    """Of the clip's rows, the text's included."""
    token_tags: Tensor
    """Modality of each text row, `[E]`."""
    num_audio_rows: int
    """Rows between the text and the first video row."""


class H3Dit:
    """The DiT as the samplers use it: a chunk's rows see the KV cache and themselves, a whole clip's see each other."""

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

    def refine_text(self, context: Tensor, *, dense: bool = False) -> Tensor:
        """The text rows as the blocks read them, `[E, hidden]`; they depend on no timestep.

        context: `[E, text_dim]` hidden states of the text encoder.  dense: whether they are for dense forwards.
        """
        hidden = self.transformer.context_embedder(context.to(self.dtype))  # [E, hidden]
        for block in self.transformer.token_refiner.refiner_blocks:
            hidden = hidden + self_attention(block.attn, block.norm1(hidden), dense=dense)
            hidden = hidden + block.ff(block.norm2(hidden))
        refined: Tensor = self.transformer.token_refiner.final_norm(hidden)
        return refined

    def prefill_text(self, context: Tensor, token_tags: Tensor, modulation: Modulation, cache: KvCache) -> Tensor:
        """Runs the text alone and stages every block's K and V.

        context: `[E, text_dim]` hidden states of the text encoder.  token_tags: `[E]` modality of each token.
        Returns the rows after the last block, `[E, hidden]`; the rollout has no use for them.
        """
        hidden = self.refine_text(context)
        rotary = self._rotary(torch.tensor(text_positions(hidden.shape[0]), dtype=torch.float64))
        rows = token_tags + modulation.row(context_timestep(), 0)
        self._run_blocks(hidden, rotary, rows, modulation, cache, stage=True)
        return hidden

    def chunk_layout(self, chunk: Chunk, num_tokens: int, latent_height: int, latent_width: int) -> ChunkLayout:
        """What the forwards of a chunk need besides its latents; computed once per chunk."""
        positions = chunk_position_ids(chunk, num_tokens, latent_height, latent_width)
        return ChunkLayout(self._rotary(positions), num_audio_rows(chunk))

    def dense_layout(self, num_frames: int, token_tags: Tensor, latent_height: int, latent_width: int) -> DenseLayout:
        """What the forwards of a dense clip need besides its text and latents; computed once per clip.

        token_tags: `[E]` modality of each token, on the device.
        """
        positions = dense_position_ids(num_frames, len(token_tags), latent_height, latent_width)
        return DenseLayout(self._rotary(positions), token_tags, AUDIO_CHANNELS * num_audio_latents(num_frames))

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
        hidden = self._embed(latents)
        video_t, audio_t = timesteps
        rows = _per_stream(
            modulation.row(audio_t, AUDIO_TAG), modulation.row(video_t, VIDEO_TAG), layout.num_audio_rows, hidden
        )
        self._run_blocks(hidden, layout.rotary, rows, modulation, cache, stage=stage)
        return self._velocity(hidden, latents, timesteps, layout.num_audio_rows, modulation)

    def forward_dense(
        self,
        text: Tensor,
        latents: ChunkLatents,
        timesteps: tuple[float, float],
        layout: DenseLayout,
        modulation: Modulation,
    ) -> ChunkLatents:
        """The velocity `x0 - eps` of a whole clip, float32, from its latents at these (video, audio) timesteps.

        text: `[E, hidden]` from `refine_text`; its rows lie at the video's timestep, so they change with every step.
        """
        hidden = torch.cat((text, self._embed(latents)))  # [E + N, hidden]
        video_t, audio_t = timesteps
        media = hidden[len(text) :]
        media_rows = _per_stream(
            modulation.row(audio_t, AUDIO_TAG), modulation.row(video_t, VIDEO_TAG), layout.num_audio_rows, media
        )
        rows = torch.cat((layout.token_tags + modulation.row(video_t, 0), media_rows))
        self._run_blocks(hidden, layout.rotary, rows, modulation)
        return self._velocity(media, latents, timesteps, layout.num_audio_rows, modulation)

    def _embed(self, latents: ChunkLatents) -> Tensor:
        """Audio rows, then video rows, as the first block reads them: `[N, hidden]`."""
        audio = self.transformer.audio_proj_in(audio_rows(latents.audio))
        video = self.transformer.proj_in(video_rows(latents.video))
        return torch.cat((audio, video)).to(self.dtype)  # the patch projections are float32 islands

    def _velocity(
        self,
        hidden: Tensor,
        latents: ChunkLatents,
        timesteps: tuple[float, float],
        num_audio_rows: int,
        modulation: Modulation,
    ) -> ChunkLatents:
        """Both heads over the media rows `[N, hidden]` behind the last block, in the shape of their latents."""
        video_t, audio_t = timesteps
        rows = _per_stream(modulation.timestep_row(audio_t), modulation.timestep_row(video_t), num_audio_rows, hidden)
        normed = self.transformer.norm_out.norm(hidden)
        out = modulate(normed, modulation.final_shift, modulation.final_scale, rows).float()  # the heads are islands
        return ChunkLatents(
            video=rows_to_video(self.transformer.proj_out(out[num_audio_rows:]), *latents.video.shape[2:]),
            audio=rows_to_audio(self.transformer.audio_proj_out(out[:num_audio_rows])),
        )

    def _run_blocks(
        self,
        hidden: Tensor,
        rotary: Rotary,
        rows: Tensor,
        modulation: Modulation,
        cache: KvCache | None = None,
        *,
        stage: bool = False,
    ) -> None:
        """All blocks over rows `[N, hidden]` of one forward, in place.

        rows: `[N]` rows of the modulation tables.  cache: what the rows see beside each other.
        """
        for layer, (block, table) in enumerate(
            zip(self.transformer.transformer_blocks, modulation.blocks, strict=True)
        ):
            normed = modulate(block.norm1(hidden), table.attn_shift, table.attn_scale, rows)
            if cache is None:
                branch = self_attention(block.attn, normed, rotary, dense=True)
            else:
                branch = self_attention(block.attn, normed, rotary, partial(cache.gather, layer))
                if stage:
                    cache.stage(layer)
            add_gated(hidden, branch, table.attn_gate, rows)
            del normed, branch
            # In blocks of rows: a whole clip's inner rows, several times as wide, would be the peak of its memory.
            for part, part_rows in zip(hidden.split(FFN_BLOCK_ROWS), rows.split(FFN_BLOCK_ROWS), strict=True):
                normed = modulate(block.norm2(part), table.ffn_shift, table.ffn_scale, part_rows)
                add_gated(part, block.ff(normed), table.ffn_gate, part_rows)

    def _rotary(self, positions: Tensor) -> Rotary:
        """Angles of `[N, 3]` float64 positions: built in float32, then rounded to the compute dtype."""
        rope = self.transformer.rope
        half = 3 * self.transformer.config.rope_freq_dim  # the module repeats the angles for the second half
        cos, sin = rope(positions.to(rope.inv_freq.device))
        return cos[:, None, :half].to(self.dtype), sin[:, None, :half].to(self.dtype)


def finish_forward(device: torch.device) -> None:
    """Returns once the device has done what it was given.

    Progress and cancellation are about work done, not work queued: the host never runs ahead of a forward.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _per_stream(audio: int, video: int, num_audio_rows: int, media: Tensor) -> Tensor:
    """`[N]` indices: one value for the audio rows of `media`, one for the video rows behind them."""
    index = torch.full((media.shape[0],), video, dtype=torch.int64, device=media.device)
    index[:num_audio_rows] = audio
    return index
