"""DitService: decode the call, run the verb, encode the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from h3stream.codec import (
    KV_STORAGE_TO_PROTO,
    clip_spec_from_proto,
    preview_spec_from_proto,
    refine_spec_from_proto,
    refine_spec_to_proto,
)
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.incoming import receive_header, receive_tensors
from services.common.preview_map import PreviewMap
from services.common.tensors import TensorAssembler, to_parts
from services.common.verbs import Cancelled, VerbRunner
from services.common.worker import ServedWorker
from services.dit.config import DitConfig
from services.dit.noise import NoiseSegment
from services.dit.preview import MEDIA_TYPE, Still
from services.dit.refine.plan import RefinePlan
from services.dit.refine.refiner import Branch, StepReport
from services.dit.refine.request import FIELD, refine_tensors, text_tensors
from services.dit.refine.verb import Refined, RefineListener
from services.dit.rows import ChunkLatents
from services.dit.worker import DitWorker


def build(config: DitConfig) -> ServedWorker:
    """Loads the model and puts its service in front. Raises StartupError if it cannot be loaded."""
    worker = DitWorker(config)
    runner = VerbRunner(worker.name)
    servicer = DitServicer(worker, runner)

    def register(server: aio.Server) -> None:
        workers_pb2_grpc.add_DitServiceServicer_to_server(servicer, server)

    return ServedWorker(
        worker=worker,
        runner=runner,
        service_name="h3stream.v1.DitService",
        register=register,
        libraries=("torch", "diffusers", "safetensors"),
        adapters=worker.adapters,
        close=worker.close,
    )


class DitServicer(workers_pb2_grpc.DitServiceServicer):
    """DitService over a worker whose verbs run on the runner's thread."""

    def __init__(self, worker: DitWorker, runner: VerbRunner) -> None:
        self._worker = worker
        self._runner = runner

    async def OpenSession(
        self, request_iterator: AsyncIterator[workers_pb2.DitServiceOpenSessionRequest], context: Any
    ) -> workers_pb2.DitServiceOpenSessionResponse:
        header = await receive_header("OpenSession", request_iterator)
        text = await receive_tensors(
            "OpenSession", request_iterator, TensorAssembler(text_tensors(self._worker.text_dim))
        )
        spec = preview_spec_from_proto(header.preview) if header.HasField("preview") else None
        preview_map = PreviewMap.from_proto(header.preview_map) if header.HasField("preview_map") else None
        session_id, clip = header.session_id, clip_spec_from_proto(header.clip)
        noise = [NoiseSegment(segment.first_chunk, segment.seed) for segment in header.noise]
        stats = await self._runner.run(
            lambda cancelled: self._worker.open_session(
                session_id, clip, text["context"], text["token_tags"], cancelled, noise
            )
        )
        reason = ""
        if spec is not None:
            reason = await self._runner.run(lambda _: self._worker.preview(session_id, spec, preview_map))
        response = workers_pb2.DitServiceOpenSessionResponse(preview_unavailable_reason=reason)
        if stats is not None:  # a dense clip has no KV cache
            response.kv_storage = KV_STORAGE_TO_PROTO[stats.storage]
            response.kv_storage_fallback_reason = stats.fallback_reason
            response.num_committed_chunks = stats.num_committed - 1  # the first entry is the text
        return response

    async def SampleChunk(
        self, request: workers_pb2.SampleChunkRequest, context: Any
    ) -> AsyncIterator[workers_pb2.SampleChunkResponse]:
        def verb(emit: Callable[[workers_pb2.SampleChunkResponse], None], cancelled: Cancelled) -> None:
            def on_step(step: int, num_steps: int) -> None:
                emit(workers_pb2.SampleChunkResponse(step=workers_pb2.StepDone(step=step, num_steps=num_steps)))

            def on_still(still: Still, step: int, num_steps: int) -> None:
                emit(workers_pb2.SampleChunkResponse(preview=_preview(still, request.chunk_index, step, num_steps)))

            latents = self._worker.sample_chunk(request.session_id, request.chunk_index, on_step, cancelled, on_still)
            for name, tensor in (("video", latents.video), ("audio", latents.audio)):
                for part in to_parts(name, tensor):
                    emit(workers_pb2.SampleChunkResponse(tensor=part))

        async for response in self._runner.stream(verb):
            yield response

    async def RestoreChunk(
        self, request_iterator: AsyncIterator[workers_pb2.RestoreChunkRequest], context: Any
    ) -> workers_pb2.RestoreChunkResponse:
        header = await receive_header("RestoreChunk", request_iterator)
        session_id, index = header.session_id, header.chunk_index
        shapes = self._worker.latent_shapes(session_id, index)
        tensors = await receive_tensors("RestoreChunk", request_iterator, TensorAssembler.of_floats(shapes))
        latents = ChunkLatents(tensors["video"], tensors["audio"])
        await self._runner.run(lambda _: self._worker.restore_chunk(session_id, index, latents))
        return workers_pb2.RestoreChunkResponse()

    async def SampleDense(
        self, request: workers_pb2.SampleDenseRequest, context: Any
    ) -> AsyncIterator[workers_pb2.SampleDenseResponse]:
        def verb(emit: Callable[[workers_pb2.SampleDenseResponse], None], cancelled: Cancelled) -> None:
            def on_step(step: int, num_steps: int) -> None:
                emit(workers_pb2.SampleDenseResponse(step=workers_pb2.StepDone(step=step, num_steps=num_steps)))

            def on_still(still: Still, step: int, num_steps: int) -> None:
                emit(workers_pb2.SampleDenseResponse(preview=_preview(still, -1, step, num_steps)))

            self._worker.sample_dense(request.session_id, on_step, cancelled, on_still)

        async for response in self._runner.stream(verb):
            yield response

    async def CommitChunk(
        self, request: workers_pb2.CommitChunkRequest, context: Any
    ) -> workers_pb2.CommitChunkResponse:
        stats = await self._runner.run(
            lambda cancelled: self._worker.commit_chunk(request.session_id, request.chunk_index, cancelled)
        )
        return workers_pb2.CommitChunkResponse(
            num_committed=stats.num_committed,
            retained_entries=stats.retained,
            retained_rows=stats.retained_rows,
        )

    async def RefineAudio(
        self, request_iterator: AsyncIterator[workers_pb2.DitServiceRefineAudioRequest], context: Any
    ) -> AsyncIterator[workers_pb2.DitServiceRefineAudioResponse]:
        header = await receive_header("RefineAudio", request_iterator)
        clip, spec = clip_spec_from_proto(header.clip), refine_spec_from_proto(header.spec, FIELD)
        spec = self._worker.filled_refinement(clip, spec)  # before anything is taken in
        tensors = await receive_tensors(
            "RefineAudio", request_iterator, refine_tensors(clip, spec, self._worker.text_dim)
        )
        branches = [
            Branch(tensors[f"{prefix}context"], tensors[f"{prefix}token_tags"])
            for prefix in ("", "negative_")
            if f"{prefix}context" in tensors
        ]
        latents = ChunkLatents(tensors["video"], tensors["audio"])

        def verb(emit: Callable[[workers_pb2.DitServiceRefineAudioResponse], None], cancelled: Cancelled) -> None:
            message = workers_pb2.DitServiceRefineAudioResponse
            listener = RefineListener(
                started=lambda plan: emit(message(started=_started(plan))),
                stepped=lambda report, done, total: emit(message(progress=_progress(report, done, total))),
                cancelled=cancelled,
            )
            refined = self._worker.refine_audio(clip, spec, latents, branches, listener)
            emit(message(summary=_summary(refined)))
            made = {"audio": refined.latents.audio}
            if spec.video_denoise > 0:
                made["video"] = refined.latents.video
            if refined.exact_audio is not None:
                made["exact_audio"] = refined.exact_audio
            for name, tensor in made.items():
                for part in to_parts(name, tensor):
                    emit(message(tensor=part))

        async for response in self._runner.stream(verb):
            yield response

    async def CloseSession(
        self, request: workers_pb2.DitServiceCloseSessionRequest, context: Any
    ) -> workers_pb2.DitServiceCloseSessionResponse:
        stats = await self._runner.run(lambda _: self._worker.close_session(request.session_id))
        if stats is None:
            return workers_pb2.DitServiceCloseSessionResponse(was_open=False)
        return workers_pb2.DitServiceCloseSessionResponse(
            was_open=True,
            num_noise_forwards=stats.num_noise_forwards,
            num_clean_forwards=stats.num_clean_forwards,
            peak_kv_bytes=stats.kv.peak_kv_bytes if stats.kv else 0,
        )


