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
from h3stream.channel import CHANNEL_OPTIONS
from h3stream.clip_file import ClipFile
from h3stream.events import Completed, Event, Plan
from h3stream.job import AdapterInfo, Job, ServerInfo
from h3stream.request import GenerateRequest, RequestOptions, make_request
from h3stream.status import from_rpc_error
from h3stream.stream import EventOrder, StallBudget
from h3stream.v1 import video_pb2, video_pb2_grpc

Response = TypeVar("Response")


class AsyncGeneration(AsyncIterator[Event]):
    """One generation in progress: an asynchronous iterator over its events.

    Closing it early (or leaving its `async with` block, or dropping it) ends the call; the job goes on unless the
    request says `cancel_on_disconnect`. Raises the error that ends the job; what was yielded before stays valid.
    """

    def __init__(self, call: Any, budget: StallBudget) -> None:
        """call: a response stream of Generate."""
        self._call = call
        self._order = EventOrder()
        self._events = _events(call, self._order, budget)

    @property
    def job_id(self) -> str:
        """The job; empty until the first event has come."""
        return self._order.job_id

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Ends the call; changes nothing once it has ended."""
        await self._events.aclose()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """A connection to one server, made when the first call needs it. Every call raises a GenerationError if it fails.

    Nothing is tried twice. Belongs to the event loop in which it was made.
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        """address: "HOST:PORT".  timeout_s: deadline of every call but `generate` and `save`."""
        self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = video_pb2_grpc.VideoServiceStub(self._channel)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | GenerateRequest,
        *,
        stall_timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGeneration:
        """Makes a clip; returns an asynchronous iterator over its events.

        prompt: the prompt, or a whole request.  options: fields of GenerateRequest.
        stall_timeout_s: raise DeadlineError once the job has stood still for so long, waiting in the queue included;
        heartbeats only show that it is alive. None waits for ever.
        """
        request = make_request(prompt, options)
        budget = StallBudget(stall_timeout_s)
        return AsyncGeneration(self._stub.Generate(codec.request_to_proto(request)), budget)

    async def save(
        self,
        prompt: str | GenerateRequest,
        path: str | os.PathLike[str],
        *,
        stall_timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completed:
        """Makes a clip in the file `path`, which is playable at every moment; returns the last event.

        If the job fails, the file keeps what had arrived. Arguments are those of `generate`.
        """
        with ClipFile(path) as file:
            async with self.generate(prompt, stall_timeout_s=stall_timeout_s, **options) as events:
                async for event in events:
                    file.write(event)
        assert isinstance(event, Completed), event  # EventOrder lets no stream end otherwise
        return event

    async def plan(self, prompt: str | GenerateRequest, **options: Unpack[RequestOptions]) -> Plan:
        """What a request would make; nothing is made."""
        request = codec.plan_request_to_proto(make_request(prompt, options))
        return codec.plan_from_proto((await self._call(self._stub.PlanGeneration, request)).plan)

    async def job(self, job_id: str) -> Job:
        """What is known of a job."""
        request = video_pb2.GetJobRequest(job_id=job_id)
        return codec.job_from_proto((await self._call(self._stub.GetJob, request)).job)

    async def cancel(self, job_id: str) -> Job:
        """Cancels a job; returns it once its lane is free. Changes nothing if it has ended."""
        request = video_pb2.CancelJobRequest(job_id=job_id)
        return codec.job_from_proto((await self._call(self._stub.CancelJob, request)).job)

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
            raise from_rpc_error(error) from error


async def _events(call: Any, order: EventOrder, budget: StallBudget) -> AsyncGenerator[Event, None]:
    # Not a method: a generator that held its AsyncGeneration would keep a dropped one, and so its call, alive.
    try:
        while True:
            started_s = time.monotonic()
            response = await _receive(call, order, budget)
            if response is None:
                break
            event = order.accept(response)
            budget.spend(time.monotonic() - started_s, event)
            yield event
        order.end()
    finally:
        call.cancel()


async def _receive(call: Any, order: EventOrder, budget: StallBudget) -> video_pb2.GenerateResponse | None:
    """The next response, None at the end."""
    try:
        async with asyncio.timeout(budget.left_s):
            response = await call.read()
    except TimeoutError as error:
        raise budget.exceeded(order.job_id) from error
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    return None if response is aio.EOF else response
