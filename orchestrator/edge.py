"""The process that callers reach, in front of the one that runs jobs, which no viewer may slow down.

`python -m orchestrator.edge --listen HOST:PORT --core unix:PATH`, started by `orchestrator/edge_process.py`: answers
VideoService, health and reflection. Streams it sends itself, from the files of jobs; everything else passes through to
the core as bytes. Holds no state but of calls in progress, so nothing is lost with it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio
from grpc_health.v1 import health_pb2

from h3stream.codec import refuse_unknown_fields
from h3stream.errors import FieldViolation, InvalidRequestError, StartupError
from h3stream.fields import invalid_request
from h3stream.status import is_connection_loss
from h3stream.v1 import jobs_pb2, jobs_pb2_grpc, video_pb2
from orchestrator.download import read_artifact
from orchestrator.replay import Replay
from services.common.rpc import RpcEndpoint, connect

SERVICES = (
    video_pb2.DESCRIPTOR.services_by_name["VideoService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
)
"""What callers may call."""
STOP = b"stop\n"
"""Word on standard input that ends the process in peace."""
GRACE_S = 1.0
"""How long streams may then take to send what there still is."""


class Edge:
    """VideoService for callers, in front of the core."""

    def __init__(self, core: str) -> None:
        """core: address of the server of VideoService, JobService and health that is asked."""
        self._channel = connect(core)
        self._jobs: Any = jobs_pb2_grpc.JobServiceStub(self._channel)
        self._shared: dict[str, _SharedReplay] = {}
        self._endpoint = RpcEndpoint(tuple(service.full_name for service in SERVICES))
        # Events leave as the bytes that the log holds, so what sends them has no serializer.
        own: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, request_deserializer=video_pb2.GenerateRequest.FromString
            ),
            "RefineAudio": grpc.stream_stream_rpc_method_handler(
                self._refine, request_deserializer=video_pb2.RefineAudioRequest.FromString
            ),
            "Attach": grpc.unary_stream_rpc_method_handler(
                self._attach, request_deserializer=video_pb2.AttachRequest.FromString
            ),
            "DownloadArtifact": grpc.unary_stream_rpc_method_handler(
                self._download,
                request_deserializer=video_pb2.DownloadArtifactRequest.FromString,
                response_serializer=video_pb2.DownloadArtifactResponse.SerializeToString,
            ),
        }
        for service in SERVICES:
            handlers = {method.name: own.get(method.name) or self._passing_on(method) for method in service.methods}
            generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
            self._endpoint.server.add_generic_rpc_handlers((generic,))

    async def start(self, listen: str) -> str:
        """Serves on "HOST:PORT" (port 0: any free one); returns the address to dial. Raises StartupError."""
        return await self._endpoint.start(listen)

    async def stop(self, grace_s: float) -> None:
        """Takes no new call and ends the running ones after `grace_s` seconds."""
        await self._endpoint.stop(grace_s)
        await self._channel.close()

    async def _generate(self, request: video_pb2.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        async for record in self._submitted(self._jobs.Submit(jobs_pb2.SubmitRequest(generation=request)), context):
            yield record

    async def _refine(
        self, requests: AsyncIterator[video_pb2.RefineAudioRequest], context: Any
    ) -> AsyncIterator[bytes]:
        parts = (jobs_pb2.SubmitRefinementRequest(refinement=request) async for request in requests)
        async for record in self._submitted(self._jobs.SubmitRefinement(parts), context):
            yield record

    async def _submitted(self, submission: Any, context: Any) -> AsyncIterator[bytes]:
        """The events of a job that is being submitted.

        submission: the call to the core; open while the caller is there, for a job that must not go on without.
        """
        try:
            async with _core_errors(context):
                with self._replay((await submission.read()).job_id) as replay:
                    async for record in replay.read():
                        yield record
        finally:
            submission.cancel()

    async def _attach(self, request: video_pb2.AttachRequest, context: Any) -> AsyncIterator[bytes]:
        refuse_unknown_fields(request)
        async with _core_errors(context):
            with self._replay(request.job_id) as replay:
                await replay.begun()
                if request.from_seq > len(replay):  # the core may have told this caller what it is yet to tell here
                    told = await self._jobs.Follow(jobs_pb2.FollowRequest(job_id=request.job_id)).read()
                    replay.advance(Path(told.path), told.num_events)
                async for record in _records_from(request, replay):
                    yield record

    async def _download(
        self, request: video_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncIterator[video_pb2.DownloadArtifactResponse]:
        async with _core_errors(context):
            found = await self._jobs.FindArtifact(jobs_pb2.FindArtifactRequest(download=request))
        yield video_pb2.DownloadArtifactResponse(artifact=found.artifact)
        async for data in read_artifact(Path(found.path), request.job_id, found.artifact, request.offset_bytes):
            yield video_pb2.DownloadArtifactResponse(data=data)

    def _passing_on(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that lets the core answer: bytes, deadline and metadata go there, bytes and status come back."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        assert not method.client_streaming, f"{path} has no handler"
        ask: Any = self._channel.unary_stream(path) if method.server_streaming else self._channel.unary_unary(path)

        def asked(request: bytes, context: Any) -> Any:
            return ask(request, timeout=context.time_remaining(), metadata=context.invocation_metadata())

        async def unary(request: bytes, context: Any) -> bytes:
            async with _core_errors(context):
                answer: bytes = await asked(request, context)
            return answer

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            call = asked(request, context)
            try:
                async with _core_errors(context):
                    async for response in call:
                        yield response
            finally:
                call.cancel()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    @contextmanager
    def _replay(self, job_id: str) -> Iterator[Replay]:
        """The events of a job, for one more reader. All readers of a job share what there is to know of it."""
        shared = self._shared.get(job_id)
        if shared is None or not shared.is_current():
            shared = self._shared[job_id] = _SharedReplay(self._jobs.Follow(jobs_pb2.FollowRequest(job_id=job_id)))
        shared.num_readers += 1
        try:
            yield shared.replay
        finally:
            shared.num_readers -= 1
            if not shared.num_readers:
                shared.close()
                if self._shared.get(job_id) is shared:
                    del self._shared[job_id]


class _SharedReplay:
    """A job that somebody reads, and the core's word on how far it is."""

    def __init__(self, call: Any) -> None:
        """call: JobService.Follow of the job."""
        self.replay = Replay()
        self.num_readers = 0
        """Calls that read it now."""
        self._is_lost = False  # the core, before the job's end
        self._following = asyncio.create_task(self._follow(call))

    def is_current(self) -> bool:
        """Whether one more reader may join.

        Not if its file is gone, which those who read it read on: whether the job is still known is for the core to say.
        """
        return not self._is_lost and (self.replay.path is None or self.replay.path.exists())

    def close(self) -> None:
        """To be called when the last reader has gone."""
        self._following.cancel()
        self.replay.close()

    async def _follow(self, call: Any) -> None:
        try:
            async for told in call:
                self.replay.advance(Path(told.path), told.num_events)
        except Exception as error:  # the job's own, or why there is no more to be had: its readers' matter
            self._is_lost = isinstance(error, aio.AioRpcError) and is_connection_loss(error)
            self.replay.end(error)
        else:
            self.replay.end(None)


