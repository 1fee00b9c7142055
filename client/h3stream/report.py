"""Plans and errors in words, for people who use the command."""

from __future__ import annotations

import sys

from h3stream.errors import GenerationError, InvalidRequestError, OverloadedError
from h3stream.events import Plan


def plan_table(plan: Plan) -> list[str]:
    """A plan in lines: what is made, then a row for each chunk, then the warnings."""
    clip = plan.clip
    window = "all chunks" if clip.window is None else f"window {clip.window}"
    rows = [
        f"{index:5}{f'{chunk.video_start}:{chunk.video_stop}':>15}{f'{chunk.audio_start}:{chunk.audio_stop}':>15}"
        f"{chunk.num_frames_emitted:>12}"
        for index, chunk in enumerate(plan.chunks)
    ]
    return [
        f"{clip.num_frames} frames of {clip.width}x{clip.height}, {clip.num_frames / 24:.2f} s, "
        f"{plan.num_samples} samples, about {plan.expected_stream_bytes} bytes",
        f"{clip.steps} steps, shifts {clip.video_shift:g} and {clip.audio_shift:g}, sink {clip.sink}, {window}, "
        f"KV on {clip.kv_storage}, seed {clip.seed}",
        f"{plan.num_noise_forwards} noise forwards, {plan.num_clean_forwards} clean forwards",
        "",
        "chunk  video latents  audio latents  frames out",
        *rows,
        *(f"warning: {warning.message}" for warning in plan.warnings),
    ]


def describe_error(error: GenerationError) -> str:
    """An error as one block: every violation of a bad request, else the reason and where it happened."""
    if isinstance(error, InvalidRequestError) and error.violations:
        lines = [f"  {violation.description}" for violation in error.violations]
        return "\n".join(["h3stream: the request is not valid", *lines])
    text = f"h3stream: {error.reason}: {error.message}"
    facts = [f"job {error.job_id}"] if error.job_id else []
    facts += [f"phase {error.phase}"] if error.phase else []
    facts += [f"chunk {error.chunk_index}"] if error.chunk_index >= 0 else []
    facts += [f"try again in {error.retry_after_s:g} s"] if isinstance(error, OverloadedError) else []
    return "\n".join([text, *([f"  {', '.join(facts)}"] if facts else [])])


def say(text: str) -> None:
    """Tells the user something that is no result."""
    print(text, file=sys.stderr, flush=True)
