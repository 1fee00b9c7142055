"""From a request that goes on from another job to a job: what it has of the other, with the other's chunks.

What is prepared here is what a job has that was lost behind the last of those chunks, so a session takes it up as it
takes up any. The other job is only read.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.artifacts import LATENTS
from core.geometry import chunk_table
from core.request import Violation, integer_violations, prompt_violations
from h3stream.errors import ArtifactNotFoundError, GenerationError, UnsupportedError
from h3stream.request import Branch, ClipSpec, GenerateRequest
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from orchestrator.admission import AdapterFacts, option_violations
from orchestrator.chunk_store import ChunkStore
from orchestrator.download import find_artifact
from orchestrator.job import Job
from orchestrator.latents import read_latents, to_its_end
from orchestrator.replay import Replay
from orchestrator.staging import take_over
from services.common.files import remove
from services.common.refusal import refuse

CLIP_FIELDS = ("prompt", *(field.name for field in dataclasses.fields(ClipSpec)))
"""Fields of a request that decide its clip."""
SOURCE_LATENTS = ".source.safetensors"
"""File of a source's latents while they are cut into chunks."""
EVENTS_AT_ONCE = 64
"""Events of a source that are read between two turns of the event loop."""

Media = types_pb2.InitSegment | types_pb2.Fragment


@dataclass(frozen=True)
class BranchedClip:
    """The clip of a branch, checked."""

    prompt: str
    """From its first new chunk on."""
    clip: ClipSpec
    """Its seed is the one that holds at its end."""
    branch: video_pb2.Branch
    """What it goes on from, prompt and seed filled in."""
    noise: tuple[workers_pb2.NoiseSegment, ...]
    """Seeds of its noise; empty where its own seed holds throughout."""


def resolve_branch(request: GenerateRequest, source: Job, adapters: Sequence[AdapterFacts]) -> BranchedClip:
    """The checked clip of a request that goes on from a job.

    adapters: the registry.  Raises InvalidRequestError with every violation, UnsupportedError for chunks that are not
    finished yet or adapters that are no longer there, ArtifactNotFoundError where the latents are gone.
    """
    branch = request.branch
    assert branch is not None
    refuse(_source_violations(source))
    if source.ended.is_set():
        _latents_of(source)  # told first: where they are gone, nothing that is asked for would do
    prompt = source.prompt if branch.prompt is None else branch.prompt
    registry = {adapter.name: adapter for adapter in adapters}
    refuse(
        [
            *_clip_violations(request),
            *integer_violations("branch.from_chunk", branch.from_chunk, 1, len(source.plan.chunks) - 1),
            *_prompt_violations(prompt),
            *option_violations(request, source.clip, registry),
        ]
    )
    if missing := [use.name for use in source.clip.adapters if use.name not in registry]:
        names = f"this server has {', '.join(sorted(registry))}" if registry else "this server has no adapters"
        raise UnsupportedError(f"job {source.job_id} was made with the adapter {' and '.join(missing)}; {names}")
    if not source.ended.is_set():
        _check_finished(source, branch.from_chunk)
    segments = _segments(source, branch)
    return BranchedClip(
        prompt,
        dataclasses.replace(source.clip, seed=segments[-1].seed),
        video_pb2.Branch(
            job_id=source.job_id,
            from_chunk=branch.from_chunk,
            prompt=prompt,
            seed=_seed_at(segments, branch.from_chunk),
        ),
        () if len(segments) == 1 else tuple(segments),
    )


async def prepare(source: Job, from_chunk: int, directory: Path) -> list[Media]:
    """Puts the source's chunks before a boundary into a directory that becomes a job's; returns their media, as far as
    they have been sent.

    Raises ArtifactNotFoundError if the latents are not what they were, PhaseError if they cannot be read or written.
    """
    taken, own = ChunkStore(source.directory), ChunkStore(directory)
    for index in range(from_chunk):
        parts = await asyncio.to_thread(taken.get, index)
        if parts is None:  # the job has ended, also while this was going on
            await _cut_out(source, range(index, from_chunk), directory)
            break
        await to_its_end(own.put, index, parts)
    return await _media_before(source, from_chunk)


