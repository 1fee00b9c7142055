"""The token of `token.py` on calls: sent with each of a channel's, asked of each to a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health

from h3stream.errors import UnauthenticatedError
from h3stream.status import DETAILS_KEY, to_status
from services.common.token import HEADER, bearer, carries


class TokenInterceptor(aio.ServerInterceptor):
    """Lets nobody call without the token, except to ask for the health."""

    def __init__(self, token: str) -> None:
        """token: what callers must send."""
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, or one that refuses the call before anything of it is read."""
        method = handler_call_details.method
        if method.startswith(f"/{health.SERVICE_NAME}/") or carries(
            handler_call_details.invocation_metadata, self._token
        ):
            return await continuation(handler_call_details)

        async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
            code, message, details = to_status(
                UnauthenticatedError("this server answers the processes of its own alone")
            )
            await context.abort(code, message, ((DETAILS_KEY, details),))

        return grpc.stream_stream_rpc_method_handler(refuse)


class TokenChannel(aio.Channel):
    """A channel whose calls all carry a token.

    It adds to a call's metadata and leaves the call itself alone: an interceptor of grpc.aio would put another one
    around it, which ends otherwise.
    """

    def __init__(self, channel: aio.Channel, token: str) -> None:
        """channel: what the calls go through; closed with this one."""
        self._channel = channel
        self._metadata = ((HEADER, bearer(token)),)

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends the connection; running calls may take `grace` seconds to end."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> Any:
        """Of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        """Returns once the connection has another state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns once there is a connection."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """A method that takes a message and answers with one."""
        return self._carrying(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """A method that takes a message and answers with a stream."""
        return self._carrying(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """A method that takes a stream and answers with a message."""
        return self._carrying(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """A method that takes a stream and answers with one."""
        return self._carrying(self._channel.stream_stream(*args, **options))

    def _carrying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = (), **options: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata), **options)

        return call
