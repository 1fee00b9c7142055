"""How a clip came to be: the files beside it that say what was asked, what was used, and what happened when.

They hold messages of the contract in protobuf's own JSON mapping (64-bit integers are strings there), with the names of
the fields as they are in the contract.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from core.artifacts import ARTIFACTS
from core.schedule import dense_sigmas, shifted_sigmas
from h3stream.errors import PhaseError
from h3stream.request import ClipSpec
from h3stream.v1 import types_pb2, video_pb2, workers_pb2
from orchestrator.job import Job

FORMAT = "h3stream-provenance-1"


def timeline_of(job: Job) -> dict[str, Any]:
    """What `timeline.json` holds."""
    return {"job_id": job.job_id, "chunks": [as_json(chunk) for chunk in job.plan.chunks], **job.timeline.summary()}


def provenance_of(
    job: Job, workers: Sequence[workers_pb2.DescribeResponse], completed: video_pb2.Completed, kv_storage: str
) -> dict[str, Any]:
    """What `provenance.json` holds.

    workers: those that made the clip.  completed: with the artifacts and figures so far.  kv_storage: where the KV
    cache really lived; empty for a dense clip.
    """
    adapters = {use.name for use in job.clip.adapters}
    return {
        "format": FORMAT,
        "job_id": job.job_id,
        "prompt": job.prompt,
        "request": None if job.request is None else as_json(job.request),
        "plan": as_json(job.plan),
        "sigmas": sigmas_of(job.clip),
        "kv_storage": kv_storage,
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
                    if adapter.name in adapters or (adapter.is_streaming and job.clip.mode == "streaming")
                ],
            }
            for worker in workers
        },
        "warnings": [as_json(warning) for warning in job.warnings],
        "result": as_json(completed),
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
    part = directory / f".{name}.part"
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, directory / name)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PhaseError(f"{name} cannot be written: {error.strerror}") from error
    return types_pb2.Artifact(
        name=name,
        relative_path=name,
        media_type=ARTIFACTS[name],
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
