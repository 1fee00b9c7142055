"""One job on one lane, as a coroutine that reads as the phases in order and goes on from wherever the job stands."""

from __future__ import annotations

import logging

from core.artifacts import FINAL, LATENTS, WORKER_ARTIFACTS
from core.geometry import num_samples
from core.phases import Phase
from h3stream.errors import PhaseError, ResumeError, WorkerLostError
from h3stream.v1 import types_pb2, video_pb2
from h3stream.v1.types_pb2 import KvStorage
from orchestrator.chunk_store import ChunkStore
from orchestrator.clip_record import read_clip, write_clip
from orchestrator.dit_session import DitSession
from orchestrator.job import Job, as_told
from orchestrator.lane import Lane
from orchestrator.latents import to_its_end
from orchestrator.output import Output, audio_warnings, delivery_warnings, enter, running_s
from orchestrator.provenance import Record, RefineReport, write_record
from orchestrator.refine import ClipFiles, refine
from orchestrator.worker_clients import TensorParts

log = logging.getLogger(__name__)


async def run_session(job: Job, lane: Lane) -> None:
    """Makes the job's clip, emitting its events as things happen.

    What an earlier run of the job has left is taken as it is: finished chunks are not sampled again, chunks that are
    still decoded at the VAE worker not decoded, media that were delivered not sent, a clip that is whole not made.
    Frees nothing: the scheduler clears the lane whatever happens here. Raises a GenerationError where a phase fails,
    WorkerLostError if the job can be run again.
    """
    store = ChunkStore(job.directory)
    output = Output(job, lane)
    dit = DitSession(job, lane, output, store)
    completed = await to_its_end(read_clip, job)
    if completed is None:
        completed = await _make_clip(job, lane, output, dit, store)
    if job.plan.HasField("refine_audio"):
        report = await _refine_the_rest(job, lane, {} if dit.embedding is None else {job.prompt: dit.embedding})
        await _record_refinement(job, lane, completed, report)
    job.emit(completed)


async def give_up_refinement(job: Job, lane: Lane, error: WorkerLostError) -> None:
    """Ends a job whose clip is whole without the refinement of its sound.

    error: why. Raises ResumeError if the clip is not known any more.
    """
    completed = await to_its_end(read_clip, job)
    if completed is None:
        raise ResumeError("what was written down of the clip is damaged")
    await _record_refinement(job, lane, completed, RefineReport(failure=_refine_failed(job, error)))
    job.emit(completed)


async def _make_clip(job: Job, lane: Lane, output: Output, dit: DitSession, store: ChunkStore) -> video_pb2.Completed:
    """Makes the clip and its artifacts; returns what is to be told of it."""
    await output.open([name for name in job.plan.artifacts if name in WORKER_ARTIFACTS])
    if job.clip.mode == "dense":
        await _make_at_once(job, output, dit, store)
    else:
        await _make_chunk_by_chunk(job, output, dit, store)
    if dit.has_stills and not output.is_shown:
        job.warn("PREVIEW_UNAVAILABLE", "stills of this clip could not be made any more; the server's log says why")

    if job.num_frames_emitted == job.clip.num_frames and not job.has_told("stream_complete"):
        job.emit(
            video_pb2.StreamComplete(
                num_fragments=job.stream.num_fragments,
                num_bytes=job.stream.num_bytes,
                num_frames=job.num_frames_emitted,
                num_samples=num_samples(job.clip.num_frames),
            )
        )
    await enter(job, lane, Phase.FINISH)
    finished = await lane.vae.finish(job.job_id)
    for artifact in finished.artifacts:
        job.keep(artifact)
    for warning in [*delivery_warnings(finished), *audio_warnings(finished.audio_health)]:
        job.warn(warning.reason, warning.message)
    completed = video_pb2.Completed(
        latents_sha256=output.latents_hash.hexdigest(), audio_health=finished.audio_health, timings=output.timings()
    )
    await _write_record(job, lane, completed)
    completed.artifacts.extend(job.artifacts)
    if job.plan.HasField("refine_audio"):
        await to_its_end(write_clip, job, completed)
    return completed


