"""Calls with the token and without, to a real server."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from h3stream.errors import ConfigError, UnauthenticatedError
from h3stream.status import from_rpc_error
from h3stream.v1 import workers_pb2, workers_pb2_grpc
from services.common.authentication import TokenInterceptor
from services.common.config import WorkerConfig
from services.common.rpc import RpcServer, connect
from services.common.token import carries

TOKEN = "a-token_of/16~to+256.signs="
SERVICE = "h3stream.v1.VaeService"


class Vae(workers_pb2_grpc.VaeServiceServicer):
    """Answers calls of all four kinds, and counts them."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def CloseSession(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        return workers_pb2.VaeServiceCloseSessionResponse(was_open=True)

    async def DecodeChunk(self, requests: Any, context: Any) -> Any:
        self.num_calls += 1
        async for _ in requests:
            yield workers_pb2.DecodeChunkResponse(stream_failure="x")


class Dit(workers_pb2_grpc.DitServiceServicer):
    """Answers calls of the two other kinds."""

    async def RestoreChunk(self, requests: Any, context: Any) -> Any:
        return workers_pb2.RestoreChunkResponse()

    async def SampleDense(self, request: Any, context: Any) -> Any:
        yield workers_pb2.SampleDenseResponse()


@pytest.fixture
def vae() -> Vae:
    return Vae()


@pytest.fixture
async def address(vae: Vae, tmp_path: Path) -> AsyncIterator[str]:
    server = RpcServer((SERVICE,), [TokenInterceptor(TOKEN)])
    workers_pb2_grpc.add_VaeServiceServicer_to_server(vae, server.server)
    workers_pb2_grpc.add_DitServiceServicer_to_server(Dit(), server.server)
    yield await server.start(f"unix:{tmp_path}/vae.sock")
    await server.stop(grace_s=0)


async def test_calls_of_every_kind_carry_the_token(address: str) -> None:
    async with connect(address, TOKEN) as channel:
        vae: Any = workers_pb2_grpc.VaeServiceStub(channel)
        dit: Any = workers_pb2_grpc.DitServiceStub(channel)
        assert (await vae.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(), timeout=20)).was_open
        await dit.RestoreChunk(iter([]), timeout=20)
        assert len([_ async for _ in dit.SampleDense(workers_pb2.SampleDenseRequest(), timeout=20)]) == 1
        sent = [workers_pb2.DecodeChunkRequest()] * 3
        metadata = (("x-request-id", "7"),)
        assert len([_ async for _ in vae.DecodeChunk(iter(sent), timeout=20, metadata=metadata)]) == 3
        call = vae.DecodeChunk(timeout=20)
        await call.write(sent[0])
        assert (await call.read()).stream_failure == "x"
        call.cancel()


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "=", TOKEN.upper()])
async def test_nobody_calls_without_it(address: str, vae: Vae, token: str) -> None:
    async with connect(address, token) as channel:
        stub: Any = workers_pb2_grpc.VaeServiceStub(channel)

        async def stream() -> None:
            async for _ in stub.DecodeChunk(timeout=20):  # which sends nothing, and need not
                pass

        for call in (stub.CloseSession(workers_pb2.VaeServiceCloseSessionRequest(), timeout=20), stream()):
            with pytest.raises(aio.AioRpcError) as raised:
                await call
            assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
            error = from_rpc_error(raised.value)
            assert type(error) is UnauthenticatedError
            assert TOKEN not in error.message
        with pytest.raises(aio.AioRpcError) as raised:
            await channel.unary_unary(f"/{SERVICE}/Paint")(b"", timeout=20)
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED  # nor learns what there is
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=20)
        with pytest.raises(aio.AioRpcError) as raised:
            await reflection.read()
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert vae.num_calls == 0


async def test_anybody_may_ask_for_the_health(address: str) -> None:
    async with connect(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_socket_is_closed_to_other_users(address: str) -> None:
    assert stat.S_IMODE(Path(address.removeprefix("unix:")).stat().st_mode) == 0o600


def test_a_header_of_any_bytes_is_no_token() -> None:
    for value in (b"Bearer \xff", "Bearer \u00e9", "Bearer", "", TOKEN, f"bearer {TOKEN}", f"Bearer  {TOKEN}"):
        assert not carries((("authorization", value),), TOKEN)
    assert not carries((), TOKEN)
    assert not carries(None, TOKEN)
    assert not carries((("cookie", f"Bearer {TOKEN}"),), TOKEN)
    assert carries((("authorization", f"Bearer {TOKEN}"),), TOKEN)


@pytest.mark.parametrize(
    "token", ["short", "x" * 257, "with spaces in it, many", "\u00e4" * 20, "a\nheader-injection: 1"]
)
def test_a_token_that_cannot_be_sent_is_a_wrong_setting_and_is_not_told(token: str) -> None:
    with pytest.raises(ConfigError, match="must be 16 to 256 letters") as raised:
        WorkerConfig(token=token)
    assert token not in str(raised.value)
