"""How a clip came to be: the files beside it that say what was asked, what was used, and what happened when.

They hold messages of the contract in protobuf's own JSON mapping (64-bit integers are strings there), with the names of
the fields as they are in the contract.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from core.artifacts import ARTIFACTS, PROVENANCE, SERVER_ARTIFACTS, TIMELINE
from core.refine import refine_sigmas
from core.schedule import dense_sigmas, shifted_sigmas
from h3stream.errors import PhaseError
from h3stream.request import ClipSpec
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from orchestrator.job import Job
from orchestrator.latents import to_its_end
from services.common.files import write_whole

FORMAT = "h3stream-provenance-1"


def timeline_of(job: Job) -> dict[str, Any]:
    """What `timeline.json` holds."""
    return {"job_id": job.job_id, "chunks": [as_json(chunk) for chunk in job.plan.chunks], **job.timeline.summary()}


@dataclass
class RefineReport:
    """What became of a refinement, as far as it has come."""

    started: types_pb2.RefineStarted | None = None
    """What it was about to do."""
    steps: list[types_pb2.RefineProgress] = field(default_factory=list)
    """What each step did."""
    audio: types_pb2.RefinedAudio | None = None
    """What was measured on the result."""
    failure: types_pb2.RefineFailed | None = None
    """Why there is none."""


@dataclass
class Record:
    """What is written down beside a clip that is being made or refined."""

    kv_storage: str = ""
    """Where the KV cache really lived; empty where there was none."""
    refinement: RefineReport | None = None
    """Of a clip whose sound is refined."""


async def write_record(
    job: Job, workers: Sequence[workers_pb2.DescribeResponse], completed: video_pb2.Completed, record: Record
) -> None:
    """Writes how the job's clip came to be beside it, in place of what was written before; one that cannot be written
    is told.

    workers: those that worked on it, as they describe themselves.  completed: with the figures so far.
    """

    names = [name for name in SERVER_ARTIFACTS if name in job.plan.artifacts]
    timeline = timeline_of(job)
    warnings = []

    def write_all() -> None:
        for name in names:
            content = timeline if name == TIMELINE else provenance_of(job, workers, completed, record)
            try:
                job.keep(write_json(job.directory, name, content))
            except PhaseError as error:
                warnings.append(given_up(name, error.message))

    await to_its_end(write_all)  # all or none: the one knows the checksum of the other
    for warning in warnings:
        job.warn(warning.reason, warning.message)


def given_up(name: str, message: str) -> video_pb2.Warning:
    """The warning that there is no such artifact."""
    return video_pb2.Warning(reason="ARTIFACT_FAILED", message=f"artifact {name} was given up: {message}")


def provenance_of(
    job: Job, workers: Sequence[workers_pb2.DescribeResponse], completed: video_pb2.Completed, record: Record
) -> dict[str, Any]:
    """What `provenance.json` holds; its arguments are those of `write_record`."""
    artifacts = [artifact for artifact in job.artifacts if artifact.name != PROVENANCE]
    result = {**as_json(completed), "artifacts": [as_json(artifact) for artifact in artifacts]}
    is_streamed = job.source is None and job.clip.mode == "streaming"
    adapters = {use.name for use in job.plan.refine_audio.adapters}
    if job.source is None:
        adapters |= {use.name for use in job.clip.adapters}
    return {
        "format": FORMAT,
        "job_id": job.job_id,
        "prompt": job.prompt,
        "request": None if job.request is None else as_json(job.request),
        "plan": as_json(job.plan),
        "source": None if job.source is None else dataclasses.asdict(job.source),
        "sigmas": sigmas_of(job.clip) if job.source is None else None,
        "kv_storage": record.kv_storage,
        "residency": "exclusive",
        "server_version": metadata.version("h3stream-server"),
        "workers": {
            worker.worker: {
                "device": worker.device,
                "kernels": worker.kernels,
                "weight_bytes": worker.weight_bytes,
                "peak_host_bytes": worker.peak_host_bytes,
                "peak_device_bytes": worker.peak_device_bytes,
                "library_versions": dict(worker.library_versions),
                "weight_digests": dict(worker.weight_digests),
                "parts": [as_json(part) for part in worker.parts],
                "adapters": [
                    as_json(adapter)
                    for adapter in worker.adapters
                    if adapter.name in adapters or (adapter.is_streaming and is_streamed)
                ],
            }
            for worker in workers
        },
        "warnings": [as_json(warning) for warning in job.warnings],
        "refinement": None if record.refinement is None else refinement_of(job, record.refinement),
        "result": result,
    }


def refinement_of(job: Job, report: RefineReport) -> dict[str, Any]:
    """What is told of a refinement; what it has not come to is null."""
    spec = job.plan.refine_audio
    sigmas = refine_sigmas(spec.steps, spec.audio_denoise, job.clip.video_shift, job.clip.audio_shift, spec.scheduler)
    return {
        "spec": as_json(spec),
        "sigmas": {"video": [video for video, _ in sigmas], "audio": [audio for _, audio in sigmas]},
        "started": None if report.started is None else as_json(report.started),
        "steps": [as_json(step) for step in report.steps],
        "audio": None if report.audio is None else as_json(report.audio),
        "failure": None if report.failure is None else as_json(report.failure),
    }


def sigmas_of(clip: ClipSpec) -> dict[str, Sequence[float]]:
    """Noise levels of the forwards, of each chunk or of the dense clip."""
    grid = dense_sigmas if clip.mode == "dense" else shifted_sigmas
    return {"video": grid(clip.steps, clip.video_shift), "audio": grid(clip.steps, clip.audio_shift)}


def as_json(message: Message) -> dict[str, Any]:
    """A message with all its fields."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def write_json(directory: Path, name: str, content: dict[str, Any]) -> types_pb2.Artifact:
    """Writes an artifact, which appears once it is whole. Raises PhaseError if it cannot be written."""
    data = json.dumps(content, indent=1, ensure_ascii=False).encode()
    try:
        size_bytes, sha256 = write_whole(directory / name, data)
    except OSError as error:
        raise PhaseError(f"{name} cannot be written: {error.strerror}") from error
    return types_pb2.Artifact(
        name=name,
        relative_path=name,
        media_type=ARTIFACTS[name],
        size_bytes=size_bytes,
        sha256=sha256,
    )
