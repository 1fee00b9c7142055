"""Frames, latents, chunks and row positions of a clip: the arithmetic that everything else agrees on.

Shapes. Letters: `T` video latents, `A` audio latents, `F` frames, `S` samples, `H W` latent height and width, `N` rows
of a chunk, `P` retained rows, `E` text tokens, `h d` heads and head dim.

    video latent    [1, 24, T, H, W]     float32   T = 5k + 2, H = height / 16, W = width / 16
    audio latent    [1, 32, 2, A]        float32   two stereo rows, 40 latents a second, 800 samples each
    rows of a chunk [N, hidden]          compute   audio first (left, then right), then video (latent, row, column)
    rows of a clip  [E + N, hidden]      compute   dense mode: text, then audio and video of the whole clip
    one layer's K   [rows, h, d]         compute   after the per-head norm and rotation; V alike, as projected
    frames          [F, height, width, 3] uint8    24 a second
    samples         [2, S]               float32   32 kHz stereo, S = 800 A

Source: docs/reference/raven-streaming.md §1-§3 (RAVEN streaming 0.1.0, commit bcfa3813); MiniMax H3 published configs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FPS = 24
SAMPLE_RATE = 32_000
AUDIO_LATENTS_PER_SECOND = 40
SAMPLES_PER_AUDIO_LATENT = SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND  # 800
AUDIO_CHANNELS = 2

VIDEO_LATENT_CHANNELS = 24
AUDIO_LATENT_CHANNELS = 32
SPATIAL_COMPRESSION = 16
PATCH = 2
CANVAS_MULTIPLE = SPATIAL_COMPRESSION * PATCH  # 32: a row covers 2 x 2 latents of 16 x 16 pixels

FRAMES_PER_CHUNK = 17
LATENTS_PER_CHUNK = 5
TAIL_FRAMES = 5
"""Frames that the tail chunk adds to 17k; they are the overlap frames of the last decode."""
TAIL_LATENTS = 2
"""Video latents of the tail chunk; they are the lookahead of the last decode."""

MIN_CHUNKS = 1
MAX_CHUNKS = 21
MIN_FRAMES = FRAMES_PER_CHUNK * MIN_CHUNKS + TAIL_FRAMES  # 22
MAX_FRAMES = FRAMES_PER_CHUNK * MAX_CHUNKS + TAIL_FRAMES  # 362
AUDITED_FRAMES = 192
"""Longest clip within the range that the RAVEN adapter was audited for."""
MAX_CANVAS_PIXELS = 1376 * 768

UNITS_PER_CHUNK = 85.0 / 3.0
"""Rotary time of five latents (17 frames); one unit is one audio latent, 1/40 s."""
UNITS_PER_FRAME = 5.0 / 3.0
FRAMES_BEFORE_LATENT = (0, 1, 5, 9, 13)
"""Frames of a chunk that lie before its n-th latent: latents stand for 1, 4, 4, 4, 4 frames."""


@dataclass(frozen=True)
class Chunk:
    """One unit of the rollout. Ranges are half-open."""

    index: int
    """Position in the clip, from 0."""
    is_tail: bool
    """Whether it is the last chunk, of two video latents."""
    video_start: int
    """First video latent."""
    video_stop: int
    """End of the video latents."""
    audio_start: int
    """First audio latent."""
    audio_stop: int
    """End of the audio latents."""

    @property
    def num_video_latents(self) -> int:
        """Video latents of the chunk."""
        return self.video_stop - self.video_start

    @property
    def num_audio_latents(self) -> int:
        """Audio latents of the chunk, of each channel."""
        return self.audio_stop - self.audio_start


def full_chunks(num_frames: int) -> int:
    """k of a clip of 17k + 5 frames: its chunks, the tail not counted."""
    k, rest = divmod(num_frames - TAIL_FRAMES, FRAMES_PER_CHUNK)
    if rest or not MIN_CHUNKS <= k <= MAX_CHUNKS:
        raise ValueError(f"{num_frames} frames are not 17k + 5 with k from {MIN_CHUNKS} to {MAX_CHUNKS}")
    return k


def valid_frame_counts() -> tuple[int, ...]:
    """All 21 frame counts a clip can have, ascending."""
    return tuple(FRAMES_PER_CHUNK * k + TAIL_FRAMES for k in range(MIN_CHUNKS, MAX_CHUNKS + 1))


def num_video_latents(num_frames: int) -> int:
    """T of a clip."""
    return LATENTS_PER_CHUNK * full_chunks(num_frames) + TAIL_LATENTS


def num_audio_latents(num_frames: int) -> int:
    """A of a clip: `round(num_frames / 24 * 40)`; a tie cannot occur on the frame grid."""
    full_chunks(num_frames)
    return (num_frames * 10 + 3) // 6


def num_samples(num_frames: int) -> int:
    """S of a clip: samples of each audio channel."""
    return num_audio_latents(num_frames) * SAMPLES_PER_AUDIO_LATENT


def latent_size(pixels: int) -> int:
    """Latent height or width of a canvas side."""
    return pixels // SPATIAL_COMPRESSION


def video_latent_time(index: int, origin: int = 0) -> float:
    """Rotary time of a video latent, in units of 1/40 s from the first text row when `origin` is the text length.

    The order of operations is fixed: positions are compared in float64 with the dense model's.
    """
    group, place = divmod(index, LATENTS_PER_CHUNK)
    return origin + group * UNITS_PER_CHUNK + UNITS_PER_FRAME * FRAMES_BEFORE_LATENT[place]


def chunk_table(num_frames: int) -> tuple[Chunk, ...]:
    """The k + 1 chunks of a clip.

    An audio latent belongs to the chunk in whose time it starts; one that starts exactly on a boundary belongs to the
    later chunk. So chunk c starts at audio latent ceil(85 c / 3), and the tail ends with the clip.
    """
    k = full_chunks(num_frames)
    last_audio = num_audio_latents(num_frames)
    chunks = []
    for c in range(k + 1):
        is_tail = c == k
        video_start = LATENTS_PER_CHUNK * c
        chunks.append(
            Chunk(
                index=c,
                is_tail=is_tail,
                video_start=video_start,
                video_stop=video_start + (TAIL_LATENTS if is_tail else LATENTS_PER_CHUNK),
                audio_start=-(-85 * c // 3),
                audio_stop=last_audio if is_tail else -(-85 * (c + 1) // 3),
            )
        )
    return tuple(chunks)


def chunk_latent_shapes(chunk: Chunk, width: int, height: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a chunk's latents by their names: "video" `[1, 24, T, H, W]` and "audio" `[1, 32, 2, A]`."""
    return {
        "video": (1, VIDEO_LATENT_CHANNELS, chunk.num_video_latents, latent_size(height), latent_size(width)),
        "audio": (1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, chunk.num_audio_latents),
    }


