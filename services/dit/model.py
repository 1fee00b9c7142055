"""Our forwards over the published DiT modules, read from top to bottom: text prefill, one chunk, a whole clip.

Every weight is used by calling its module, never by reading it, so adapters attached to the modules apply.
Numerics: docs/reference/raven-streaming.md §5.4, §7; the dense forward: docs/reference/h3-model.md §2.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.budget import FFN_BLOCK_ROWS, ModelSize
from core.geometry import AUDIO_CHANNELS, Chunk, num_audio_latents, num_audio_rows, text_positions
from core.schedule import context_timestep
from services.dit.adaln import (
    AUDIO_TAG,
    NUM_TAGS,
    VIDEO_TAG,
    Labels,
    Modulation,
    Timesteps,
    add_gated,
    distinct,
    modulate,
)
from services.dit.attention import Rotary, self_attention
from services.dit.kv_cache import KvCache
from services.dit.rows import (
    ChunkLatents,
    audio_rows,
    chunk_position_ids,
    dense_position_ids,
    keyframe_position_ids,
    rows_to_audio,
    rows_to_video,
    video_rows,
)

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel

BlockAttention = Callable[[int, Any, Tensor], Tensor]
"""Attention branch of a block: takes its number, its attention module and the normed, modulated rows `[N, hidden]`."""


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
    """Audio rows; the video rows follow them."""
    num_cond_rows: int = 0
    """Rows of keyframes, between the text and the audio."""

    @property
    def num_text_rows(self) -> int:
        """Rows of the text, which come first."""
        return len(self.token_tags)

    @property
    def audio_start(self) -> int:
        """First audio row."""
        return self.num_text_rows + self.num_cond_rows

    @property
    def num_rows(self) -> int:
        """All rows of a forward."""
        return len(self.rotary[0])

    @property
    def num_video_rows(self) -> int:
        """Video rows, which come last."""
        return self.num_rows - self.audio_start - self.num_audio_rows


@dataclass(frozen=True, eq=False)
class SegmentLabels:
    """The timesteps of all rows of a dense forward."""

    text: float
    audio: Labels
    video: Labels
    cond: float | None = None
    """Of keyframes; None where there are none."""

    @property
    def timesteps(self) -> Timesteps:
        """The distinct ones, ascending."""
        cond = () if self.cond is None else (self.cond,)
        return distinct(self.text, *cond, *self.audio.values, *self.video.values)


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
        self.run_blocks(hidden, rows, modulation, _over_cache(rotary, cache, stage=True))
        return hidden

    def chunk_layout(self, chunk: Chunk, num_tokens: int, latent_height: int, latent_width: int) -> ChunkLayout:
        """What the forwards of a chunk need besides its latents; computed once per chunk."""
        positions = chunk_position_ids(chunk, num_tokens, latent_height, latent_width)
        return ChunkLayout(self._rotary(positions), num_audio_rows(chunk))

    def dense_layout(
        self,
        num_frames: int,
        token_tags: Tensor,
        latent_height: int,
        latent_width: int,
        keyframes: Sequence[int] = (),
    ) -> DenseLayout:
        """What the forwards of a dense clip need besides its text and latents; computed once per clip.

        token_tags: `[E]` modality of each token, on the device.  keyframes: pixel frames whose rows are given to it.
        """
        num_tokens = len(token_tags)
        positions = dense_position_ids(num_frames, num_tokens, latent_height, latent_width)
        cond = [keyframe_position_ids(frame, num_tokens, latent_height, latent_width) for frame in keyframes]
        return DenseLayout(
            self._rotary(torch.cat((positions[:num_tokens], *cond, positions[num_tokens:]))),
            token_tags,
            AUDIO_CHANNELS * num_audio_latents(num_frames),
            sum(len(rows) for rows in cond),
        )

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
        self.run_blocks(hidden, rows, modulation, _over_cache(layout.rotary, cache, stage=stage))
        video, audio = Labels((video_t,)), Labels((audio_t,))
        return self.velocity(hidden, audio, video, layout.num_audio_rows, modulation, latents.video.shape[2:])

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
        video_t, audio_t = timesteps
        labels = SegmentLabels(text=video_t, audio=Labels((audio_t,)), video=Labels((video_t,)))
        return self.forward_packed(text, latents, labels, layout, modulation)

    def forward_packed(
        self,
        text: Tensor,
        latents: ChunkLatents,
        labels: SegmentLabels,
        layout: DenseLayout,
        modulation: Modulation,
    ) -> ChunkLatents:
        """As `forward_dense`, with the timestep of every row."""
        hidden = torch.cat((text, self._embed(latents)))  # [E + N, hidden]
        rows = self.block_rows(labels, layout, modulation)
        self.run_blocks(hidden, rows, modulation, self.dense_attention(layout))
        return self.velocity(
            hidden[len(text) :], labels.audio, labels.video, layout.num_audio_rows, modulation, latents.video.shape[2:]
        )

    def dense_attention(self, layout: DenseLayout) -> BlockAttention:
        """Every row of a dense clip sees every other one."""

        def attention(layer: int, attn: Any, normed: Tensor) -> Tensor:
            return self_attention(attn, normed, layout.rotary, dense=True)

        return attention

    def block_rows(self, labels: SegmentLabels, layout: DenseLayout, modulation: Modulation) -> Tensor:
        """Rows of the blocks' modulation tables of all rows of a dense forward, `[S]`."""
        tags = layout.token_tags
        segments = [tags + modulation.row(labels.text, 0)]
        if labels.cond is not None:
            segments.append(tags.new_full((layout.num_cond_rows,), modulation.row(labels.cond, VIDEO_TAG)))
        for stream, tag, num_rows in (
            (labels.audio, AUDIO_TAG, layout.num_audio_rows),
            (labels.video, VIDEO_TAG, layout.num_video_rows),
        ):
            segments.append(modulation.timestep_rows(stream, num_rows, tags.device).mul_(NUM_TAGS).add_(tag))
        return torch.cat(segments)

    def embed_audio(self, audio: Tensor) -> Tensor:
        """Audio latents as rows that the first block reads, `[2 A, hidden]`."""
        rows: Tensor = self.transformer.audio_proj_in(audio_rows(audio)).to(self.dtype)
        return rows

    def embed_video(self, rows: Tensor) -> Tensor:
        """Video rows `[N, 96]` float32 as the first block reads them, `[N, hidden]`."""
        embedded: Tensor = self.transformer.proj_in(rows).to(self.dtype)
        return embedded

    def audio_velocity(self, hidden: Tensor, labels: Labels, modulation: Modulation) -> Tensor:
        """The audio head over its rows `[2 A, hidden]` behind the last block: `[1, 32, 2, A]` float32."""
        rows = modulation.timestep_rows(labels, len(hidden), hidden.device)
        return rows_to_audio(self.transformer.audio_proj_out(self._final_norm(hidden, rows, modulation)))

    def velocity(
        self,
        hidden: Tensor,
        audio: Labels,
        video: Labels,
        num_audio_rows: int,
        modulation: Modulation,
        size: Sequence[int],
    ) -> ChunkLatents:
        """Both heads over the media rows `[N, hidden]` behind the last block, float32.

        audio, video: labels of its rows.  size: T, H and W of the video.
        """
        rows = torch.cat(
            (
                modulation.timestep_rows(audio, num_audio_rows, hidden.device),
                modulation.timestep_rows(video, len(hidden) - num_audio_rows, hidden.device),
            )
        )
        normed = self._final_norm(hidden, rows, modulation)
        return ChunkLatents(
            video=rows_to_video(self.transformer.proj_out(normed[num_audio_rows:]), *size),
            audio=rows_to_audio(self.transformer.audio_proj_out(normed[:num_audio_rows])),
        )

    def _final_norm(self, hidden: Tensor, rows: Tensor, modulation: Modulation) -> Tensor:
        normed = self.transformer.norm_out.norm(hidden)
        return modulate(normed, modulation.final_shift, modulation.final_scale, rows).float()  # the heads are islands

    def _embed(self, latents: ChunkLatents) -> Tensor:
        """Audio rows, then video rows, as the first block reads them: `[N, hidden]`."""
        return torch.cat((self.embed_audio(latents.audio), self.embed_video(video_rows(latents.video))))

    def run_blocks(self, hidden: Tensor, rows: Tensor, modulation: Modulation, attention: BlockAttention) -> None:
        """All blocks over rows `[N, hidden]` of one forward, in place.

        rows: `[N]` rows of the modulation tables.  attention: the attention branch of each block.
        """
        for layer, (block, table) in enumerate(
            zip(self.transformer.transformer_blocks, modulation.blocks, strict=True)
        ):
            normed = modulate(block.norm1(hidden), table.attn_shift, table.attn_scale, rows)
            branch = attention(layer, block.attn, normed)
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


def _over_cache(rotary: Rotary, cache: KvCache, *, stage: bool) -> BlockAttention:
    """A chunk's rows see the retained rows and each other.  stage: whether their K and V are staged for a commit."""

    def attention(layer: int, attn: Any, normed: Tensor) -> Tensor:
        branch = self_attention(attn, normed, rotary, lambda key, value: cache.gather(layer, key, value))
        if stage:
            cache.stage(layer)
        return branch

    return attention


def _per_stream(audio: int, video: int, num_audio_rows: int, media: Tensor) -> Tensor:
    """`[N]` indices: one value for the audio rows of `media`, one for the video rows behind them."""
    index = torch.full((media.shape[0],), video, dtype=torch.int64, device=media.device)
    index[:num_audio_rows] = audio
    return index
