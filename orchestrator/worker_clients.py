"""The three workers as the session sees them. gRPC and its errors end in this file.

Tensors pass through in parts, as they arrive or as a file has them: the orchestrator never looks inside a latent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from core.phases import Worker
from h3stream.codec import clip_spec_to_proto
from h3stream.errors import DeadlineError, JobCancelledError, NotReadyError, WorkerLostError
from h3stream.request import ClipSpec
from h3stream.status import from_rpc_error
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.rpc import connect

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 10.0
"""A worker answers this at once, whatever it computes; one that does not is frozen."""

TensorParts = tuple[types_pb2.TensorPart, ...]
"""Whole tensors, cut for the wire, in order."""


@dataclass(frozen=True)
class StepDone:
    """A noise forward is done."""

    step: int
    """Forwards done so far in this chunk, or in a dense clip."""


@dataclass(frozen=True)
class Stills:
    """What stills a session makes."""

    spec: types_pb2.PreviewSpec
    """How large and how often."""
    preview_map: types_pb2.PreviewMap
    """How they are made of latents."""


class WorkerClient:
    """What every worker offers: what it is, and its hold on the device."""

    def __init__(self, worker: Worker, address: str, token: str) -> None:
        """token: what the worker asks of its callers; empty: nothing."""
        self.worker = worker
        self.is_lost = False
        """Whether a call has broken: nobody is there any more, or nobody knows what the worker is in the middle of."""
        self._channel = connect(address, token)
        self._lifecycle: Any = workers_pb2_grpc.WorkerServiceStub(self._channel)

    async def describe(self) -> workers_pb2.DescribeResponse:
        """What the worker is and what it holds. Raises WorkerLostError if it is gone, or stands still."""
        try:
            with self._errors():
                response: workers_pb2.DescribeResponse = await self._lifecycle.Describe(
                    workers_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
                )
                return response
        except DeadlineError as error:
            raise WorkerLostError(f"the {self.worker.value} worker stands still") from error

    async def enter_phase(self) -> int:
        """Brings the weights onto the device; returns their bytes."""
        with self._errors():
            response = await self._lifecycle.EnterPhase(workers_pb2.EnterPhaseRequest())
            return int(response.device_weight_bytes)

    async def leave_phase(self) -> workers_pb2.LeavePhaseResponse:
        """Takes the weights off the device, behind whatever the worker is doing."""
        with self._errors():
            response: workers_pb2.LeavePhaseResponse = await self._lifecycle.LeavePhase(workers_pb2.LeavePhaseRequest())
            return response

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()

    async def _responses(self, call: Any) -> AsyncIterator[Any]:
        """The responses of a stream, which ends with its reader: a worker must not compute for nobody."""
        try:
            with self._errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def _exchange(self, call: Any, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """The responses of a stream, once the requests have been sent: their own failure is the caller's to see."""
        try:
            with self._errors():
                try:
                    async for request in requests:
                        await call.write(request)
                    await call.done_writing()
                except asyncio.InvalidStateError:
                    pass  # the call has ended early: its status is what the responses end with
                async for response in call:
                    yield response
        finally:
            call.cancel()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            # The transport's own answers: nobody is listening any more, or the worker ended the call while it stopped.
            # (A call that we cancel raises CancelledError.)
            if type(error) in (NotReadyError, JobCancelledError):
                # Callers learn who is gone, the log how it was reached: paths of the server are no caller's business.
                log.warning("the %s worker is gone: %s", self.worker.value, error.message)
                self.is_lost = True
                error = WorkerLostError(f"the {self.worker.value} worker is gone")
            raise error from rpc_error
        except grpc.aio.UsageError as usage_error:  # the connection was ended when the lane could not be started again
            raise WorkerLostError(f"the {self.worker.value} worker is gone") from usage_error


