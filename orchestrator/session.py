"""One job on one lane, as a coroutine that reads as the phases in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from core.artifacts import FINAL, LATENTS, WORKER_ARTIFACTS
from core.geometry import num_samples
from core.phases import Phase
from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2
from h3stream.v1.types_pb2 import KvStorage
from orchestrator.job import Job, as_told
from orchestrator.lane import Lane
from orchestrator.output import Output, audio_warnings, delivery_warnings, enter
from orchestrator.provenance import Record, RefineReport, write_record
from orchestrator.refine import ClipFiles, refine
from orchestrator.worker_clients import Stills, TensorParts

log = logging.getLogger(__name__)


async def run_session(job: Job, lane: Lane, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Makes the job's clip, emitting its events as things happen.

    Frees nothing: the scheduler clears the lane whatever happens here. Raises a GenerationError where a phase fails.
    """
    output = Output(job, lane, clock)

    embedding = await lane.text_encoder.lookup(job.prompt)
    if embedding is None:
        await enter(job, lane, Phase.ENCODE)
        embedding = await lane.text_encoder.encode(job.prompt)

    await enter(job, lane, Phase.PREFILL)
    stills = await _stills(job, lane)
    opened = await lane.dit.open_session(job.job_id, job.clip, embedding, stills)
    if opened.preview_unavailable_reason:
        job.emit(video_pb2.Warning(reason="PREVIEW_UNAVAILABLE", message=opened.preview_unavailable_reason))
    if opened.kv_storage_fallback_reason:
        job.emit(video_pb2.Warning(reason="KV_STORAGE_FALLBACK", message=opened.kv_storage_fallback_reason))
    artifacts = [name for name in job.plan.artifacts if name in WORKER_ARTIFACTS]
    if failure := await lane.vae.open_session(job.job_id, job.clip, str(job.directory), artifacts):
        output.stream_failed(failure)

    if job.clip.mode == "dense":
        await _make_at_once(job, lane, output)
    else:
        await _make_chunk_by_chunk(job, lane, output)
    if stills is not None and not opened.preview_unavailable_reason and not output.is_shown:
        message = "stills of this clip could not be made any more; the server's log says why"
        job.emit(video_pb2.Warning(reason="PREVIEW_UNAVAILABLE", message=message))

    if job.num_frames_emitted == job.clip.num_frames:
        job.emit(
            video_pb2.StreamComplete(
                num_fragments=output.num_fragments,
                num_bytes=output.num_bytes,
                num_frames=job.num_frames_emitted,
                num_samples=num_samples(job.clip.num_frames),
            )
        )
    await enter(job, lane, Phase.FINISH)
    finished = await lane.vae.finish(job.job_id)
    for artifact in finished.artifacts:
        job.keep(artifact)
    for warning in [*delivery_warnings(finished), *audio_warnings(finished.audio_health)]:
        job.emit(warning)
    completed = video_pb2.Completed(
        latents_sha256=output.latents_hash.hexdigest(), audio_health=finished.audio_health, timings=output.timings()
    )
    record = Record("" if job.clip.mode == "dense" else KvStorage.Name(opened.kv_storage))
    await write_record(job, await lane.describe_those_that_answer(), completed, record)
    if job.plan.HasField("refine_audio"):
        record.refinement = await _refine_the_rest(job, lane, embedding, clock)
        completed.timings.CopyFrom(output.timings())
        await write_record(job, await lane.describe_those_that_answer(), completed, record)
    completed.artifacts.extend(job.artifacts)
    job.emit(completed)


async def _refine_the_rest(job: Job, lane: Lane, embedding: TensorParts, clock: Callable[[], float]) -> RefineReport:
    """Refines the sound of the clip that has just been delivered, which stays as it is whatever comes of it."""
    report = RefineReport()
    try:
        # Its KV cache and its decoders are of no more use: the room is the refinement's.
        await lane.dit.close_session(job.job_id)
        await lane.vae.close_session(job.job_id)
        names = {artifact.name for artifact in job.artifacts}
        video = job.directory / FINAL if FINAL in names else None
        if LATENTS not in names:
            raise PhaseError(f"there is no {LATENTS} to refine")
        files = ClipFiles(job.directory / LATENTS, video)
        output = Output(job, lane, clock, is_refined=True)
        await refine(job, lane, files, output, report, {job.prompt: embedding})
    except Exception as failure:  # whatever it is, there is a clip
        error = as_told(failure, job.job_id)
        log.warning("the sound of job %s is not refined: %s: %s", job.job_id, error.reason, error)
        report.failure = types_pb2.RefineFailed(reason=error.reason, message=error.message)
        job.emit(report.failure)
    return report


async def _stills(job: Job, lane: Lane) -> Stills | None:
    """The stills to make on the way; None where none are wanted, or none can be, which is told."""
    if not job.plan.preview.max_side:
        return None
    vae = await lane.vae.describe()
    if not vae.HasField("preview_map"):
        message = "there will be no stills: the VAE worker could not make their map when it started"
        job.emit(video_pb2.Warning(reason="PREVIEW_UNAVAILABLE", message=message))
        return None
    return Stills(job.plan.preview, vae.preview_map)


async def _make_chunk_by_chunk(job: Job, lane: Lane, output: Output) -> None:
    """Samples, decodes and commits the chunks in turn, so that fragments leave while later chunks are sampled."""
    last = len(job.plan.chunks) - 1
    waiting: list[tuple[int, TensorParts]] = []
    for chunk_index, chunk in enumerate(job.plan.chunks):
        await enter(job, lane, Phase.DENOISE, chunk_index)
        waiting.append((chunk_index, await _chunk_latents(job, lane, output, chunk_index)))
        if chunk_index == last:
            output.sampling_ended()

        # A chunk is delivered before its clean forward: nobody waits for a commit. Chunk 0 completes no frame, so the
        # device is not handed over for it alone: it is decoded together with chunk 1, and the first fragment leaves
        # two hand-overs earlier.
        if chunk.num_frames_emitted > job.num_frames_emitted:
            for decode_index, latents in waiting:
                await output.decode(decode_index, latents)
            waiting.clear()

        if chunk_index < last:
            await enter(job, lane, Phase.COMMIT, chunk_index)
            await lane.dit.commit_chunk(job.job_id, chunk_index)


async def _make_at_once(job: Job, lane: Lane, output: Output) -> None:
    """Samples the whole clip, then decodes it chunk by chunk, as its latents come from the DiT worker's memory."""
    await enter(job, lane, Phase.DENOISE)
    async for result in lane.dit.sample_dense(job.job_id):
        output.sampled(result)
    output.sampling_ended()
    for chunk_index in range(len(job.plan.chunks)):
        await output.decode(chunk_index, await _chunk_latents(job, lane, output, chunk_index))


async def _chunk_latents(job: Job, lane: Lane, output: Output, chunk_index: int) -> TensorParts:
    """The latents of a chunk, its steps announced if it has yet to be sampled."""
    latents: TensorParts = ()
    async for result in lane.dit.sample_chunk(job.job_id, chunk_index):
        if isinstance(result, tuple):
            latents = result
        else:
            output.sampled(result)
    return latents
