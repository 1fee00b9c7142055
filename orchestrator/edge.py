"""The process that callers reach, in front of the one that runs jobs, which no viewer may slow down.

`python -m orchestrator.edge --listen HOST:PORT --core unix:PATH`, started by `orchestrator/edge_process.py`: answers
VideoService, health and reflection. It says who calls (`orchestrator/access`), which the core believes. Streams it
sends itself, from the files of jobs; everything else passes through to the core as bytes. Holds no state but of calls
in progress, so nothing is lost with it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2

from h3stream.codec import refuse_unknown_fields
from h3stream.errors import FieldViolation, InvalidRequestError, StartupError
from h3stream.fields import invalid_request
from h3stream.status import is_connection_loss
from h3stream.v1 import jobs_pb2, jobs_pb2_grpc, video_pb2
from orchestrator.access.audit import AuditLog
from orchestrator.access.connections import ConnectionLimits
from orchestrator.access.guard import Guard, current_call
from orchestrator.access.store import AccessStore
from orchestrator.access.tls import server_credentials
from orchestrator.caller import Caller
from orchestrator.download import read_artifact
from orchestrator.edge_health import EdgeHealth
from orchestrator.edge_settings import EdgeSettings
from orchestrator.replay import Replay
from services.common.listen import is_loopback
from services.common.logs import setup
from services.common.options import add_flags, parse_values
from services.common.rpc import RpcEndpoint, connect

log = logging.getLogger(__name__)

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

    def __init__(
        self, core: str, settings: EdgeSettings | None = None, connections: ConnectionLimits | None = None
    ) -> None:
        """core: address of the server of VideoService, JobService and health that is asked.  settings, connections:
        None: the defaults.  Raises ConfigError if a file that the settings name cannot be used."""
        self._settings = settings or EdgeSettings()
        self._credentials = server_credentials(self._settings)
        self._audit = None if self._settings.audit is None else AuditLog(self._settings.audit)
        has_certificates = self._settings.tls_client_ca is not None
        self._guard = Guard(AccessStore(self._settings.keys, needs_certificate=has_certificates), self._audit)
        self._watching: asyncio.Task[None] | None = None
        self._channel = connect(core)
        self._jobs: Any = jobs_pb2_grpc.JobServiceStub(self._channel)
        self._shared: dict[_Viewed, _SharedReplay] = {}
        self._endpoint = RpcEndpoint(
            tuple(service.full_name for service in SERVICES),
            interceptors=[self._guard],
            options=(connections or ConnectionLimits()).options(),
        )
        health = EdgeHealth(self._channel)
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
            "Check": grpc.unary_unary_rpc_method_handler(
                health.check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                health.watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
        }
        for service in SERVICES:
            handlers = {method.name: own.get(method.name) or self._passing_on(method) for method in service.methods}
            generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
            self._endpoint.server.add_generic_rpc_handlers((generic,))

    async def start(self, listen: str) -> str:
        """Serves on "HOST:PORT" (port 0: any free one); returns the address to dial. Raises StartupError."""
        if self._settings.authenticates and self._credentials is None and not is_loopback(listen.rpartition(":")[0]):
            log.warning("keys travel unencrypted: tls_cert is not set, and %s is not only this machine's", listen)
        address = await self._endpoint.start(listen, self._credentials)
        self._watching = asyncio.create_task(self._guard.watch())
        return address

    async def stop(self, grace_s: float) -> None:
        """Takes no new call and ends the running ones after `grace_s` seconds."""
        await self._endpoint.stop(grace_s)
        await self._guard.finish()
        await self._channel.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._audit is not None:
            self._audit.close()

    async def _generate(self, request: video_pb2.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        current_call().job_id = request.branch.job_id  # until the new job is known: it may be refused
        submission = self._jobs.Submit(jobs_pb2.SubmitRequest(generation=request), metadata=_caller().metadata())
        async for record in self._submitted(submission, context):
            yield record

    async def _refine(
        self, requests: AsyncIterator[video_pb2.RefineAudioRequest], context: Any
    ) -> AsyncIterator[bytes]:
        refusal: InvalidRequestError | None = None
        call = current_call()

        async def parts() -> AsyncIterator[jobs_pb2.SubmitRefinementRequest]:
            nonlocal refusal
            try:
                async for request in requests:
                    call.job_id = call.job_id or request.header.job_id  # until the new job is known
                    yield jobs_pb2.SubmitRefinementRequest(refinement=request)
            except InvalidRequestError as error:  # the core must not take what came before for the whole
                refusal = error
                submission.cancel()

        submission = self._jobs.SubmitRefinement(parts(), metadata=_caller().metadata())
        try:
            async for record in self._submitted(submission, context):
                yield record
        except asyncio.CancelledError:
            if refusal is None:
                raise
            raise refusal from None

    async def _submitted(self, submission: Any, context: Any) -> AsyncIterator[bytes]:
        """The events of a job that is being submitted.

        submission: the call to the core; open while the caller is there, for a job that must not go on without.
        """
        try:
            async with _core_errors(context):
                job_id = current_call().job_id = (await submission.read()).job_id
                with self._replay(job_id) as replay:
                    async for record in replay.read():
                        yield record
        finally:
            submission.cancel()

    async def _attach(self, request: video_pb2.AttachRequest, context: Any) -> AsyncIterator[bytes]:
        refuse_unknown_fields(request)
        current_call().job_id = request.job_id
        async with _core_errors(context):
            with self._replay(request.job_id) as replay:
                await replay.begun()
                if request.from_seq > len(replay):  # the core may have told this caller what it is yet to tell here
                    told = await self._follow(request.job_id).read()
                    replay.advance(Path(told.path), told.num_events)
                async for record in _records_from(request, replay):
                    yield record

    async def _download(
        self, request: video_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncIterator[video_pb2.DownloadArtifactResponse]:
        current_call().job_id = request.job_id
        async with _core_errors(context):
            asked = jobs_pb2.FindArtifactRequest(download=request)
            found = await self._jobs.FindArtifact(asked, metadata=_caller().metadata())
        yield video_pb2.DownloadArtifactResponse(artifact=found.artifact)
        async for data in read_artifact(Path(found.path), request.job_id, found.artifact, request.offset_bytes):
            yield video_pb2.DownloadArtifactResponse(data=data)

    def _follow(self, job_id: str) -> Any:
        """The core's word on how far a job is, for who calls."""
        return self._jobs.Follow(jobs_pb2.FollowRequest(job_id=job_id), metadata=_caller().metadata())

    def _passing_on(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that lets the core answer: bytes and deadline go there, bytes and status come back.

        Of the caller's metadata nothing goes: it may hold what no call can carry on, and the core needs none of it.
        """
        path = f"/{method.containing_service.full_name}/{method.name}"
        assert not method.client_streaming, f"{path} has no handler"
        assert not method.server_streaming, f"{path} has no handler"
        ask: Any = self._channel.unary_unary(path)

        async def unary(request: bytes, context: Any) -> bytes:
            current_call().job_id = _job_id(method, request)
            async with _core_errors(context):
                answer: bytes = await ask(request, timeout=context.time_remaining(), metadata=_caller().metadata())
            return answer

        return grpc.unary_unary_rpc_method_handler(unary)

    @contextmanager
    def _replay(self, job_id: str) -> Iterator[Replay]:
        """The events of a job, for one more reader. All readers of a job who may do the same share what there is to
        know of it: the core has been asked whether one of them may read it."""
        viewed = (job_id, replace(_caller(), key_id="", request_id=""))
        shared = self._shared.get(viewed)
        if shared is None or not shared.is_current():
            shared = self._shared[viewed] = _SharedReplay(self._follow(job_id))
        shared.num_readers += 1
        try:
            yield shared.replay
        finally:
            shared.num_readers -= 1
            if not shared.num_readers:
                shared.close()
                if self._shared.get(viewed) is shared:
                    del self._shared[viewed]


_Viewed = tuple[str, Caller]
"""A job, and as whom it is seen."""


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


def _caller() -> Caller:
    """Who makes the call that the running task answers."""
    return current_call().caller


def _job_id(method: MethodDescriptor, request: bytes) -> str:
    """The job that a request names; empty where it names none, or is no such request."""
    if "job_id" not in method.input_type.fields_by_name:
        return ""
    try:
        return str(getattr(GetMessageClass(method.input_type).FromString(request), "job_id"))  # noqa: B009 # any of them
    except DecodeError:
        return ""


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
    add_flags(parser, EdgeSettings)
    values = vars(parser.parse_args())
    listen, core = values.pop("listen"), values.pop("core")
    given = {name: value for name, value in values.items() if value is not None}
    # A signal to the whole group of processes is for the parent, which says when to stop: jobs may yet have to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        settings = EdgeSettings(**parse_values(EdgeSettings, given))
        setup(settings.log_format)
        # gRPC writes a traceback for whatever strangers send as text that is none.
        logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "Invalid encoding" not in str(record.msg))
        # Connections are bounded by ConnectionLimits, which says so to those beyond; a shell's limit would not.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        asyncio.run(_serve(listen, core, settings))
    except StartupError as error:
        print(error, flush=True)
        sys.exit(1)


async def _serve(listen: str, core: str, settings: EdgeSettings) -> None:
    edge = Edge(core, settings)
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