def spatial_axis(size: int, latent_height: int, latent_width: int) -> list[float]:
    """Rotary coordinates of the `size / 2` patches along one side, where `size` is the latent height or width.

    Area-normalised to 32, the end not included. The order of operations is fixed, as in `video_latent_time`.
    """
    area = math.sqrt(latent_height * latent_width)
    ratio = size / area
    count = size // PATCH
    return [(i * (ratio / count) + (1 - ratio) / 2) * 32 for i in range(count)]


def text_positions(num_tokens: int) -> list[tuple[float, float, float]]:
    """(t, h, w) of every text row."""
    return [(float(i), 0.0, 0.0) for i in range(num_tokens)]


def chunk_positions(
    chunk: Chunk, num_tokens: int, latent_height: int, latent_width: int
) -> list[tuple[float, float, float]]:
    """(t, h, w) of every row of a chunk, in row order: audio left, audio right, video. `[N]` triples of float64."""
    return _media_positions(
        range(chunk.video_start, chunk.video_stop),
        range(chunk.audio_start, chunk.audio_stop),
        num_tokens,
        latent_height,
        latent_width,
    )


def dense_positions(
    num_frames: int, num_tokens: int, latent_height: int, latent_width: int
) -> list[tuple[float, float, float]]:
    """(t, h, w) of every row of a clip sampled at once, in row order: text, audio left, audio right, video.

    A media row lies where its chunk's row would. Times of video latents differ from a running sum over the latents by
    1e-12 at most; in float32, which is what the rotary angles are computed from, they are equal.
    Source: docs/reference/h3-model.md §2.5, §8.
    """
    return text_positions(num_tokens) + _media_positions(
        range(num_video_latents(num_frames)),
        range(num_audio_latents(num_frames)),
        num_tokens,
        latent_height,
        latent_width,
    )


def _media_positions(
    video: range, audio: range, num_tokens: int, latent_height: int, latent_width: int
) -> list[tuple[float, float, float]]:
    h_axis = spatial_axis(latent_height, latent_height, latent_width)
    w_axis = spatial_axis(latent_width, latent_height, latent_width)
    positions = [(float(num_tokens + j), 0.0, w) for w in (w_axis[0], w_axis[-1]) for j in audio]
    for n in video:
        t = video_latent_time(n, num_tokens)
        positions.extend((t, h, w) for h in h_axis for w in w_axis)
    return positions


def rows_per_video_latent(width: int, height: int) -> int:
    """Rows of one video latent on a canvas."""
    return (width // CANVAS_MULTIPLE) * (height // CANVAS_MULTIPLE)


def num_audio_rows(chunk: Chunk) -> int:
    """Audio rows of a chunk; they come before its video rows."""
    return AUDIO_CHANNELS * chunk.num_audio_latents


def num_rows(chunk: Chunk, width: int, height: int) -> int:
    """N: rows of a chunk, audio and video."""
    return num_audio_rows(chunk) + chunk.num_video_latents * rows_per_video_latent(width, height)


def num_clip_rows(num_frames: int, width: int, height: int) -> int:
    """Audio and video rows of a whole clip; in dense mode they follow the text rows."""
    return AUDIO_CHANNELS * num_audio_latents(num_frames) + num_video_latents(num_frames) * rows_per_video_latent(
        width, height
    )
