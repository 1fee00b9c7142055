"""The asynchronous client. `h3stream.client` is its blocking twin, with the same verbs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc import aio

from h3stream import codec
from h3stream.artifact_file import open_sink
from h3stream.channel import CHANNEL_OPTIONS
from h3stream.clip_file import ClipFile
from h3stream.errors import InvalidRequestError
from h3stream.events import Artifact, Completed, Event, Plan
from h3stream.fields import sendable
from h3stream.job import AdapterInfo, Job, ServerInfo
from h3stream.refine import RefineOptions, RefineSpec, make_spec
from h3stream.request import GenerateRequest, RequestOptions, make_request
from h3stream.status import from_rpc_error
from h3stream.stream import RECONNECT_S, EventOrder, EventResponse, Line, Reconnection, StallBudget, attach_request
from h3stream.upload import RefineCall, Source
from h3stream.v1 import video_pb2, video_pb2_grpc

Response = TypeVar("Response")


class AsyncGeneration(AsyncIterator[Event]):
    """A job in progress: an asynchronous iterator over its events.

    Closing it early (or leaving its `async with` block, or dropping it) ends the call; the job goes on unless the
    request says `cancel_on_disconnect`. Raises the error that ends the job; what was yielded before stays valid.
    """

    def __init__(self, line: Line, budget: StallBudget) -> None:
        """Made by the client."""
        self._line = line
        self._events = _events(line, budget)

    @property
    def job_id(self) -> str:
        """The job; empty until the first event of a new one has come."""
        return self._line.order.job_id

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Ends the call; changes nothing once it has ended."""
        await self._events.aclose()
        self._line.call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """A connection to one server, made when the first call needs it. Every call raises a GenerationError if it fails.

    No job is made twice; a job's events go on after a lost connection. Belongs to the event loop in which it was made.
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        """address: "HOST:PORT".  timeout_s: deadline of every call that does not follow a job."""
        self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = video_pb2_grpc.VideoServiceStub(self._channel)
        self._address = address
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | GenerateRequest,
        *,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> AsyncGeneration:
        """Makes a clip; returns an asynchronous iterator over its events.

        prompt: the prompt, or a whole request.  options: fields of GenerateRequest.
        stall_timeout_s: raise DeadlineError once the job has stood still for so long, waiting in the queue included;
        heartbeats only show that it is alive. None waits for ever.
        reconnect_s: how long a lost connection is tried again once the job has been accepted; 0 for never. Not at all
        for a request with `cancel_on_disconnect`, whose job ends with its connection.
        """
        request = make_request(prompt, options)
        budget = StallBudget(stall_timeout_s)
        again = Reconnection(0.0 if request.cancel_on_disconnect else reconnect_s)
        call = self._stub.Generate(codec.request_to_proto(request))
        return AsyncGeneration(Line(call, self._stub.Attach, EventOrder(), again, address=self._address), budget)

    def attach(
        self,
        job_id: str,
        *,
        from_seq: int | None = None,
        from_chunk: int | None = None,
        live: bool = False,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> AsyncGeneration:
        """Follows a job, running or ended; returns an asynchronous iterator over its events.

        Leaving it never cancels the job.
        Without a start, from event 0 on.  from_seq: from this event on; at most the number of events so far.
        from_chunk: what a player needs to start at this chunk: `Accepted`, the InitSegment, then everything from the
        chunk's first keyframe on, which is waited for.  live: the same from the latest keyframe on.
        The others are those of `generate`; a connection is tried again from the start on.
        """
        request = attach_request(job_id, from_seq, from_chunk, live)
        budget = StallBudget(stall_timeout_s)
        again = Reconnection(reconnect_s)
        call = self._stub.Attach(request)
        return AsyncGeneration(Line(call, self._stub.Attach, EventOrder(request), again, address=self._address), budget)

    def refine(
        self,
        source: Source,
        spec: RefineSpec | None = None,
        *,
        prompt: str = "",
        cancel_on_disconnect: bool = False,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RefineOptions],
    ) -> AsyncGeneration:
        """Refines the sound of a finished clip, as a job of its own; returns an asynchronous iterator over its events.

        The source never changes; the refined clip is the artifact `refined.mp4`, and `refined_media` of the events.
        source: the id of a job, a Job or a generation that has ended; or the Path of a `latents.safetensors`, which is
        uploaded in pieces and checked on arrival.  prompt: what the latents of a file were made with.
        spec, options: how it is refined; options are fields of RefineSpec.
        A file is never sent twice: a connection that is lost before there is a job raises NotReadyError. The time of an
        upload counts as standing still.
        The others are those of `generate`.
        """
        budget = StallBudget(stall_timeout_s)
        again = Reconnection(0.0 if cancel_on_disconnect else reconnect_s)
        asked = RefineCall(source, prompt, make_spec(spec, options), cancel_on_disconnect)
        call = self._stub.RefineAudio(_sent(asked))
        return AsyncGeneration(Line(call, self._stub.Attach, EventOrder(), again, asked, address=self._address), budget)

    async def save(
        self,
        prompt: str | GenerateRequest,
        path: str | os.PathLike[str],
        *,
        stall_timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> Completed:
        """Makes a clip in the file `path`, which is playable at every moment; returns the last event.

        If the job fails, the file keeps what had arrived. Raises MuxError, which says what the server has of the clip,
        where the job succeeds without a whole stream. Arguments are those of `generate`.
        """
        with ClipFile(path) as file:
            async with self.generate(
                prompt, stall_timeout_s=stall_timeout_s, reconnect_s=reconnect_s, **options
            ) as events:
                async for event in events:
                    file.write(event)
        assert isinstance(event, Completed), event  # EventOrder lets no stream end otherwise
        file.check(event)
        return event

    async def plan(self, prompt: str | GenerateRequest, **options: Unpack[RequestOptions]) -> Plan:
        """What a request would make; nothing is made."""
        request = codec.plan_request_to_proto(make_request(prompt, options))
        return codec.plan_from_proto((await self._call(self._stub.PlanGeneration, request)).plan)

    async def job(self, job_id: str) -> Job:
        """What is known of a job."""
        request = video_pb2.GetJobRequest(job_id=sendable("job_id", job_id))
        return codec.job_from_proto((await self._call(self._stub.GetJob, request)).job)

    async def cancel(self, job_id: str) -> Job:
        """Cancels a job; returns it once its lane is free. Changes nothing if it has ended."""
        request = video_pb2.CancelJobRequest(job_id=sendable("job_id", job_id))
        return codec.job_from_proto((await self._call(self._stub.CancelJob, request)).job)

    async def download(self, job_id: str, name: str, path: str | os.PathLike[str]) -> Artifact:
        """Downloads an artifact of a finished job to the file `path`, which appears once it is whole and verified.

        What arrives is kept in `path` + ".part", and a download that broke off goes on from there. A link's target is
        written; a pipe or a device gets the bytes as they come. Raises OSError if it cannot be written, also where
        another download is writing it.
        """
        sendable("job_id", job_id), sendable("name", name)
        with open_sink(path) as file:
            while True:
                request = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name, offset_bytes=file.num_bytes)
                try:
                    async for response in self._stub.DownloadArtifact(request):
                        file.take(response)
                except grpc.RpcError as rpc_error:
                    error = from_rpc_error(rpc_error, self._address)
                    if not isinstance(error, InvalidRequestError) or not file.start_anew():
                        raise error from rpc_error
                    continue  # what was left is longer than the artifact
                if (artifact := file.keep()) is not None:
                    return artifact

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in order of their names."""
        return codec.adapters_from_proto(await self._call(self._stub.ListAdapters, video_pb2.ListAdaptersRequest()))

    async def server_info(self) -> ServerInfo:
        """The server's versions, model, limits, defaults and settings."""
        response = await self._call(self._stub.GetServerInfo, video_pb2.GetServerInfoRequest())
        return codec.server_info_from_proto(response)

    async def close(self) -> None:
        """Ends all calls and the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Callable[..., Awaitable[Response]], request: Any) -> Response:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from error


async def _sent(asked: RefineCall) -> AsyncGenerator[video_pb2.RefineAudioRequest, None]:
    messages = iter(asked)
    while (message := await asyncio.to_thread(next, messages, None)) is not None:  # a disk may be slow
        yield message


async def _events(line: Line, budget: StallBudget) -> AsyncGenerator[Event, None]:
    # Not a method: a generator that held its AsyncGeneration would keep a dropped one, and so its call, alive.
    try:
        while True:
            started_s = time.monotonic()
            event: Event | None = None
            try:
                response = await _receive(line, budget)
                if response is None:
                    break
                event = line.accept(response)
            except grpc.RpcError as error:
                delay_s = line.delay_s(error)
                await asyncio.sleep(delay_s if budget.left_s is None else min(delay_s, budget.left_s))
                line.reopen()
            budget.spend(time.monotonic() - started_s, event)
            if event is not None:
                yield event
        line.order.end()
    finally:
        line.call.cancel()


async def _receive(line: Line, budget: StallBudget) -> EventResponse | None:
    """The next response, None at the end. Raises DeadlineError, and the call's own error as it is."""
    try:
        async with asyncio.timeout(budget.left_s):
            response = await line.call.read()
    except TimeoutError as error:
        raise budget.exceeded(line.order.job_id) from error
    return None if response is aio.EOF else response
