"""From a request to refine to a job: whose clip it is, whether it can be done, and its files in the job's keeping."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.artifacts import FINAL, LATENTS, REFINED_LATENTS
from core.geometry import MAX_FRAMES
from h3stream.codec import order_from_proto, refine_spec_from_proto, refuse_unknown_fields
from h3stream.errors import (
    ArtifactNotFoundError,
    FieldViolation,
    GenerationError,
    OverloadedError,
    UnsupportedError,
)
from h3stream.fields import invalid_request
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec, order_violations
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.admission import AdapterFacts, deadline_violations, make_refine_plan, resolve_refinement
from orchestrator.caller import Caller
from orchestrator.config import Settings
from orchestrator.download import find_artifact
from orchestrator.job import Job
from orchestrator.job_files import request_digest
from orchestrator.latents import read_latents
from orchestrator.model_info import ModelInfo
from orchestrator.refine import SOURCE_LATENTS, SOURCE_VIDEO
from orchestrator.scheduler import RETRY_AFTER_S, Scheduler
from orchestrator.staging import staging, take_over
from orchestrator.upload import Messages, read_end, read_header, receive, upload_violations
from services.common.refusal import refuse

MAX_UPLOADS = 8
"""Uploads under way at a time, each of which takes a place on the disk for as long as it lasts; where there are several
tenants, one has half of them at most."""
SPEC, UPLOAD = "spec", "upload"
"""Fields of a header, as violations name them."""


@dataclass(frozen=True)
class _Clip:
    """A clip to refine, its files in the directory that becomes the job's."""

    prompt: str
    clip: ClipSpec
    source: records_pb2.RefineSourceRecord


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
        self._num_uploads: Counter[str] = Counter()  # of each tenant that has some

    async def submit(self, messages: Messages, caller: Caller) -> tuple[Job, bool]:
        """The job of a call, once all has come and been checked, and whether it is that of an earlier request with
        the same key; no lane is held before.

        Raises what `read_header`, `receive` and `Scheduler.submit` raise, InvalidRequestError with every violation,
        JobNotFoundError, UnsupportedError for a source that has not ended, ArtifactNotFoundError for one without
        latents.
        """
        header = await read_header(messages)
        refuse_unknown_fields(header)
        spec = refine_spec_from_proto(header.spec, SPEC)
        refuse_order(header)
        if header.WhichOneof("source") == "job_id":
            digest = request_digest(records_pb2.JobRecord(refinement=header))
            if (known := self._scheduler.known_job(caller, header.idempotency_key, digest)) is not None:
                await read_end(messages)
                return known, True
        self._scheduler.check_open()
        self._scheduler.check_limits(caller.tenant, num_frames=0)  # what is full already
        with staging(self._settings.data) as directory:
            match header.WhichOneof("source"):
                case "job_id":
                    found = await self._from_job(header.job_id, spec, caller, directory)
                    await read_end(messages)
                case "upload":
                    found = await self._from_upload(header.upload, spec, messages, directory, caller.tenant)
                case _:
                    rule = "name a job_id, or announce an upload"
                    raise invalid_request([FieldViolation("source", f"source is missing; {rule}")])
            record = records_pb2.JobRecord(
                tenant=caller.tenant,
                prompt=found.prompt,
                plan=self._plan(spec, found),
                refinement=header,
                source=found.source,
            )
            return self._scheduler.submit(
                record, prepared=directory, request_digest=request_digest(record), caller=caller
            )

    def _plan(self, spec: RefineSpec, found: _Clip) -> video_pb2.Plan:
        refinement = resolve_refinement(spec, found.clip, self._adapters, SPEC)
        is_decoded_anew = refinement.video_denoise > 0 or not found.source.has_video
        bit_rate = self._settings.video_bit_rate if is_decoded_anew else 0
        return make_refine_plan(found.clip, self._model, refinement, bit_rate)

    async def _from_job(self, job_id: str, spec: RefineSpec, caller: Caller, directory: Path) -> _Clip:
        """The clip of a job that has ended; its files get a second name, which outlives their removal there."""
        source = self._scheduler.job(job_id, caller)
        latents = _latents_of(source)
        resolve_refinement(spec, source.clip, self._adapters, SPEC)  # told before anything is read
        video = next((artifact for artifact in source.artifacts if artifact.name == FINAL), None)
        for artifact, own_name in ((latents, SOURCE_LATENTS), (video, SOURCE_VIDEO)):
            if artifact is not None:
                await take_over(source, artifact, directory / own_name)
        return _Clip(source.prompt, source.clip, _source(job_id, latents.sha256, video is not None))

    async def _from_upload(
        self, upload: video_pb2.LatentsUpload, spec: RefineSpec, messages: Messages, directory: Path, tenant: str
    ) -> _Clip:
        """The clip of uploaded latents, which come with what is to be known of it; the seed and shifts that they do not
        tell are the model's."""
        refuse_unknown_fields(upload)
        refuse(upload_violations(upload))
        longest = dataclasses.replace(self._model.default_dense_clip, num_frames=MAX_FRAMES)
        resolve_refinement(spec, longest, self._adapters, SPEC)  # what no clip allows is told before anything is sent
        path = directory / SOURCE_LATENTS
        with self._upload(tenant):
            sha256 = await receive(messages, upload, path)
        try:
            file = await asyncio.to_thread(read_latents, path, self._model.default_dense_clip)
        except ValueError as error:
            raise invalid_request([FieldViolation(UPLOAD, f"the upload {error}", "NO_LATENTS")]) from error
        return _Clip(upload.prompt, file.clip, _source("", sha256, has_video=False))

    @contextlib.contextmanager
    def _upload(self, tenant: str) -> Iterator[None]:
        """A place for an upload. Raises OverloadedError if all are taken, or all that the tenant may have."""
        if self._num_uploads.total() == MAX_UPLOADS:
            raise OverloadedError(
                f"{MAX_UPLOADS} uploads are under way, the most at a time; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        most = MAX_UPLOADS if self._scheduler.tenants.num_tenants() == 1 else MAX_UPLOADS // 2
        if self._num_uploads[tenant] >= most:
            raise OverloadedError(
                f"tenant {tenant} has {self._num_uploads[tenant]} uploads under way of at most {most}, half of the "
                f"server's {MAX_UPLOADS}; try again when one of them has ended",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_uploads[tenant] += 1
        try:
            yield
        finally:
            self._num_uploads[tenant] -= 1
            self._num_uploads += Counter()  # drops those that have none


def refuse_order(header: video_pb2.RefineHeader) -> None:
    """Raises InvalidRequestError for what a request to refine says of when it is to run and what it is called."""
    order, violations = order_from_proto(header)
    deadline_s = order.get("deadline_s")
    violations += order_violations(order.get("priority", "normal"), deadline_s, header.idempotency_key)
    if violations:
        raise invalid_request(violations)
    refuse(deadline_violations(deadline_s))


def _source(job_id: str, latents_sha256: str, has_video: bool) -> records_pb2.RefineSourceRecord:
    return records_pb2.RefineSourceRecord(job_id=job_id, latents_sha256=latents_sha256, has_video=has_video)


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
