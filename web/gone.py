"""What a job has no more, or never will have, told apart from what it never had: HTTP status 410."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from h3stream.errors import ArtifactNotFoundError
from h3stream.events import Artifact
from h3stream.job import Job
from web.playlist import ENDED_STATES


class GoneError(HTTPException):
    """What is asked for was there, or was to be, and never will be again."""

    def __init__(self, reason: str, message: str, job_id: str) -> None:
        super().__init__(410, message)
        self.reason = reason
        self.job_id = job_id


def find_artifact(job: Job, name: str) -> Artifact:
    """The artifact of that name. Raises ArtifactNotFoundError, which tells what there is, or GoneError."""
    artifacts = {artifact.name: artifact for artifact in job.artifacts}
    if name in artifacts:
        return artifacts[name]
    removed = {gone.name: gone.message for gone in job.removed_artifacts}
    if name in removed:
        message = f"{name} of job {job.job_id} has been removed: {removed[name]}"
        raise GoneError("ARTIFACT_REMOVED", message, job.job_id)
    names = ", ".join(artifacts) or "none"
    until = "" if job.state in ENDED_STATES else f" while it is {job.state}"
    message = f"job {job.job_id} has no artifact {name[:80]!r}; it has {names}{until}"
    raise ArtifactNotFoundError(message, job_id=job.job_id)


def incomplete_stream(job: Job) -> GoneError:
    """What is told of the stream of a job that has ended without the whole of it."""
    why = "" if job.error is None else f", {job.error.message}"
    message = f"the stream of job {job.job_id} is not whole and never will be: the job is over ({job.state}{why})"
    return GoneError("STREAM_INCOMPLETE", message, job.job_id)