def _records_from(request: video_pb2.AttachRequest, replay: Replay) -> AsyncIterator[bytes]:
    """The events of a job from where the caller wants to start. Raises InvalidRequestError if it has no such place."""
    match request.WhichOneof("start"):
        case "from_chunk":
            last = replay.num_chunks - 1
            if not 0 <= request.from_chunk <= last:
                raise _no_start(
                    "from_chunk", f"from_chunk is {request.from_chunk}; the chunks of the job are 0 to {last}"
                )
            return replay.join(request.from_chunk)
        case "live":
            if not request.live:
                raise _no_start("live", "live is false; it must be true, or left out")
            return replay.join()
        case _:
            num_events = len(replay)
            if request.from_seq > num_events:
                raise _no_start(
                    "from_seq",
                    f"from_seq is {request.from_seq}; the job has {num_events} events so far, the most it may be",
                )
            return replay.read(request.from_seq)


def _no_start(field: str, description: str) -> InvalidRequestError:
    return invalid_request([FieldViolation(field, description)])


@asynccontextmanager
async def _core_errors(context: Any) -> AsyncIterator[None]:
    """Ends the call as the core's has ended: same status, same words, same details."""
    try:
        yield
    except aio.AioRpcError as error:
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


def main() -> None:
    """Serves until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.edge", description="Serves callers for a core.")
    parser.add_argument("--listen", required=True, help='"HOST:PORT"; port 0: any free one')
    parser.add_argument("--core", required=True, help='"unix:PATH" of the orchestrator')
    flags = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A signal to the whole group of processes is for the parent, which says when to stop: jobs may yet have to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(_serve(flags.listen, flags.core))
    except StartupError as error:
        print(error, flush=True)
        sys.exit(1)


async def _serve(listen: str, core: str) -> None:
    edge = Edge(core)
    address = await edge.start(listen)
    print(f"listening on {address}", flush=True)
    word = await _word_on_stdin()
    await edge.stop(GRACE_S if word == STOP else 0.0)  # without a word the parent has died


async def _word_on_stdin() -> bytes:
    """What the parent writes; empty if its end of the pipe closes."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(0, readable.set)
    await readable.wait()
    loop.remove_reader(0)
    return os.read(0, len(STOP))


if __name__ == "__main__":
    main()
