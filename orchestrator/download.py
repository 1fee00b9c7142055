"""A finished job's artifacts: which there are, and reading one piece by piece, so that a download costs the same memory
whatever its size."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from h3stream.errors import ArtifactNotFoundError, FieldViolation
from h3stream.fields import invalid_request
from h3stream.v1 import types_pb2
from orchestrator.job import Job

PIECE_BYTES = 256 * 1024


def find_artifact(job: Job, name: str, offset_bytes: int) -> types_pb2.Artifact:
    """The artifact of that name, to be read from an offset on.

    Raises ArtifactNotFoundError, which tells what there is, and InvalidRequestError for an offset beyond its end.
    """
    known = job.to_proto()
    for artifact in known.artifacts:
        if artifact.name == name:
            if not 0 <= offset_bytes <= artifact.size_bytes:
                description = f"offset_bytes is {offset_bytes}; {artifact.name} has {artifact.size_bytes} bytes"
                raise invalid_request([FieldViolation("offset_bytes", description, "BEYOND_END")])
            return artifact
    removed = {gone.name: gone.message for gone in known.removed_artifacts}
    if name in removed:
        raise ArtifactNotFoundError(f"{name} of job {job.job_id} has been removed: {removed[name]}")
    if not job.ended.is_set():
        raise ArtifactNotFoundError(f"job {job.job_id} has not ended; its artifacts can be downloaded once it has")
    names = ", ".join(artifact.name for artifact in known.artifacts) or "none"
    raise ArtifactNotFoundError(f"job {job.job_id} has no artifact {name!r}; it has {names}")


async def read_artifact(
    path: Path, job_id: str, artifact: types_pb2.Artifact, offset_bytes: int
) -> AsyncIterator[bytes]:
    """Yields the bytes of an artifact from an offset on.

    path: its file.  job_id: whose it is.  Raises ArtifactNotFoundError if the file is no longer what the job left.
    """
    gone = ArtifactNotFoundError(f"{artifact.name} of job {job_id} is no longer what the job left")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise gone from error
    try:
        if os.fstat(fd).st_size != artifact.size_bytes:
            raise gone
        while offset_bytes < artifact.size_bytes:
            # Beside the event loop: a slow disk must not hold up the events of jobs.
            data = await asyncio.to_thread(os.pread, fd, PIECE_BYTES, offset_bytes)
            if not data:
                raise gone
            yield data
            offset_bytes += len(data)
    except OSError as error:
        raise gone from error
    finally:
        os.close(fd)
