"""The SDK's client with what a gateway needs of it: single connections, and artifacts by the byte."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from h3stream.aio import AsyncClient, AsyncGeneration
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2


class Upstream(AsyncClient):
    """A connection to the service for all callers of a gateway."""

    def follow(self, job_id: str, from_seq: int = 0) -> AsyncGeneration:
        """The events of a job from a number on, live ones as they come; ends, or raises, as the job does.

        A lost connection is not tried again: the gateway's own caller is told, and resumes.
        """
        return self.attach(job_id, from_seq=from_seq, reconnect_s=0.0)

    async def artifact_bytes(self, job_id: str, name: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """The bytes of an artifact from `start` to before `stop`, which lie within it. Raises a GenerationError."""
        request = video_pb2.DownloadArtifactRequest(job_id=job_id, name=name, offset_bytes=start)
        call = self._stub.DownloadArtifact(request)
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