class TextEncoderClient(WorkerClient):
    """Prompt to hidden states."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(Worker.TEXT_ENCODER, address, token)
        self._stub: Any = workers_pb2_grpc.TextEncoderServiceStub(self._channel)

    async def lookup(self, prompt: str) -> TensorParts | None:
        """The hidden states of a prompt encoded before, or None. Needs no phase."""
        call = self._stub.LookupEmbedding(workers_pb2.LookupEmbeddingRequest(prompt=prompt))
        responses = [response async for response in self._responses(call)]
        return _tensors(responses) if responses[0].header.is_cached else None

    async def encode(self, prompt: str) -> TensorParts:
        """The hidden states of a prompt."""
        call = self._stub.Encode(workers_pb2.EncodeRequest(prompt=prompt))
        return _tensors([response async for response in self._responses(call)])


class DitClient(WorkerClient):
    """Sampling: the streaming rollout and the dense sampler."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(Worker.DIT, address, token)
        self._stub: Any = workers_pb2_grpc.DitServiceStub(self._channel)

    async def open_session(
        self,
        session_id: str,
        clip: ClipSpec,
        noise: Sequence[workers_pb2.NoiseSegment],
        embedding: TensorParts,
        stills: Stills | None,
    ) -> workers_pb2.DitServiceOpenSessionResponse:
        """Draws the noise and puts the text into the KV cache, or through the refiner for a dense clip; a session that
        is open stays as it is.

        noise: where its seeds are others than the clip's.  stills: to make on the way; None: none.
        """
        message = workers_pb2.DitServiceOpenSessionRequest
        header = workers_pb2.DitSessionHeader(session_id=session_id, clip=clip_spec_to_proto(clip), noise=noise)
        if stills is not None:
            header.preview.CopyFrom(stills.spec)
            header.preview_map.CopyFrom(stills.preview_map)
        with self._errors():
            response: workers_pb2.DitServiceOpenSessionResponse = await self._stub.OpenSession(
                iter([message(header=header), *(message(tensor=part) for part in embedding)])
            )
            return response

    async def sample_chunk(
        self, session_id: str, chunk_index: int
    ) -> AsyncIterator[StepDone | types_pb2.Preview | TensorParts]:
        """Yields a StepDone per noise forward, behind it the still that shows it, if any, then the chunk's latents.

        Of a dense clip, which has been sampled by then, any chunk's latents; the device is not needed.
        """
        request = workers_pb2.SampleChunkRequest(session_id=session_id, chunk_index=chunk_index)
        latents = []
        async for response in self._responses(self._stub.SampleChunk(request)):
            if response.HasField("step"):
                yield StepDone(response.step.step)
            elif response.HasField("preview"):
                yield response.preview
            else:
                latents.append(response.tensor)
        yield tuple(latents)

    async def sample_dense(self, session_id: str) -> AsyncIterator[StepDone | types_pb2.Preview]:
        """Samples a dense clip; yields as `sample_chunk` does, which then has its latents."""
        request = workers_pb2.SampleDenseRequest(session_id=session_id)
        async for response in self._responses(self._stub.SampleDense(request)):
            yield StepDone(response.step.step) if response.HasField("step") else response.preview

    async def refine_audio(
        self, clip: ClipSpec, spec: types_pb2.RefineSpec, tensors: AsyncIterable[types_pb2.TensorPart]
    ) -> AsyncIterator[
        types_pb2.RefineStarted | types_pb2.RefineProgress | workers_pb2.RefineSummary | types_pb2.TensorPart
    ]:
        """Refines the sound of a whole clip; yields what is about to be done, a message per step, what was done, then
        the refined tensors.

        tensors: the clip's latents and the hidden states of its texts.
        """
        message = workers_pb2.DitServiceRefineAudioRequest

        async def requests() -> AsyncIterator[workers_pb2.DitServiceRefineAudioRequest]:
            yield message(header=workers_pb2.DitRefineHeader(clip=clip_spec_to_proto(clip), spec=spec))
            async for part in tensors:
                yield message(tensor=part)

        async for response in self._exchange(self._stub.RefineAudio(), requests()):
            yield getattr(response, response.WhichOneof("payload"))

    async def restore_chunk(self, session_id: str, chunk_index: int, latents: TensorParts) -> None:
        """Lets a chunk stand as if it had been sampled there. Needs no phase."""
        message = workers_pb2.RestoreChunkRequest
        header = workers_pb2.RestoreChunkHeader(session_id=session_id, chunk_index=chunk_index)
        requests = [message(header=header), *(message(tensor=part) for part in latents)]
        with self._errors():
            await self._stub.RestoreChunk(iter(requests))

    async def commit_chunk(self, session_id: str, chunk_index: int) -> None:
        """Puts the chunk sampled last into the KV cache."""
        request = workers_pb2.CommitChunkRequest(session_id=session_id, chunk_index=chunk_index)
        with self._errors():
            await self._stub.CommitChunk(request)

    async def close_session(self, session_id: str) -> None:
        """Frees a session, behind whatever the worker is doing."""
        with self._errors():
            await self._stub.CloseSession(workers_pb2.DitServiceCloseSessionRequest(session_id=session_id))


