"""What is to become a job's directory while it is being filled, and the files of other jobs in it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from h3stream.errors import ArtifactNotFoundError, PhaseError
from h3stream.v1 import types_pb2
from orchestrator.job import Job
from orchestrator.latents import to_its_end
from orchestrator.scheduler import INCOMING


@contextlib.contextmanager
def staging(data: Path) -> Iterator[Path]:
    """A directory that is gone at the end of the block, unless it has become a job's. Raises PhaseError.

    data: the data directory.
    """
    directory = data / INCOMING / uuid.uuid4().hex
    try:
        directory.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise PhaseError(f"the job's directory cannot be made: {error.strerror}") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def take_over(source: Job, artifact: types_pb2.Artifact, name: Path) -> None:
    """Gives a job's file a second name. Raises ArtifactNotFoundError if it is not what the job left, PhaseError."""
    gone = ArtifactNotFoundError(f"{artifact.name} of job {source.job_id} is no longer what the job left")
    try:
        await _second_name(source.directory / artifact.name, name)
        sha256 = await asyncio.to_thread(_sha256, name)
    except FileNotFoundError:
        raise gone from None
    except OSError as error:
        raise PhaseError(f"the files of job {source.job_id} cannot be taken over: {error.strerror}") from error
    if sha256 != artifact.sha256:
        raise gone


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _second_name(path: Path, name: Path) -> None:
    """Gives a file a second name; where the file system cannot, a copy. Raises OSError."""
    try:
        os.link(path, name)  # at once: retention removes files between two turns of the event loop
    except FileNotFoundError:
        raise
    except OSError:
        with path.open("rb") as file:
            await to_its_end(_copy, file.fileno(), name)


def _copy(fd: int, name: Path) -> None:
    with open(fd, "rb", closefd=False) as source, name.open("xb") as target:
        shutil.copyfileobj(source, target)
