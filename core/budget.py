"""Memory that a clip needs beside the weights, term by term, and what its stream will weigh.

Source: docs/reference/raven-streaming.md §6.4 and §9.1, whose worked example is a test. The terms of a dense clip are
our own sampler's, with the sizes of docs/reference/h3-model.md §1 and §2.6.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.geometry import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    AUDIO_LATENTS_PER_SECOND,
    FPS,
    LATENTS_PER_CHUNK,
    VIDEO_LATENT_CHANNELS,
    chunk_table,
    latent_size,
    num_audio_latents,
    num_clip_rows,
    num_rows,
    num_video_latents,
)
from core.request import ClipValues
from core.retention import retained_entries

GIB = 1 << 30
VIDEO_BIT_RATE = 6_000_000
"""Bits per second of the H.264 track unless a deployment says otherwise (RAVEN's rate)."""
AAC_BIT_RATE = 128_000
"""Bits per second of the AAC track."""
LATENT_BYTES = 4
"""Latents, noise and clean estimates are float32 whatever the compute dtype is."""
CLIP_LONG_BUFFERS = 3
"""Initial noise, clean-context noise and clean estimate of the whole clip."""
CHUNK_LONG_BUFFERS = 6
"""Noisy latent, velocity, clean estimate, fresh noise, next noisy latent and a temporary, each of one chunk."""
DENSE_BUFFERS = 6
"""Noisy latent, next noisy latent, velocity, a temporary, and rows of two of them, each of a whole dense clip."""
ADAPTER_TEMPORARY_BYTES = 64 << 20
"""Budget of the float32 temporaries of adapter residuals, which work through rows in blocks."""
FFN_BLOCK_ROWS = 8192
"""Rows that a block's feed-forward takes at once. More than any chunk has (5,218), so that streaming is untouched; a
whole clip's 75,000 inner rows would take 8.6 GB of the full model where a block of them takes 0.9 GB."""
SAFETY_PERCENT = 12
SAFETY_FLOOR_BYTES = 512 << 20
"""Added to everything else, with the percentage: allocator blocks and kernels' own workspaces."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a DiT that its memory depends on."""

    num_layers: int
    """Transformer blocks, each with a KV cache."""
    num_heads: int
    """Attention heads of a block."""
    head_dim: int
    """Channels of a head."""
    hidden: int
    """Channels of a row between the blocks."""
    ffn: int
    """Channels inside the feed-forward, after the gate."""
    compute_bytes: int
    """Bytes of an element of the compute dtype."""

    @property
    def inner(self) -> int:
        """Channels of a row inside attention."""
        return self.num_heads * self.head_dim

    @property
    def kv_bytes_per_row(self) -> int:
        """Bytes of one row's K and V in all layers."""
        return 2 * self.num_layers * self.inner * self.compute_bytes


@dataclass(frozen=True)
class KvRows:
    """Rows of the KV cache over a clip. The last chunk is never committed."""

    peak: int
    """Most rows alive at once: those retained and those of the chunk being staged."""
    most_retained: int
    """Most rows retained after a commit."""
    steady: int
    """Rows retained after the last commit."""
    widest_attention: int
    """Most keys of one forward: rows retained and its own, the last chunk's forwards included."""
    widest_forward: int
    """Most rows of one forward, the text's included."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a clip needs beside the weights. All on the device, but for the KV cache kept on the host."""

    kv_device: int
    """KV cache on the device; 0 where it lives on the host."""
    kv_host: int
    """KV cache on the host at its peak; 0 where it lives on the device."""
    kv_host_steady: int
    """KV cache on the host after the last commit."""
    kv_merged: int
    """One layer's keys and values gathered for attention."""
    activations: int
    """Tensors of one block's forward."""
    modulation: int
    """Modulation table of a dense clip, whose every step has its own timesteps; 0 when streaming, whose few lie in the
    safety margin."""
    adapter_temporaries: int
    """Float32 temporaries of adapter residuals."""
    latent_buffers: int
    """Noise and latents of the rollout."""
    decode: int
    """The larger of a video and an audio decode, as the VAEs estimate it."""

    @property
    def forward(self) -> int:
        """What a forward needs beside the KV cache and the latents."""
        return self.activations + self.kv_merged + self.adapter_temporaries

    @property
    def working(self) -> int:
        """A maximum and not a sum: a decode never runs during a forward."""
        return max(self.forward, self.decode)

    @property
    def safety(self) -> int:
        """What is added for allocator blocks and workspaces that no term names."""
        return -(-SAFETY_PERCENT * self._named // 100) + SAFETY_FLOOR_BYTES

    @property
    def device_total(self) -> int:
        """What must be free on the device beside the weights."""
        return self._named + self.safety

    def __str__(self) -> str:
        """What is needed, in a sentence; terms of 0 are left out."""
        device = (
            (self.kv_device, "of KV cache"),
            (self.working, "for a forward" if self.working == self.forward else "for a decode"),
            (self.modulation, "of modulation"),
            (self.latent_buffers, "of latents"),
            (self.safety, "in reserve"),
        )
        terms = ", ".join(f"{gib(size)} {what}" for size, what in device if size)
        on_host = f", and {gib(self.kv_host)} of KV cache on the host" if self.kv_host else ""
        return f"about {gib(self.device_total)} on the device beside the weights ({terms}){on_host}"

    @property
    def _named(self) -> int:
        return self.kv_device + self.modulation + self.latent_buffers + self.working


def gib(num_bytes: int) -> str:
    """A size in GiB, with two digits behind the point or, if it is small, two that count."""
    size = num_bytes / GIB
    return f"{size:.2f} GiB" if size >= 0.1 or size == 0 else f"{size:.2g} GiB"


def kv_rows(clip: ClipValues, num_tokens: int) -> KvRows:
    """Rows of the KV cache over a valid clip with `num_tokens` text rows."""
    *committed_chunks, tail = (num_rows(chunk, clip.width, clip.height) for chunk in chunk_table(clip.num_frames))
    entries = [num_tokens, *committed_chunks]
    # retained[n]: rows that attention sees after n commits.
    retained = [
        sum(entries[entry] for entry in retained_entries(n, clip.sink, clip.window)) for n in range(len(entries) + 1)
    ]
    staging = [before + staged for before, staged in zip(retained, entries, strict=False)]
    return KvRows(
        peak=max(staging),
        most_retained=max(retained),
        steady=retained[-1],
        widest_attention=max(*staging, retained[-1] + tail),
        widest_forward=max(entries),
    )


def memory_budget(clip: ClipValues, num_tokens: int, model: ModelSize, decode_bytes: int) -> MemoryBudget:
    """What a valid clip needs beside the weights.

    num_tokens: text rows.  decode_bytes: the larger of a decode of seven video latents and one of an audio block with
    both its margins.
    """
    if clip.mode == "dense":
        return _dense_budget(clip, num_tokens, model, decode_bytes)
    rows = kv_rows(clip, num_tokens)
    on_device = clip.kv_storage == "gpu"
    # With the cache on the device only the history is gathered; from the host, one buffer takes own rows too.
    merged_rows = rows.most_retained if on_device else rows.widest_attention
    row_elements = 4 * model.hidden + 3 * model.inner + model.inner + 3 * model.ffn
    peak_bytes = rows.peak * model.kv_bytes_per_row
    return MemoryBudget(
        kv_device=peak_bytes if on_device else 0,
        kv_host=0 if on_device else peak_bytes,
        kv_host_steady=0 if on_device else rows.steady * model.kv_bytes_per_row,
        kv_merged=2 * merged_rows * model.inner * model.compute_bytes,
        activations=rows.widest_forward * row_elements * model.compute_bytes,
        modulation=0,
        adapter_temporaries=ADAPTER_TEMPORARY_BYTES,
        latent_buffers=_latent_buffer_bytes(clip),
        decode=decode_bytes,
    )


def expected_stream_bytes(num_frames: int, video_bits_per_second: int, audio_bits_per_second: int) -> int:
    """Roughly what the media of a clip weighs when its encoders meet their target rates; boxes are not counted."""
    video_bits = -(-video_bits_per_second * num_frames // FPS)
    audio_bits = -(-audio_bits_per_second * num_audio_latents(num_frames) // AUDIO_LATENTS_PER_SECOND)
    return -(-(video_bits + audio_bits) // 8)


def _dense_budget(clip: ClipValues, num_tokens: int, model: ModelSize, decode_bytes: int) -> MemoryBudget:
    """All rows at once, and no cache."""
    rows = num_tokens + num_clip_rows(clip.num_frames, clip.width, clip.height)
    # Its peak is the attention (block input and its norm, queries, keys, values and output) or, where the clip is
    # little longer than a block of rows, the feed-forward: input, norm, modulated, output; both halves, gate, product.
    attention = rows * (2 * model.hidden + 4 * model.inner)
    feed_forward = rows * model.hidden + min(rows, FFN_BLOCK_ROWS) * (3 * model.hidden + 4 * model.ffn)
    # The first step has both streams at 0, every other one timestep each. A row per (timestep, tag) of six
    # modulations a block, and two per timestep behind the last.
    timesteps = 2 * clip.steps - 1
    modulation = timesteps * (model.num_layers * 3 * 6 + 2) * model.hidden
    return MemoryBudget(
        kv_device=0,
        kv_host=0,
        kv_host_steady=0,
        kv_merged=0,
        activations=max(attention, feed_forward) * model.compute_bytes,
        modulation=modulation * model.compute_bytes,
        adapter_temporaries=ADAPTER_TEMPORARY_BYTES,
        latent_buffers=LATENT_BYTES * DENSE_BUFFERS * _clip_elements(clip),
        decode=decode_bytes,
    )


def _latent_buffer_bytes(clip: ClipValues) -> int:
    longest_audio = max(chunk.num_audio_latents for chunk in chunk_table(clip.num_frames))
    one_chunk = _latent_elements(clip, LATENTS_PER_CHUNK, longest_audio)
    return LATENT_BYTES * (CLIP_LONG_BUFFERS * _clip_elements(clip) + CHUNK_LONG_BUFFERS * one_chunk)


def _clip_elements(clip: ClipValues) -> int:
    return _latent_elements(clip, num_video_latents(clip.num_frames), num_audio_latents(clip.num_frames))


def _latent_elements(clip: ClipValues, video_latents: int, audio_latents: int) -> int:
    video = video_latents * VIDEO_LATENT_CHANNELS * latent_size(clip.height) * latent_size(clip.width)
    return video + audio_latents * AUDIO_LATENT_CHANNELS * AUDIO_CHANNELS
