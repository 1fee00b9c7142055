"""The health that callers of the edge see: the core's word, or what can be said without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3stream.status import is_connection_loss

RETRY_S = 1.0
"""How long after it was lost the core is asked again."""

_ServingStatus = health_pb2.HealthCheckResponse.ServingStatus


class EdgeHealth:
    """Where the core cannot be reached the server (\"\") lives, since the edge answers, and no service is ready."""

    def __init__(self, channel: aio.Channel) -> None:
        """channel: to the core."""
        self._core: Any = health_pb2_grpc.HealthStub(channel)

    async def check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Health.Check; its errors are the core's."""
        try:
            return await self._core.Check(request, timeout=context.time_remaining())
        except aio.AioRpcError as error:
            if not is_connection_loss(error):
                await context.abort(error.code(), error.details() or "")
        return health_pb2.HealthCheckResponse(status=_without_core(request))

    async def watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Health.Watch; goes on when the core is lost."""
        told: int | None = None
        while True:
            async for status in self._statuses(request):
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
            await asyncio.sleep(RETRY_S)

    async def _statuses(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[int]:
        """What the core tells until it is lost, and what is true then."""
        call = self._core.Watch(request)
        try:
            async for response in call:
                yield response.status
        except aio.AioRpcError:
            yield _without_core(request)
        finally:
            call.cancel()


def _without_core(request: health_pb2.HealthCheckRequest) -> int:
    lives: int = _ServingStatus.Value("SERVING" if request.service == "" else "NOT_SERVING")
    return lives
