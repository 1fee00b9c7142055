"""What is written down of a clip that is whole while its sound is still being refined, so that it is not made again."""

from __future__ import annotations

from h3stream.errors import PhaseError
from h3stream.v1 import video_pb2
from orchestrator.job import Job
from orchestrator.sealed import read_sealed, write_sealed

CLIP_NAME = ".clip.binpb"
"""What the job would say if it ended with the clip, in its directory."""


def write_clip(job: Job, completed: video_pb2.Completed) -> None:
    """Writes down that the clip is whole. Raises PhaseError if it cannot be written."""
    try:
        write_sealed(job.directory / CLIP_NAME, completed.SerializeToString())
    except OSError as error:
        raise PhaseError(f"what the clip is cannot be written down: {error.strerror}") from error


def read_clip(job: Job) -> video_pb2.Completed | None:
    """What was written down, and lists the clip's artifacts again; None if nothing was, or it is damaged."""
    body = read_sealed(job.directory / CLIP_NAME)
    if body is None:
        return None
    completed = video_pb2.Completed.FromString(body)
    for artifact in completed.artifacts:
        job.keep(artifact)
    return completed


def has_clip(job: Job) -> bool:
    """Whether the clip is whole."""
    return (job.directory / CLIP_NAME).exists()
