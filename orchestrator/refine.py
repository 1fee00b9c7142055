"""The sound of a finished clip, refined: behind the clip in its own job, or as a job of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from core.artifacts import COMPARISON, REFINED, REFINED_LATENTS, REFINED_SOUND
from core.geometry import chunk_table, num_samples
from core.latents_file import latent_shapes
from core.phases import Phase
from h3stream.codec import clip_spec_to_proto
from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.latents import Latents, StoredTensor, TensorWriter, read_latents
from orchestrator.output import Output, audio_warnings, delivery_warnings, enter
from orchestrator.provenance import Record, RefineReport, write_record
from orchestrator.worker_clients import TensorParts

SOURCE_LATENTS, SOURCE_VIDEO = ".source.safetensors", ".source.mp4"
"""The source's files in the directory of a job that refines: inputs, gone when it ends."""


@dataclass(frozen=True)
class ClipFiles:
    """What a refinement starts from."""

    latents: Path
    """The clip's latents."""
    video: Path | None
    """MP4 with the clip's pictures; None: they are decoded anew."""


async def run_refinement(job: Job, lane: Lane) -> None:
    """Refines the clip of a job's source, emitting the job's events as things happen. Begins with the first step, also
    where an earlier run of the job was lost; what that delivered is not sent again.

    Frees nothing, as `run_session` does not. Raises a GenerationError where a phase fails.
    """
    assert job.source is not None
    output = Output(job, lane, is_refined=True)
    report = RefineReport()
    video = job.directory / SOURCE_VIDEO if job.source.has_video else None
    latents = await refine(job, lane, ClipFiles(job.directory / SOURCE_LATENTS, video), output, report, {})
    assert report.audio is not None
    if not _is_decoded_anew(job, video):  # else its latents have passed chunk by chunk
        for chunk in chunk_table(job.clip.num_frames):
            output.hash_latents(await latents.chunk(chunk))
    completed = video_pb2.Completed(
        latents_sha256=output.latents_hash.hexdigest(),
        audio_health=report.audio.audio_health,
        timings=output.timings(),
    )
    workers = await lane.describe_those_that_answer()
    await write_record(job, workers, completed, Record(refinement=report))
    completed.artifacts.extend(job.artifacts)
    job.emit(completed)


async def refine(
    job: Job,
    lane: Lane,
    files: ClipFiles,
    output: Output,
    report: RefineReport,
    known_texts: Mapping[str, TensorParts],
) -> Latents:
    """Refines the sound as the job's plan says, delivers it and lists its files; returns the latents that it has then.

    output: of the refined rendition.  report: is filled in on the way.  known_texts: hidden states by their prompts.
    Raises a GenerationError where a phase fails; what was delivered and listed before is untouched.
    """
    source = await _open(job, files.latents)
    texts = await _texts(job, lane, known_texts)

    await enter(job, lane, Phase.REFINE)
    spec = job.plan.refine_audio
    shapes = latent_shapes(job.clip)
    names = {"audio": "audio"}
    if spec.video_denoise > 0:
        names["video"] = "video"
    if spec.compare:
        names["exact_audio"] = "audio"
    made = TensorWriter(job.directory, {name: shapes[like] for name, like in names.items()})
    summary = workers_pb2.RefineSummary()
    async for message in lane.dit.refine_audio(job.clip, spec, _inputs(source, texts)):
        match message:
            case types_pb2.RefineStarted():
                report.started = message
                job.emit(message)
            case types_pb2.RefineProgress():
                report.steps.append(message)
                job.refine_step(message)
            case workers_pb2.RefineSummary():
                summary = message
            case _:
                made.add(message)
    tensors = made.finish()
    output.sampling_ended()
    refined = Latents(tensors.get("video", source.video), tensors["audio"])

    is_decoded_anew = _is_decoded_anew(job, files.video)
    await enter(job, lane, Phase.DECODE)
    measured = await _decode_sound(
        job, lane, files, {"audio": refined.audio, "audio_before": source.audio, **_exact(tensors)},
        None if is_decoded_anew else output,
    )  # fmt: skip
    if is_decoded_anew:
        await output.open((REFINED, REFINED_SOUND, REFINED_LATENTS))
        for index, chunk in enumerate(chunk_table(job.clip.num_frames)):
            await output.decode(index, await refined.chunk(chunk))
    await enter(job, lane, Phase.FINISH)
    deliveries: list[workers_pb2.FinishResponse | workers_pb2.DecodeAudioFinished] = [measured]
    if is_decoded_anew:
        deliveries.append(await lane.vae.finish(job.job_id))

    report.audio = _refined_audio(job, summary, measured, await refined.audio.sha256())
    for delivered in deliveries:
        for artifact in delivered.artifacts:
            job.keep(artifact)
    for warning in [
        *(warning for delivered in deliveries for warning in delivery_warnings(delivered)),
        *audio_warnings(measured.audio_health, "refined ", REFINED),
    ]:
        job.warn(warning.reason, warning.message)
    if not job.has_told("refined_audio"):
        job.emit(report.audio)
    return refined