def _source_violations(source: Job) -> Iterator[Violation]:
    if source.source is not None:
        clip = f" of job {source.source.job_id}" if source.source.job_id else ""
        found = f"branch.job_id is {source.job_id}, which refines the sound{clip}"
        yield Violation("branch.job_id", f"{found}; it must be a job that makes a clip", "NOT_STREAMED")
    elif source.clip.mode != "streaming":
        description = (
            f"branch.job_id is {source.job_id}, whose clip is {source.clip.mode} and has no chunk boundary to go on "
            "from; it must be a job that streams its clip"
        )
        yield Violation("branch.job_id", description, "NOT_STREAMED")


def _clip_violations(request: GenerateRequest) -> Iterator[Violation]:
    for name in CLIP_FIELDS:
        if (value := getattr(request, name)) not in (None, "", ()):
            place = f"; branch.{name} is its place" if name in ("prompt", "seed") else ""
            description = f"{name} is {value!r:.80}; a branch has its source's, so it must be left out{place}"
            yield Violation(name, description, "NOT_IN_BRANCH")


def _prompt_violations(prompt: str) -> Iterator[Violation]:
    for violation in prompt_violations(prompt):
        yield Violation("branch.prompt", f"branch.prompt: {violation.description}", violation.reason)


def _check_finished(source: Job, from_chunk: int) -> None:
    """Raises UnsupportedError unless every chunk before a boundary is finished."""
    num_finished = ChunkStore(source.directory).num_finished
    if num_finished < from_chunk:
        allowed = f"from_chunk can be from 1 to {num_finished} now" if num_finished else "none can be gone on from yet"
        raise UnsupportedError(f"job {source.job_id} has finished {num_finished} of its chunks; {allowed}")


def _latents_of(source: Job) -> types_pb2.Artifact:
    """The latents of a job that has ended. Raises ArtifactNotFoundError if it has none."""
    try:
        return find_artifact(source, LATENTS, offset_bytes=0)
    except GenerationError as error:
        raise ArtifactNotFoundError(f"there is nothing to go on from: {error.message}") from error


def _segments(source: Job, branch: Branch) -> list[workers_pb2.NoiseSegment]:
    """Seeds of a branch's noise, each from a chunk on, no two equal ones in a row."""
    segments = list(source.noise) or [workers_pb2.NoiseSegment(seed=source.clip.seed)]
    if branch.seed is None:
        return segments
    kept = [segment for segment in segments if segment.first_chunk < branch.from_chunk]
    if kept[-1].seed != branch.seed:
        kept.append(workers_pb2.NoiseSegment(first_chunk=branch.from_chunk, seed=branch.seed))
    return kept


def _seed_at(segments: Sequence[workers_pb2.NoiseSegment], chunk_index: int) -> int:
    return [segment.seed for segment in segments if segment.first_chunk <= chunk_index][-1]


async def _cut_out(source: Job, indices: range, directory: Path) -> None:
    """Stores chunks of a job that has ended, from the file of its latents."""
    path = directory / SOURCE_LATENTS
    await take_over(source, _latents_of(source), path)
    try:
        file = read_latents(path, source.clip)
    except ValueError as error:
        raise ArtifactNotFoundError(f"{LATENTS} of job {source.job_id} {error}") from error
    store, chunks = ChunkStore(directory), chunk_table(source.clip.num_frames)
    for index in indices:
        await to_its_end(store.put, index, await file.latents.chunk(chunks[index]))
    remove(path)


async def _media_before(source: Job, from_chunk: int) -> list[Media]:
    """The media that a job has sent of the chunks before a boundary. Raises PhaseError if they cannot be read."""
    replay, media = Replay(), list[Media]()
    num_events = len(source.log)
    try:
        for seq in range(0, num_events, EVENTS_AT_ONCE):
            replay.advance(source.log.path, min(seq + EVENTS_AT_ONCE, num_events))
            await asyncio.sleep(0)
        replay.end(None)
        async for record in replay.read():
            event = video_pb2.AttachResponse.FromString(record).event
            if event.HasField("init_segment"):
                media.append(event.init_segment)
            elif event.HasField("fragment"):
                if event.fragment.chunk_index >= from_chunk:
                    break
                media.append(event.fragment)
    finally:
        replay.close()
    return media