class VaeClient(WorkerClient):
    """Latents to media."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(Worker.VAE, address, token)
        self._stub: Any = workers_pb2_grpc.VaeServiceStub(self._channel)

    async def open_session(
        self, session_id: str, clip: ClipSpec, artifact_directory: str, artifacts: Sequence[str]
    ) -> workers_pb2.VaeServiceOpenSessionResponse:
        """Starts a clip; a session that is open stays as it is.

        artifacts: names of those to write in the directory.
        """
        request = workers_pb2.VaeServiceOpenSessionRequest(
            session_id=session_id,
            clip=clip_spec_to_proto(clip),
            artifact_directory=artifact_directory,
            artifacts=artifacts,
        )
        with self._errors():
            response: workers_pb2.VaeServiceOpenSessionResponse = await self._stub.OpenSession(request)
            return response

    async def decode_chunk(
        self, session_id: str, chunk_index: int, latents: TensorParts
    ) -> AsyncIterator[types_pb2.InitSegment | types_pb2.Fragment | str]:
        """Yields what the chunk's latents made final: the init segment once, then fragments; last, where the media
        stream ends before the clip, why."""
        message = workers_pb2.DecodeChunkRequest
        header = workers_pb2.DecodeChunkHeader(session_id=session_id, chunk_index=chunk_index)
        requests = [message(header=header), *(message(tensor=part) for part in latents)]
        async for response in self._responses(self._stub.DecodeChunk(iter(requests))):
            yield getattr(response, response.WhichOneof("payload"))

    async def decode_audio(
        self, header: workers_pb2.DecodeAudioHeader, tensors: AsyncIterable[types_pb2.TensorPart]
    ) -> AsyncIterator[types_pb2.InitSegment | types_pb2.Fragment | workers_pb2.DecodeAudioFinished]:
        """Decodes a refined sound; yields its rendition, then what was made and measured.

        tensors: of the sound, of the sound before, and of the exact result where there is one.
        """
        message = workers_pb2.DecodeAudioRequest

        async def requests() -> AsyncIterator[workers_pb2.DecodeAudioRequest]:
            yield message(header=header)
            async for part in tensors:
                yield message(tensor=part)

        async for response in self._exchange(self._stub.DecodeAudio(), requests()):
            yield getattr(response, response.WhichOneof("payload"))

    async def finish(self, session_id: str) -> workers_pb2.FinishResponse:
        """Completes the artifacts."""
        with self._errors():
            response: workers_pb2.FinishResponse = await self._stub.Finish(
                workers_pb2.FinishRequest(session_id=session_id)
            )
            return response

    async def close_session(self, session_id: str) -> None:
        """Frees a session, behind whatever the worker is doing."""
        with self._errors():
            await self._stub.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(session_id=session_id))


def _tensors(responses: list[Any]) -> TensorParts:
    return tuple(r.tensor for r in responses if r.HasField("tensor"))