def _is_decoded_anew(job: Job, video: Path | None) -> bool:
    """Whether the rendition has pictures of its own: those of the clip have moved, or are not there."""
    return job.plan.refine_audio.video_denoise > 0 or video is None


async def _open(job: Job, path: Path) -> Latents:
    """The latents in a file. Raises PhaseError if they are not those of the job's clip."""
    try:
        file = await asyncio.to_thread(read_latents, path, job.clip)
    except ValueError as error:
        raise PhaseError(f"the file of the clip's latents {error}") from error
    size = (file.clip.num_frames, file.clip.width, file.clip.height)
    if size != (job.clip.num_frames, job.clip.width, job.clip.height):
        raise PhaseError(f"the file of the clip's latents is of a clip of (frames, width, height) {size}")
    return file.latents


async def _texts(job: Job, lane: Lane, known: Mapping[str, TensorParts]) -> list[types_pb2.TensorPart]:
    """Hidden states of the prompt and, with guidance, of what it leads away from; encodes what is not known yet."""
    spec = job.plan.refine_audio
    wanted = {"": job.prompt, **({"negative_": spec.negative_prompt} if spec.cfg != 1 else {})}
    parts = []
    for prefix, prompt in wanted.items():
        embedding = known.get(prompt) or await lane.text_encoder.lookup(prompt)
        if embedding is None:
            await enter(job, lane, Phase.ENCODE)
            embedding = await lane.text_encoder.encode(prompt)
        parts += [_renamed(part, prefix + part.name) for part in embedding]
    return parts


async def _inputs(source: Latents, texts: list[types_pb2.TensorPart]) -> AsyncIterator[types_pb2.TensorPart]:
    """What the DiT worker needs, read from the file as it is sent."""
    async for part in _parts({"video": source.video, "audio": source.audio}):
        yield part
    for part in texts:
        yield part


async def _parts(tensors: Mapping[str, StoredTensor]) -> AsyncIterator[types_pb2.TensorPart]:
    for name, tensor in tensors.items():
        async for part in tensor.parts(name):
            yield part


def _renamed(part: types_pb2.TensorPart, name: str) -> types_pb2.TensorPart:
    renamed = types_pb2.TensorPart()
    renamed.CopyFrom(part)
    renamed.name = name
    return renamed


def _exact(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in tensors.items() if name == "exact_audio"}


async def _decode_sound(
    job: Job, lane: Lane, files: ClipFiles, sounds: Mapping[str, StoredTensor], output: Output | None
) -> workers_pb2.DecodeAudioFinished:
    """Decodes the refined sound, which gives its measures and, where it is the rendition, media and files.

    output: takes the media; None: they are no rendition, and only the comparison is kept.
    """
    names = [] if output is None else [REFINED, REFINED_SOUND, REFINED_LATENTS]
    header = workers_pb2.DecodeAudioHeader(
        clip=clip_spec_to_proto(job.clip),
        artifact_directory=str(job.directory),
        artifacts=[*names, *([COMPARISON] if "exact_audio" in sounds else [])],
    )
    if output is not None:
        header.video_file, header.latents_file = str(files.video), str(files.latents)
    finished = None
    async for message in lane.vae.decode_audio(header, _parts(sounds)):
        if isinstance(message, workers_pb2.DecodeAudioFinished):
            finished = message
        elif output is not None:
            output.emit(message)
    if finished is None:
        raise PhaseError("the VAE worker ended without saying what it made of the refined sound")
    if output is not None and finished.stream_failure:
        output.stream_failed(finished.stream_failure)
    return finished


def _refined_audio(
    job: Job, summary: workers_pb2.RefineSummary, measured: workers_pb2.DecodeAudioFinished, latents_sha256: str
) -> types_pb2.RefinedAudio:
    """What is told of the result: what the DiT worker knows of its latents, and the VAE worker of its sound."""
    audio = types_pb2.RefinedAudio(
        latents_sha256=latents_sha256,
        num_samples=num_samples(job.clip.num_frames),
        audio_health=measured.audio_health,
        audio_health_before=measured.audio_health_before,
        change=measured.change,
        sampling_s=summary.sampling_s,
        is_warm=summary.is_warm,
    )
    audio.change.latents = summary.change
    if job.plan.refine_audio.compare:
        audio.against_exact.CopyFrom(measured.against_exact)
        audio.against_exact.latents = summary.against_exact
        audio.speed_ratio = summary.exact_sampling_s / summary.sampling_s if summary.sampling_s else 0.0
    return audio
