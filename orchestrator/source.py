"""From a request to refine to a job: whose clip it is, whether it can be done, and its files in the job's keeping."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.artifacts import FINAL, LATENTS, REFINED_LATENTS
from core.geometry import MAX_FRAMES
from h3stream.codec import refine_spec_from_proto, refuse_unknown_fields
from h3stream.errors import (
    ArtifactNotFoundError,
    FieldViolation,
    GenerationError,
    OverloadedError,
    PhaseError,
    UnsupportedError,
)
from h3stream.fields import invalid_request
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.admission import AdapterFacts, make_refine_plan, resolve_refinement
from orchestrator.config import Settings
from orchestrator.download import find_artifact
from orchestrator.job import Job, RefineSource
from orchestrator.latents import read_latents, to_its_end
from orchestrator.model_info import ModelInfo
from orchestrator.refine import SOURCE_LATENTS, SOURCE_VIDEO
from orchestrator.scheduler import INCOMING, RETRY_AFTER_S, Scheduler
from orchestrator.upload import Messages, read_end, read_header, receive, upload_violations
from services.common.refusal import refuse

MAX_UPLOADS = 8
"""Uploads under way at a time, each of which takes a place on the disk for as long as it lasts."""
SPEC, UPLOAD = "spec", "upload"
"""Fields of a header, as violations name them."""


@dataclass(frozen=True)
class _Clip:
    """A clip to refine, its files in the directory that becomes the job's."""

    prompt: str
    clip: ClipSpec
    source: RefineSource


class RefineDesk:
    """Takes requests to refine."""

    def __init__(
        self, scheduler: Scheduler, model: ModelInfo, adapters: Sequence[AdapterFacts], settings: Settings
    ) -> None:
        """adapters: the registry."""
        self._scheduler = scheduler
        self._model = model
        self._adapters = adapters
        self._settings = settings
        self._num_uploads = 0

    async def submit(self, messages: Messages) -> Job:
        """The new job of a call, once everything has come and been checked; no lane is held before.

        Raises what `read_header`, `receive` and `Scheduler.submit` raise, InvalidRequestError with every violation,
        JobNotFoundError, UnsupportedError for a source that has not ended, ArtifactNotFoundError for one without
        latents.
        """
        header = await read_header(messages)
        refuse_unknown_fields(header)
        spec = refine_spec_from_proto(header.spec, SPEC)
        self._scheduler.check_open()
        with self._staging() as directory:
            match header.WhichOneof("source"):
                case "job_id":
                    found = await self._from_job(header.job_id, spec, directory)
                    await read_end(messages)
                case "upload":
                    found = await self._from_upload(header.upload, spec, messages, directory)
                case _:
                    rule = "name a job_id, or announce an upload"
                    raise invalid_request([FieldViolation("source", f"source is missing; {rule}")])
            refinement = resolve_refinement(spec, found.clip, self._adapters, SPEC)
            is_decoded_anew = refinement.video_denoise > 0 or not found.source.has_video
            plan = make_refine_plan(
                found.clip, self._model, refinement, self._settings.video_bit_rate if is_decoded_anew else 0
            )
            job = self._scheduler.submit(found.prompt, found.clip, plan, source=found.source, prepared=directory)
        job.request = header
        return job

    async def _from_job(self, job_id: str, spec: RefineSpec, directory: Path) -> _Clip:
        """The clip of a job that has ended; its files get a second name, which outlives their removal there."""
        source = self._scheduler.job(job_id)
        latents = _latents_of(source)
        resolve_refinement(spec, source.clip, self._adapters, SPEC)  # told before anything is read
        video = next((artifact for artifact in source.artifacts if artifact.name == FINAL), None)
        for artifact, own_name in ((latents, SOURCE_LATENTS), (video, SOURCE_VIDEO)):
            if artifact is not None:
                await _take_over(source, artifact, directory / own_name)
        return _Clip(source.prompt, source.clip, RefineSource(job_id, latents.sha256, video is not None))

    async def _from_upload(
        self, upload: video_pb2.LatentsUpload, spec: RefineSpec, messages: Messages, directory: Path
    ) -> _Clip:
        """The clip of uploaded latents, which come with what is to be known of it; the seed and shifts that they do not
        tell are the model's."""
        refuse_unknown_fields(upload)
        refuse(upload_violations(upload))
        longest = dataclasses.replace(self._model.default_dense_clip, num_frames=MAX_FRAMES)
        resolve_refinement(spec, longest, self._adapters, SPEC)  # what no clip allows is told before anything is sent
        path = directory / SOURCE_LATENTS
        with self._upload():
            sha256 = await receive(messages, upload, path)
        try:
            file = await asyncio.to_thread(read_latents, path, self._model.default_dense_clip)
        except ValueError as error:
            raise invalid_request([FieldViolation(UPLOAD, f"the upload {error}", "NO_LATENTS")]) from error
        return _Clip(upload.prompt, file.clip, RefineSource("", sha256, has_video=False))

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """A directory that is gone at the end of the block, unless it has become a job's."""
        directory = self._settings.data / INCOMING / uuid.uuid4().hex
        try:
            directory.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise PhaseError(f"the job's directory cannot be made: {error.strerror}") from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @contextlib.contextmanager
    def _upload(self) -> Iterator[None]:
        """A place for an upload. Raises OverloadedError if all are taken."""
        if self._num_uploads == MAX_UPLOADS:
            raise OverloadedError(
                f"{MAX_UPLOADS} uploads are under way, the most at a time; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1


def _latents_of(source: Job) -> types_pb2.Artifact:
    """The latents of a job. Raises UnsupportedError if it has not ended, ArtifactNotFoundError if it has none."""
    if not source.ended.is_set():
        raise UnsupportedError(f"job {source.job_id} has not ended; its sound can be refined once it has")
    try:
        return find_artifact(source, LATENTS, offset_bytes=0)
    except GenerationError as error:
        hint = ""
        if source.source is not None:
            clip = f"job {source.source.job_id}" if source.source.job_id else "an upload"
            hint = f"; it refined the clip of {clip} itself: refine that again, or upload its {REFINED_LATENTS}"
        raise ArtifactNotFoundError(f"there is nothing to refine: {error.message}{hint}") from error


async def _take_over(source: Job, artifact: types_pb2.Artifact, name: Path) -> None:
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