async def _make_chunk_by_chunk(job: Job, output: Output, dit: DitSession, store: ChunkStore) -> None:
    """Samples and decodes the chunks in turn, so that fragments leave while later chunks are sampled.

    A chunk is delivered before its clean forward, which comes with the next chunk: nobody waits for a commit.
    """
    last = len(job.plan.chunks) - 1
    waiting: list[tuple[int, TensorParts]] = []
    num_frames = 0
    for chunk_index, chunk in enumerate(job.plan.chunks):
        latents = await to_its_end(store.get, chunk_index)
        if latents is None:
            latents = await dit.sample(chunk_index)
        if chunk_index == last:
            output.sampling_ended()

        # Chunk 0 completes no frame, so the device is not handed over for it alone: it is decoded together with chunk
        # 1, and the first fragment leaves two hand-overs earlier.
        waiting.append((chunk_index, latents))
        if chunk.num_frames_emitted > num_frames:
            for decode_index, parts in waiting:
                await output.decode(decode_index, parts)
            waiting.clear()
        num_frames = chunk.num_frames_emitted


async def _make_at_once(job: Job, output: Output, dit: DitSession, store: ChunkStore) -> None:
    """Samples the whole clip, then decodes it chunk by chunk, as its latents come from the store."""
    chunks = range(len(job.plan.chunks))
    if any([await to_its_end(store.get, chunk_index) is None for chunk_index in chunks]):
        await dit.sample_dense()
    output.sampling_ended()
    for chunk_index in chunks:
        latents = await to_its_end(store.get, chunk_index)
        if latents is None:
            raise ResumeError(f"the latents of chunk {chunk_index} are no longer there")
        await output.decode(chunk_index, latents)


async def _refine_the_rest(job: Job, lane: Lane, known_texts: dict[str, TensorParts]) -> RefineReport:
    """Refines the sound of the clip that has been delivered, which stays as it is whatever comes of it. Raises
    WorkerLostError if that can be tried again."""
    report = RefineReport()
    if job.has_told("refine_failed"):  # and then the server was lost
        events = map(job.log.event, reversed(range(len(job.log))))
        report.failure = next(event.refine_failed for event in events if event.HasField("refine_failed"))
        return report
    try:
        # Its KV cache and its decoders are of no more use: the room is the refinement's.
        await lane.dit.close_session(job.job_id)
        await lane.vae.close_session(job.job_id)
        names = {artifact.name for artifact in job.artifacts}
        video = job.directory / FINAL if FINAL in names else None
        if LATENTS not in names:
            raise PhaseError(f"there is no {LATENTS} to refine")
        files = ClipFiles(job.directory / LATENTS, video)
        await refine(job, lane, files, Output(job, lane, is_refined=True), report, known_texts)
    except WorkerLostError:
        raise
    except Exception as failure:  # whatever it is, there is a clip
        report.failure = _refine_failed(job, failure)
    return report


def _refine_failed(job: Job, failure: Exception) -> types_pb2.RefineFailed:
    """Tells that the clip's sound stays as it is."""
    error = as_told(failure, job.job_id)
    log.warning("the sound of job %s is not refined: %s: %s", job.job_id, error.reason, error)
    told = types_pb2.RefineFailed(reason=error.reason, message=error.message)
    job.emit(told)
    return told


async def _record_refinement(job: Job, lane: Lane, completed: video_pb2.Completed, report: RefineReport) -> None:
    """Adds what became of the refinement to what is told and written of the clip."""
    completed.timings.total_s = running_s(job)
    del completed.artifacts[:]
    await _write_record(job, lane, completed, report)
    completed.artifacts.extend(job.artifacts)


async def _write_record(
    job: Job, lane: Lane, completed: video_pb2.Completed, refinement: RefineReport | None = None
) -> None:
    opened = await to_its_end(ChunkStore(job.directory).opened)
    kv_storage = "" if job.clip.mode == "dense" else KvStorage.Name(opened.kv_storage)
    await write_record(job, await lane.describe_those_that_answer(), completed, Record(kv_storage, refinement))
