"""Plans and errors in words, for people who use the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from h3stream.errors import GenerationError, InvalidRequestError, OverloadedError
from h3stream.events import Plan
from h3stream.job import AdapterInfo, Job
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec

MAX_SHOWN_PROMPT = 60
"""Characters of a prompt in a table."""


def plan_table(plan: Plan) -> list[str]:
    """A plan in lines: what is made, then a row for each chunk, then the warnings."""
    clip = plan.clip
    lines = [
        f"{clip.num_frames} frames of {clip.width}x{clip.height}, {clip.num_frames / 24:.2f} s, "
        f"{plan.num_samples} samples, about {plan.expected_stream_bytes} bytes",
        f"{clip.steps} steps, shifts {clip.video_shift:g} and {clip.audio_shift:g}, {_attention(clip)}, "
        f"seed {clip.seed}",
    ]
    if clip.adapters:
        lines.append("adapters " + ", ".join(f"{use.name} at {use.strength:g}" for use in clip.adapters))
    if plan.refine_audio is not None:
        lines.append(f"sound refined in {_refinement(plan.refine_audio)}")
    return [
        *lines,
        f"{plan.num_noise_forwards} noise forwards, {plan.num_clean_forwards} clean forwards",
        "",
        "chunk  video latents  audio latents  frames out",
        *(
            f"{index:5}{f'{chunk.video_start}:{chunk.video_stop}':>15}{f'{chunk.audio_start}:{chunk.audio_stop}':>15}"
            f"{chunk.num_frames_emitted:>12}"
            for index, chunk in enumerate(plan.chunks)
        ),
        *(f"warning: {warning.message}" for warning in plan.warnings),
    ]


def adapter_table(adapters: tuple[AdapterInfo, ...]) -> list[str]:
    """The adapters of a server in lines, a heading first; "none" if there are none."""
    if not adapters:
        return ["none"]
    heading = ("name", "strength", "format", "rank", "modules", "trained for", "file")
    return _columns([heading, *(_adapter_row(adapter) for adapter in adapters)])


def job_table(jobs: Sequence[Job], *, with_tenants: bool) -> list[str]:
    """Jobs in lines, a heading first; "none" if there are none."""
    if not jobs:
        return ["none"]
    heading = ("job", *(["tenant"] * with_tenants), "state", "created", "frames", "prompt")
    return _columns([heading, *(_job_row(job, with_tenants) for job in jobs)])


def artifact_table(job: Job) -> list[str]:
    """The artifacts of a job in lines, a heading first, or "none"; then those that have been removed."""
    rows = [("name", "bytes", "sha256"), *((a.name, str(a.size_bytes), a.sha256) for a in job.artifacts)]
    table = _columns(rows) if job.artifacts else ["none"]
    gone = [f"{removed.name} has been removed: {removed.message}" for removed in job.removed_artifacts]
    return table + gone


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


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _job_row(job: Job, with_tenant: bool) -> tuple[str, ...]:
    state = f"queued, {job.queue_position} ahead" if job.state == "queued" else job.state
    created = f"{job.create_time.astimezone():%Y-%m-%d %H:%M:%S}"
    prompt = "".join(character if character.isprintable() else " " for character in job.prompt)  # no control codes
    return (
        job.job_id,
        *([job.tenant] * with_tenant),
        state,
        created,
        f"{job.num_frames_emitted}/{job.plan.clip.num_frames}",
        prompt if len(prompt) <= MAX_SHOWN_PROMPT else prompt[: MAX_SHOWN_PROMPT - 1] + "…",
    )


def _attention(clip: ClipSpec) -> str:
    """What a clip's rows see of each other, in words."""
    if clip.mode == "dense":
        return "dense"
    window = "all chunks" if clip.window is None else f"window {clip.window}"
    return f"sink {clip.sink}, {window}, KV on {clip.kv_storage}"


def _refinement(spec: RefineSpec) -> str:
    """How a sound is refined, in words."""
    cache = f"cache of {spec.cache.contents} in {spec.cache.precision}" if spec.cache.enabled else "no cache"
    return (
        f"{spec.steps} steps from {spec.audio_denoise:g}, {spec.sampler}, {spec.scheduler}, cfg {spec.cfg:g}, {cache}"
    )


def _adapter_row(adapter: AdapterInfo) -> tuple[str, ...]:
    """One adapter's row; what is not known until the model has been loaded is a dash."""
    ranks = str(adapter.min_rank) if adapter.min_rank == adapter.max_rank else f"{adapter.min_rank}-{adapter.max_rank}"
    modules = f"{adapter.num_bound_modules}/{adapter.num_modules}"
    trained = {
        "steps": adapter.trained_steps,
        "video shift": adapter.trained_video_shift,
        "audio shift": adapter.trained_audio_shift,
    }
    schedule = [f"{name} {value:g}" for name, value in trained.items() if value is not None]
    return (
        adapter.name,
        f"{adapter.default_strength:g}",
        adapter.format,
        ranks if adapter.max_rank else "-",
        modules if adapter.num_bound_modules else "-",
        ", ".join([*(["streaming"] * adapter.is_streaming), *schedule]) or "-",
        adapter.file_name or "-",
    )
