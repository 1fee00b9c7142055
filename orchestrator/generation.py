"""From a request to make a clip to a job: its plan, and for a branch what it has of another job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from h3stream.codec import request_from_proto
from h3stream.errors import PhaseError
from h3stream.request import ClipSpec, GenerateRequest
from h3stream.v1 import records_pb2, video_pb2
from orchestrator.admission import AdapterFacts, make_plan, resolve, resolve_refinement
from orchestrator.branch import prepare, resolve_branch
from orchestrator.caller import Caller
from orchestrator.config import Settings
from orchestrator.job import Job
from orchestrator.job_files import request_digest
from orchestrator.model_info import ModelInfo
from orchestrator.scheduler import Scheduler
from orchestrator.staging import staging


class GenerateDesk:
    """Takes requests to make a clip."""

    def __init__(
        self, scheduler: Scheduler, model: ModelInfo, adapters: Sequence[AdapterFacts], settings: Settings
    ) -> None:
        """adapters: the registry."""
        self._scheduler = scheduler
        self._model = model
        self._adapters = adapters
        self._settings = settings

    async def submit(self, request: video_pb2.GenerateRequest, caller: Caller) -> tuple[Job, bool]:
        """The job of a request, and whether an earlier request with the same key made it.

        Raises what `resolve`, `branch.prepare` and `Scheduler.submit` raise.
        """
        asked = request_from_proto(request)
        digest = request_digest(records_pb2.JobRecord(generation=request))
        if (known := self._scheduler.known_job(caller, asked.idempotency_key, digest)) is not None:
            return known, True
        record = self.resolve(asked, caller)
        record.generation.CopyFrom(request)
        if asked.branch is None:
            return self._scheduler.submit(record, prepared=None, request_digest=digest, caller=caller)
        self._scheduler.check_open()
        self._scheduler.check_limits(caller.tenant, record.plan.clip.num_frames)
        with staging(self._settings.data) as directory:
            source = self._scheduler.job(asked.branch.job_id, caller)
            media = await prepare(source, asked.branch.from_chunk, directory)
            job, is_known = self._scheduler.submit(record, prepared=directory, request_digest=digest, caller=caller)
        if not is_known:
            with suppress(PhaseError):  # what is not told now will be when it is decoded again
                for piece in media:
                    job.emit(piece)
        return job, is_known

    def resolve(self, request: GenerateRequest, caller: Caller) -> records_pb2.JobRecord:
        """What a request makes, checked and complete: prompt, plan and noise of its job; nothing is queued or loaded.

        Raises InvalidRequestError with every violation, UnsupportedError, and for a branch JobNotFoundError and what
        `resolve_branch` raises.
        """
        if request.branch is None:
            clip = resolve(request, self._model, self._adapters)
            return records_pb2.JobRecord(
                tenant=caller.tenant, prompt=request.prompt, plan=self._make_plan(request, clip, None)
            )
        source = self._scheduler.job(request.branch.job_id, caller)
        found = resolve_branch(request, source, self._adapters)
        return records_pb2.JobRecord(
            tenant=caller.tenant,
            prompt=found.prompt,
            plan=self._make_plan(request, found.clip, found.branch),
            noise=found.noise,
        )

    def _make_plan(self, request: GenerateRequest, clip: ClipSpec, branch: video_pb2.Branch | None) -> video_pb2.Plan:
        spec = request.refine_audio
        refinement = None if spec is None else resolve_refinement(spec, clip, self._adapters, "refine_audio")
        return make_plan(
            clip,
            self._model,
            self._adapters,
            self._settings.video_bit_rate,
            request.artifacts,
            self._settings.preview if request.preview is None else request.preview,
            refinement,
            branch,
        )
