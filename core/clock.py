"""One integer time base for frames and samples, and when each may leave.

96000 ticks a second is the least common multiple of 24 and 32000: a frame is 4000 ticks, a sample 3. No floats
anywhere.
Source: docs/reference/raven-streaming.md §10-§12.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.geometry import (
    FPS,
    FRAMES_PER_CHUNK,
    SAMPLE_RATE,
    SAMPLES_PER_AUDIO_LATENT,
    TAIL_FRAMES,
    Chunk,
    chunk_table,
    num_audio_latents,
    num_samples,
)

TICKS_PER_SECOND = 96_000
TICKS_PER_FRAME = TICKS_PER_SECOND // FPS
TICKS_PER_SAMPLE = TICKS_PER_SECOND // SAMPLE_RATE

AUDIO_MARGIN_LATENTS = 17
"""Audio latents needed on each side of a decoded range: the receptive field of the audio decoder.

Measured on the real weights as the smallest with an error below 2.5e-6 against a whole-clip decode.
"""


@dataclass(frozen=True)
class AudioWindow:
    """One windowed audio decode. Latent indices are the clip's; sample counts are per channel."""

    decode_start: int
    """First latent decoded."""
    decode_stop: int
    """End of the latents decoded."""
    keep_start: int
    """First latent whose samples are kept."""
    keep_stop: int
    """End of the latents whose samples are kept."""

    @property
    def skip_samples(self) -> int:
        """Samples to drop before those kept."""
        return (self.keep_start - self.decode_start) * SAMPLES_PER_AUDIO_LATENT

    @property
    def num_samples(self) -> int:
        """Samples kept."""
        return (self.keep_stop - self.keep_start) * SAMPLES_PER_AUDIO_LATENT


def audio_window(keep_start: int, keep_stop: int, total: int, margin: int = AUDIO_MARGIN_LATENTS) -> AudioWindow:
    """The decode that yields latents `[keep_start, keep_stop)` of a clip of `total` audio latents exactly.

    At the true edges of the clip no context is dropped or invented.
    """
    return AudioWindow(max(0, keep_start - margin), min(total, keep_stop + margin), keep_start, keep_stop)


def final_audio_latents(available: int, total: int, margin: int = AUDIO_MARGIN_LATENTS) -> int:
    """Audio latents whose samples are final once `available` of `total` have been sampled."""
    return total if available == total else max(0, available - margin)


def decoded_frames(chunk: Chunk) -> int:
    """Frames that are final once the chunk is decoded: a window needs two latents of the next chunk."""
    # The tail also releases the overlap frames of the last decode: nothing follows to blend them with.
    return FRAMES_PER_CHUNK * chunk.index + (TAIL_FRAMES if chunk.is_tail else 0)


def samples_for_frames(num_frames: int) -> int:
    """Whole samples that play within the first `num_frames` frames."""
    return 4000 * num_frames // 3


def muxable_frames(frames_decoded: int, samples_decoded: int, *, is_final: bool) -> int:
    """Frames that may be written: sound must be there up to a frame's end, unless nothing more will come."""
    if is_final:
        return frames_decoded
    with_sound = (3 * samples_decoded + 2) // 4000  # the largest n with samples_for_frames(n) <= samples_decoded
    return min(frames_decoded, with_sound)


def emission_table(num_frames: int, margin: int = AUDIO_MARGIN_LATENTS) -> tuple[int, ...]:
    """Frames that have left once each chunk is decoded, when audio is decoded as early as the margin allows."""
    total = num_audio_latents(num_frames)
    emitted = []
    for chunk in chunk_table(num_frames):
        samples = final_audio_latents(chunk.audio_stop, total, margin) * SAMPLES_PER_AUDIO_LATENT
        assert samples <= num_samples(num_frames)
        emitted.append(muxable_frames(decoded_frames(chunk), samples, is_final=chunk.is_tail))
    return tuple(emitted)
