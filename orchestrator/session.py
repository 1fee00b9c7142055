"""One job on one lane, as a coroutine that reads as the phases in order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from core.geometry import num_samples
from core.phases import HOLDER, Phase
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.worker_clients import StepDone, TensorParts

SILENCE_PEAK = 1e-4
"""Below -80 dB of full scale a soundtrack is called silent."""


async def run_session(job: Job, lane: Lane, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Makes the job's clip, emitting its events as things happen.

    Frees nothing: the scheduler clears the lane whatever happens here. Raises a GenerationError where a phase fails.
    """
    started_s = clock()
    first_fragment_s = sampling_s = 0.0
    num_frames_before_sampling_end = 0
    num_fragments = num_bytes = 0
    latents_hash = hashlib.sha256()

    embedding = await lane.text_encoder.lookup(job.prompt)
    if embedding is None:
        await _enter(job, lane, Phase.ENCODE)
        embedding = await lane.text_encoder.encode(job.prompt)

    await _enter(job, lane, Phase.PREFILL)
    opened = await lane.dit.open_session(job.job_id, job.clip, embedding)
    if opened.kv_storage_fallback_reason:
        job.emit(video_pb2.Warning(reason="KV_STORAGE_FALLBACK", message=opened.kv_storage_fallback_reason))
    await lane.vae.open_session(job.job_id, job.clip, str(job.directory))

    num_chunks = len(job.plan.chunks)
    waiting: list[tuple[int, TensorParts]] = []
    for chunk_index in range(num_chunks):
        await _enter(job, lane, Phase.DENOISE, chunk_index)
        latents: TensorParts = ()
        async for result in lane.dit.sample_chunk(job.job_id, chunk_index):
            if isinstance(result, StepDone):
                job.step(result.step)
            else:
                latents = result
        for part in latents:
            latents_hash.update(part.data)
        if chunk_index == num_chunks - 1:
            sampling_s = clock() - started_s
            num_frames_before_sampling_end = job.num_frames_emitted

        # A chunk is delivered before its clean forward: nobody waits for a commit. Chunk 0 completes no frame, so the
        # device is not handed over for it alone: it is decoded together with chunk 1, and the first fragment leaves
        # two hand-overs earlier.
        waiting.append((chunk_index, latents))
        if job.plan.chunks[chunk_index].num_frames_emitted > job.num_frames_emitted:
            for decode_index, decode_latents in waiting:
                await _enter(job, lane, Phase.DECODE, decode_index)
                async for media in lane.vae.decode_chunk(job.job_id, decode_index, decode_latents):
                    if isinstance(media, types_pb2.Fragment):
                        if num_fragments == 0:
                            first_fragment_s = clock() - started_s
                        num_fragments += 1
                    num_bytes += len(media.data)
                    job.emit(media)
            waiting.clear()

        if chunk_index < num_chunks - 1:
            await _enter(job, lane, Phase.COMMIT, chunk_index)
            await lane.dit.commit_chunk(job.job_id, chunk_index)

    job.emit(
        video_pb2.StreamComplete(
            num_fragments=num_fragments,
            num_bytes=num_bytes,
            num_frames=job.num_frames_emitted,
            num_samples=num_samples(job.clip.num_frames),
        )
    )
    await _enter(job, lane, Phase.FINISH)
    finished = await lane.vae.finish(job.job_id)
    for warning in audio_warnings(finished.audio_health):
        job.emit(warning)
    for artifact in finished.artifacts:
        artifact.relative_path = f"jobs/{job.job_id}/{artifact.relative_path}"
    job.emit(
        video_pb2.Completed(
            artifacts=finished.artifacts,
            latents_sha256=latents_hash.hexdigest(),
            audio_health=finished.audio_health,
            timings=video_pb2.Timings(
                first_fragment_s=first_fragment_s,
                sampling_s=sampling_s,
                total_s=clock() - started_s,
                num_frames_before_sampling_end=num_frames_before_sampling_end,
            ),
        )
    )


async def _enter(job: Job, lane: Lane, phase: Phase, chunk_index: int = -1) -> None:
    """Announces a phase and gives the device to the worker that it needs."""
    job.enter(phase, chunk_index)
    await lane.device.grant(HOLDER[phase])


def audio_warnings(health: types_pb2.AudioHealth) -> list[video_pb2.Warning]:
    """What a listener should know of a soundtrack."""
    warnings = []
    if health.peak < SILENCE_PEAK:
        warnings.append(
            video_pb2.Warning(reason="AUDIO_SILENT", message=f"the sound is silent (peak {health.peak:.1e})")
        )
    if health.num_clipped_samples:
        warnings.append(
            video_pb2.Warning(
                reason="AUDIO_CLIPPED", message=f"{health.num_clipped_samples} audio samples are at full scale"
            )
        )
    if health.normalisation_divisor > 1:
        warnings.append(
            video_pb2.Warning(
                reason="AUDIO_NORMALISED",
                message=f"final.mp4 is quieter than the stream by a factor of {health.normalisation_divisor:.3f}",
            )
        )
    return warnings