def _started(plan: RefinePlan) -> types_pb2.RefineStarted:
    return types_pb2.RefineStarted(
        spec=refine_spec_to_proto(plan.spec),
        num_rows=plan.num_rows,
        num_live_rows=plan.num_live_rows,
        num_blocks=plan.num_blocks,
        backend=f"CACHE_BACKEND_{plan.backend.upper() or 'UNSPECIFIED'}",
        reason=plan.reason,
        cache_bytes=plan.cache_bytes,
        transient_bytes=plan.transient_bytes,
        has_cache=plan.has_cache,
    )


def _progress(report: StepReport, step: int, num_steps: int) -> types_pb2.RefineProgress:
    return types_pb2.RefineProgress(
        step=step,
        num_steps=num_steps,
        mode=report.mode,
        reason=report.reason,
        num_forwards=report.num_forwards,
        num_blocks_cached=report.num_blocks["cached"],
        num_blocks_built=report.num_blocks["build"],
        num_blocks_exact=report.num_blocks["exact"],
        num_query_rows=report.num_query_rows,
        num_key_rows=report.num_key_rows,
        num_fed_rows=report.num_fed_rows,
        num_bytes_moved=report.num_bytes_moved,
        block_s=report.block_s,
        outside_s=report.outside_s,
        cache_bytes=report.cache_bytes,
    )


def _summary(refined: Refined) -> workers_pb2.RefineSummary:
    return workers_pb2.RefineSummary(
        change=refined.change,
        against_exact=refined.against_exact,
        sampling_s=refined.sampling_s,
        exact_sampling_s=refined.exact_sampling_s,
        is_warm=refined.is_warm,
    )


def _preview(still: Still, chunk_index: int, step: int, num_steps: int) -> types_pb2.Preview:
    return types_pb2.Preview(
        data=still.data,
        media_type=MEDIA_TYPE,
        width=still.width,
        height=still.height,
        chunk_index=chunk_index,
        step=step,
        num_steps=num_steps,
    )
