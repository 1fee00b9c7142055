"""The SDK's client with what a gateway needs of it: many callers, single connections, and artifacts by the byte."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3stream.access import Tls, call_metadata
from h3stream.aio import AsyncClient, AsyncGeneration
from h3stream.errors import ConfigError, UnauthenticatedError
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2

READY_TIMEOUT_S = 5.0
_SERVICE = video_pb2.DESCRIPTOR.services_by_name["VideoService"].full_name


class Upstream(AsyncClient):
    """A connection to the service for all callers of a gateway."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls = None) -> None:
        """As AsyncClient's.  api_key: the gateway's own, for callers who have none."""
        super().__init__(address, api_key=api_key, tls=tls)
        self._tls = tls

    def as_caller(self, api_key: str | None) -> Self:
        """The same connection for a caller with a key; with the gateway's own, if it has one, for one without.

        Raises UnauthenticatedError for a key that no call can carry.
        """
        if api_key is None:
            return self
        caller = copy.copy(self)
        try:
            caller._metadata = call_metadata(api_key, self._address, self._tls)
        except ConfigError as error:
            raise UnauthenticatedError(str(error)) from None
        return caller

    async def is_ready(self) -> bool:
        """Whether the service answers and takes jobs."""
        health = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=READY_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def follow(self, job_id: str, from_seq: int = 0) -> AsyncGeneration:
        """The events of a job from a number on, live ones as they come; ends, or raises, as the job does.

        A lost connection is not tried again: the gateway's own caller is told, and resumes.
        """
        return self.attach(job_id, from_seq=from_seq, reconnect_s=0.0)

    async def artifact_bytes(self, job_id: str, name: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """The bytes of an artifact from `start` to before `stop`, which lie within it. Raises a GenerationError."""
        request = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name, offset_bytes=start)
        call = self._start(self._stub.DownloadArtifact, request)
        left = stop - start
        try:
            async for response in call:
                data: bytes = response.data[:left]
                left -= len(data)
                if data:
                    yield data
                if not left:
                    return
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
