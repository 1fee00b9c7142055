"""One job on one lane, as a coroutine that reads as the phases in order."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

from core.artifacts import SERVER_ARTIFACTS, TIMELINE
from core.geometry import num_samples
from core.phases import HOLDER, Phase
from h3stream.errors import GenerationError
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from h3stream.v1.types_pb2 import KvStorage
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.provenance import provenance_of, timeline_of, write_json
from orchestrator.worker_clients import StepDone, Stills, TensorParts

SILENCE_PEAK = 1e-4
"""Below -80 dB of full scale a soundtrack is called silent."""


async def run_session(job: Job, lane: Lane, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Makes the job's clip, emitting its events as things happen.

    Frees nothing: the scheduler clears the lane whatever happens here. Raises a GenerationError where a phase fails.
    """
    output = _Output(job, lane, clock)

    embedding = await lane.text_encoder.lookup(job.prompt)
    if embedding is None:
        await _enter(job, lane, Phase.ENCODE)
        embedding = await lane.text_encoder.encode(job.prompt)

    await _enter(job, lane, Phase.PREFILL)
    stills = await _stills(job, lane)
    opened = await lane.dit.open_session(job.job_id, job.clip, embedding, stills)
    if opened.preview_unavailable_reason:
        job.emit(video_pb2.Warning(reason="PREVIEW_UNAVAILABLE", message=opened.preview_unavailable_reason))
    if opened.kv_storage_fallback_reason:
        job.emit(video_pb2.Warning(reason="KV_STORAGE_FALLBACK", message=opened.kv_storage_fallback_reason))
    await lane.vae.open_session(job.job_id, job.clip, str(job.directory), job.plan.artifacts)

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
    await _enter(job, lane, Phase.FINISH)
    finished = await lane.vae.finish(job.job_id)
    for warning in [*delivery_warnings(finished), *audio_warnings(finished.audio_health)]:
        job.emit(warning)
    completed = video_pb2.Completed(
        artifacts=finished.artifacts,
        latents_sha256=output.latents_hash.hexdigest(),
        audio_health=finished.audio_health,
        timings=output.timings(),
    )
    await _record(job, lane, completed, "" if job.clip.mode == "dense" else KvStorage.Name(opened.kv_storage))
    for artifact in completed.artifacts:
        artifact.relative_path = f"jobs/{job.job_id}/{artifact.name}"
    job.artifacts = list(completed.artifacts)
    job.emit(completed)


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


async def _record(job: Job, lane: Lane, completed: video_pb2.Completed, kv_storage: str) -> None:
    """Writes how the clip came to be beside it; one that cannot be written is told."""
    for name in SERVER_ARTIFACTS:
        if name not in job.plan.artifacts:
            continue
        try:
            if name == TIMELINE:
                content = timeline_of(job)
            else:
                content = provenance_of(job, await lane.describe(), completed, kv_storage)
            completed.artifacts.append(await asyncio.to_thread(write_json, job.directory, name, content))
        except GenerationError as error:
            job.emit(_given_up(name, error.message))


async def _make_chunk_by_chunk(job: Job, lane: Lane, output: _Output) -> None:
    """Samples, decodes and commits the chunks in turn, so that fragments leave while later chunks are sampled."""
    last = len(job.plan.chunks) - 1
    waiting: list[tuple[int, TensorParts]] = []
    for chunk_index, chunk in enumerate(job.plan.chunks):
        await _enter(job, lane, Phase.DENOISE, chunk_index)
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
            await _enter(job, lane, Phase.COMMIT, chunk_index)
            await lane.dit.commit_chunk(job.job_id, chunk_index)


async def _make_at_once(job: Job, lane: Lane, output: _Output) -> None:
    """Samples the whole clip, then decodes it chunk by chunk, as its latents come from the DiT worker's memory."""
    await _enter(job, lane, Phase.DENOISE)
    async for result in lane.dit.sample_dense(job.job_id):
        output.sampled(result)
    output.sampling_ended()
    for chunk_index in range(len(job.plan.chunks)):
        await output.decode(chunk_index, await _chunk_latents(job, lane, output, chunk_index))


async def _chunk_latents(job: Job, lane: Lane, output: _Output, chunk_index: int) -> TensorParts:
    """The latents of a chunk, its steps announced if it has yet to be sampled."""
    latents: TensorParts = ()
    async for result in lane.dit.sample_chunk(job.job_id, chunk_index):
        if isinstance(result, tuple):
            latents = result
        else:
            output.sampled(result)
    return latents


class _Output:
    """What leaves a session: steps, stills, media, and what is counted of them."""

    def __init__(self, job: Job, lane: Lane, clock: Callable[[], float]) -> None:
        self.num_fragments = 0
        self.num_bytes = 0
        self.latents_hash = hashlib.sha256()
        self.is_shown = False
        """Whether the forward told last has its still; of the last one of all it is always due."""
        self._job = job
        self._lane = lane
        self._clock = clock
        self._started_s = clock()
        self._first_fragment_s = 0.0
        self._sampling_s = 0.0
        self._num_frames_before_sampling_end = 0

    def sampled(self, result: StepDone | types_pb2.Preview) -> None:
        """Tells that a noise forward is done, or shows it."""
        self.is_shown = not isinstance(result, StepDone)
        if isinstance(result, StepDone):
            self._job.step(result.step)
        else:
            self._job.emit(result)

    def sampling_ended(self) -> None:
        """Notes that the last noise forward is done."""
        self._sampling_s = self._elapsed_s()
        self._num_frames_before_sampling_end = self._job.num_frames_emitted

    async def decode(self, chunk_index: int, latents: TensorParts) -> None:
        """Decodes the next chunk and emits the media that it completes."""
        for part in latents:
            self.latents_hash.update(part.data)
        await _enter(self._job, self._lane, Phase.DECODE, chunk_index)
        async for media in self._lane.vae.decode_chunk(self._job.job_id, chunk_index, latents):
            if isinstance(media, types_pb2.Fragment):
                if self.num_fragments == 0:
                    self._first_fragment_s = self._elapsed_s()
                self.num_fragments += 1
            self.num_bytes += len(media.data)
            self._job.emit(media)

    def timings(self) -> video_pb2.Timings:
        """How long things took, until now."""
        return video_pb2.Timings(
            first_fragment_s=self._first_fragment_s,
            sampling_s=self._sampling_s,
            total_s=self._elapsed_s(),
            num_frames_before_sampling_end=self._num_frames_before_sampling_end,
        )

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s


async def _enter(job: Job, lane: Lane, phase: Phase, chunk_index: int = -1) -> None:
    """Announces a phase and gives the device to the worker that it needs."""
    job.enter(phase, chunk_index)
    await lane.device.grant(HOLDER[phase])


def delivery_warnings(finished: workers_pb2.FinishResponse) -> list[video_pb2.Warning]:
    """What of a clip that has been made could not be encoded or written."""
    warnings = []
    if finished.stream_failure:
        message = f"the media stream ended early; the clip itself is complete: {finished.stream_failure}"
        warnings.append(video_pb2.Warning(reason="STREAM_FAILED", message=message))
    for failure in finished.failures:
        warnings.append(_given_up(failure.name, failure.message))
    return warnings


def _given_up(name: str, message: str) -> video_pb2.Warning:
    return video_pb2.Warning(reason="ARTIFACT_FAILED", message=f"artifact {name} was given up: {message}")


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
