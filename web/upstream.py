"""The calls of the service that the gateway follows jobs and fetches artifacts with."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc import aio

from h3stream import codec
from h3stream.aio import AsyncClient
from h3stream.channel import CHANNEL_OPTIONS
from h3stream.events import Event
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2, video_pb2_grpc


class Upstream(AsyncClient):
    """The SDK's client, with jobs followed and artifacts fetched one call at a time.

    A gateway resumes where its own caller asks it to; it must not do so by itself, or a caller that has gone would be
    served for ever. Every call raises a GenerationError if it fails.
    """

    def __init__(self, address: str) -> None:
        """address: "HOST:PORT"."""
        super().__init__(address)
        self._calls = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._service = video_pb2_grpc.VideoServiceStub(self._calls)

    async def events(self, job_id: str, from_seq: int = 0) -> AsyncGenerator[Event, None]:
        """The events of a job from a number on, live ones as they come; ends, or raises, as the job does."""
        request = video_pb2.AttachRequest(job_id=job_id, from_seq=from_seq)
        async for response in _responses(self._service.Attach(request)):
            yield codec.event_from_proto(response.event)

    async def artifact_bytes(self, job_id: str, name: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """The bytes of an artifact from `start` to before `stop`."""
        request = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name, offset_bytes=start)
        left = stop - start
        async for response in _responses(self._service.DownloadArtifact(request)):
            data: bytes = response.data[:left]
            left -= len(data)
            if data:
                yield data
            if not left:
                return

    async def close(self) -> None:
        """Ends all calls and the connections."""
        await self._calls.close()
        await super().close()


async def _responses(call: Any) -> AsyncGenerator[Any, None]:
    try:
        async for response in call:
            yield response
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
