"""The gRPC server that every process of h3stream runs: limits, keepalive, health, reflection, one place for errors.

What it listens on is open to nobody but its own user, where it is a socket of the file system.

Imports neither torch nor a model, so the orchestrator uses it too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.errors import GenerationError, InvalidRequestError, PhaseError, StartupError
from h3stream.status import DETAILS_KEY, to_status
from services.common.authentication import TokenChannel
from services.common.logs import REQUEST_ID_KEY, enter_job, enter_request

log = logging.getLogger(__name__)

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    # Two servers on one port would each answer some of the calls.
    ("grpc.so_reuseport", 0),
    # Notice a frozen peer: keepalive alone waits for the ping timeout, whose default is 60 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Clients may ping every 10 s on a silent stream without being sent away.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # gRPC would cancel calls that the process has not got to yet, from 1,000 on, without a word of why. What callers
    # may have open is bounded by connection.
    ("grpc.server.max_pending_requests", 2**31 - 1),
    ("grpc.server.max_pending_requests_hard_limit", 2**31 - 1),
]

LAST_WRITES_S = 10.0
"""How long the sender of a refused stream may go on sending."""


class ErrorInterceptor(aio.ServerInterceptor):
    """The single place that aborts a call: our errors become their status, anything else INTERNAL with a log entry."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, wrapped; methods that are not ours stay as they are."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/h3stream."):
            return handler  # type: ignore[no-any-return]
        inner = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        deserialize = handler.request_deserializer or bytes  # without one the handler takes requests as they come

        # Requests are parsed here and not by gRPC, which answers bytes that are no message with UNKNOWN and a traceback
        # in the log for each.
        def parsed(data: bytes) -> Any:
            try:
                message = deserialize(data)
            except DecodeError as error:
                raise InvalidRequestError(f"the request is no message of {method}: {error}") from None
            if session_id := getattr(getattr(message, "header", message), "session_id", ""):
                enter_job(session_id)  # sessions are called as their jobs
            return message

        async def parsed_stream(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in stream:
                yield parsed(data)

        def decode(request: Any) -> Any:
            return parsed_stream(request) if handler.request_streaming else parsed(request)

        async def refuse(request: Any, context: aio.ServicerContext[Any, Any], error: Exception) -> None:
            if handler.request_streaming:
                # A call that ends while its sender still writes reaches the sender as an internal error without our
                # words, so the sender is let finish, but not for ever.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WRITES_S):
                        async for _ in request:
                            pass
            await _abort(context, method, error)

        async def unary(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await inner(decode(request), context)
            except Exception as error:
                await refuse(request, context, error)

        async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
            # Writes instead of yielding: when the caller goes during a write, gRPC cancels this coroutine, so the
            # handler's generator is closed here and now and not when the garbage collector finds it.
            try:
                async with aclosing(inner(decode(request), context)) as responses:
                    async for response in responses:
                        await context.write(response)
            except Exception as error:
                await refuse(request, context, error)

        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(  # type: ignore[no-any-return]
            stream if handler.response_streaming else unary,
            response_serializer=handler.response_serializer,
        )


class RequestIdInterceptor(aio.ServerInterceptor):
    """Has the log tell which caller's call a call is about, as the process that asks says. Not for strangers' calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, which runs in the same task."""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == REQUEST_ID_KEY:
                enter_request(str(value))
        return await continuation(handler_call_details)


async def _abort(context: aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    if isinstance(error, aio.InternalError):
        # A write that found no connection: every viewer that leaves may cause one, so it is no matter for the log.
        log.debug("%s: the caller has gone", method)
    elif not isinstance(error, GenerationError):
        # The caller learns that it failed, the log learns why.
        log.exception("%s failed", method)
    if not isinstance(error, GenerationError):
        error = PhaseError(
            f"internal error in {method.rpartition('/')[2]} ({type(error).__name__}); see the server's log"
        )
    code, message, details = to_status(error)
    await context.abort(code, message, ((DETAILS_KEY, details),))


class RpcEndpoint:
    """A grpc.aio server with reflection, listening on one address."""

    def __init__(
        self,
        service_names: tuple[str, ...],
        interceptors: Sequence[aio.ServerInterceptor] = (),
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """service_names: what reflection tells of, beside itself.  interceptors: what a call meets first.  options:
        gRPC's, beside those of every server."""
        self.server = aio.server(interceptors=[*interceptors, ErrorInterceptor()], options=[*SERVER_OPTIONS, *options])
        reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), self.server)

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listens on "HOST:PORT" (port 0: any free one) or "unix:PATH"; returns the address to dial.

        credentials: for TLS; None: without.  Raises StartupError if the address cannot be bound.
        """
        try:
            with _private_files():
                if credentials is None:
                    port = self.server.add_insecure_port(address)
                else:
                    port = self.server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address}: {error}") from error
        await self.server.start()
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Takes no new call and ends the running ones after `grace_s` seconds."""
        await self.server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self.server.wait_for_termination()


class RpcServer(RpcEndpoint):
    """One that also answers for its own health."""

    def __init__(self, service_names: tuple[str, ...], interceptors: Sequence[aio.ServerInterceptor] = ()) -> None:
        super().__init__((*service_names, health.SERVICE_NAME), (*interceptors, RequestIdInterceptor()))
        self.health = health.aio.HealthServicer()
        self._service_names = service_names
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)

    async def start(
        self, address: str, credentials: grpc.ServerCredentials | None = None, *, serving: bool = True
    ) -> str:
        """As RpcEndpoint's.

        serving: what the health service answers from now on.
        """
        address = await super().start(address, credentials)
        await self.set_serving(serving)
        return address

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer of the health service, of the server ("") and of each of its services."""
        serving_status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._service_names):
            await self.health.set(name, serving_status)

    async def stop(self, grace_s: float) -> None:
        """As RpcEndpoint's; those who watch the health are told first."""
        await self.health.enter_graceful_shutdown()
        await super().stop(grace_s)


def connect(address: str, token: str = "") -> aio.Channel:
    """A channel to another process of h3stream.

    token: what it asks of its callers; empty: nothing.
    Calls to one that is frozen or cut off fail with UNAVAILABLE after half a minute.
    """
    keepalive = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    channel = aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *keepalive])
    return TokenChannel(channel, token) if token else channel


@contextmanager
def _private_files() -> Iterator[None]:
    """What is made meanwhile is for this user alone: a socket that is closed to others later was open until then."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
