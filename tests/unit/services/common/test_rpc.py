"""The server shell over real gRPC on loopback, serving the text encoder's service with scripted answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.request import clip_violations, prompt_violations
from h3stream.channel import MAX_MESSAGE_BYTES
from h3stream.errors import (
    DeviceMemoryError,
    FieldViolation,
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    StartupError,
    UnsupportedError,
    WorkerLostError,
)
from h3stream.request import ClipSpec
from h3stream.status import from_rpc_error
from h3stream.v1 import types_pb2, workers_pb2, workers_pb2_grpc
from services.common.rpc import RpcServer, connect
from services.common.verbs import Cancelled, VerbRunner

SERVICE = "h3stream.v1.TextEncoderService"
Script = Callable[[Any], AsyncIterator[workers_pb2.EncodeResponse]]


class ScriptedEncoder(workers_pb2_grpc.TextEncoderServiceServicer):
    """Answers with whatever the test put into `script`."""

    script: Script

    async def LookupEmbedding(self, request: workers_pb2.LookupEmbeddingRequest, context: Any) -> Any:
        async for response in self.script(request):
            yield response

    async def Encode(self, request: workers_pb2.EncodeRequest, context: Any) -> Any:
        async for response in self.script(request):
            yield response


class ScriptedWorker(workers_pb2_grpc.WorkerServiceServicer):
    """Fails every call with whatever the test put into `error`."""

    error: Exception

    async def Describe(self, request: workers_pb2.DescribeRequest, context: Any) -> Any:
        raise self.error

    async def EnterPhase(self, request: workers_pb2.EnterPhaseRequest, context: Any) -> Any:
        raise self.error

    async def LeavePhase(self, request: workers_pb2.LeavePhaseRequest, context: Any) -> Any:
        raise self.error


@dataclasses.dataclass
class Running:
    """A server, its scripted services and a channel to it."""

    server: RpcServer
    encoder: ScriptedEncoder
    worker: ScriptedWorker
    channel: aio.Channel

    async def encode(self, prompt: str = "rain") -> list[workers_pb2.EncodeResponse]:
        stub = workers_pb2_grpc.TextEncoderServiceStub(self.channel)
        return [response async for response in stub.Encode(workers_pb2.EncodeRequest(prompt=prompt), timeout=20)]

    async def describe(self) -> None:
        await workers_pb2_grpc.WorkerServiceStub(self.channel).Describe(workers_pb2.DescribeRequest(), timeout=20)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    server, encoder, worker = RpcServer((SERVICE,)), ScriptedEncoder(), ScriptedWorker()
    workers_pb2_grpc.add_TextEncoderServiceServicer_to_server(encoder, server.server)
    workers_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.server)
    address = await server.start("127.0.0.1:0")
    async with connect(address) as channel:
        yield Running(server, encoder, worker, channel)
    await server.stop(grace_s=0)


def header(num_tokens: int) -> workers_pb2.EncodeResponse:
    return workers_pb2.EncodeResponse(header=workers_pb2.EmbeddingHeader(num_tokens=num_tokens))


async def test_a_port_of_zero_is_answered_with_a_real_one() -> None:
    server = RpcServer((SERVICE,))
    address = await server.start("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    await server.stop(grace_s=0)


async def test_a_unix_socket_is_served_under_its_own_name(tmp_path: Path) -> None:
    server = RpcServer((SERVICE,))
    address = await server.start(f"unix:{tmp_path}/worker.sock")
    assert address == f"unix:{tmp_path}/worker.sock"
    async with connect(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(grace_s=0)


async def test_an_address_that_is_taken_ends_the_start_with_one_line() -> None:
    first, second = RpcServer((SERVICE,)), RpcServer((SERVICE,))
    address = await first.start("127.0.0.1:0")
    with pytest.raises(StartupError, match=f"^cannot listen on {address}: "):
        await second.start(address)
    await first.stop(grace_s=0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedError("enter the phase first"), grpc.StatusCode.FAILED_PRECONDITION),
        (
            WorkerLostError("the DiT worker is gone", job_id="j1", phase="denoise", chunk_index=3),
            grpc.StatusCode.UNAVAILABLE,
        ),
        (DeviceMemoryError("out of memory", phase="decode", chunk_index=0), grpc.StatusCode.INTERNAL),
        (OverloadedError("the queue is full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_an_error_of_ours_comes_back_as_itself(
    running: Running, error: GenerationError, code: grpc.StatusCode
) -> None:
    running.worker.error = error
    with pytest.raises(aio.AioRpcError) as caught:
        await running.describe()
    assert caught.value.code() == code
    back = from_rpc_error(caught.value)
    assert type(back) is type(error)
    assert vars(back) == vars(error)


async def test_an_error_after_some_responses_ends_the_stream(running: Running) -> None:
    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        yield header(1)
        raise InvalidRequestError("bad prompt", violations=(FieldViolation("prompt", "is bad", "PROMPT_BAD"),))

    running.encoder.script = script
    call = workers_pb2_grpc.TextEncoderServiceStub(running.channel).Encode(workers_pb2.EncodeRequest(), timeout=20)
    assert (await call.read()).header.num_tokens == 1
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    back = from_rpc_error(caught.value)
    assert isinstance(back, InvalidRequestError)
    assert back.violations == (FieldViolation("prompt", "is bad", "PROMPT_BAD"),)


async def test_an_unknown_exception_becomes_internal_and_keeps_its_text(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.worker.error = ValueError("the secret is in /root/key")
    with caplog.at_level(logging.ERROR), pytest.raises(aio.AioRpcError) as caught:
        await running.describe()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error in Describe (ValueError); see the server's log"
    assert not any(
        b"secret" in (v if isinstance(v, bytes) else v.encode()) for _, v in caught.value.trailing_metadata()
    )
    assert "the secret is in /root/key" in caplog.text


async def test_a_broken_invariant_surfaces_as_internal(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        yield header(1)
        raise AssertionError("2 != 3")

    running.encoder.script = script
    with pytest.raises(aio.AioRpcError) as caught:
        await running.encode()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "2 != 3" not in (caught.value.details() or "")
    assert "2 != 3" in caplog.text


async def test_the_worst_refusal_fits_into_the_trailer(running: Running) -> None:
    clip = ClipSpec(-3, 2**31 - 1, 2**31 - 2, 0, math.nan, -math.inf, 0, -1, "gpu", 0)
    found = [*prompt_violations("\0<|im_start|>" + "a" * 20_000), *clip_violations(clip)]
    assert len(found) >= 11
    message = "; ".join(v.description for v in found)
    violations = tuple(FieldViolation(v.field, v.description, v.reason) for v in found)
    running.worker.error = InvalidRequestError(message, violations=violations)
    with pytest.raises(aio.AioRpcError) as caught:
        await running.describe()
    back = from_rpc_error(caught.value)
    assert isinstance(back, InvalidRequestError)
    assert back.violations == violations


async def test_a_caller_that_goes_ends_the_handler(running: Running) -> None:
    ended = asyncio.Event()

    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        try:
            yield header(1)
            await asyncio.sleep(60)
        finally:
            ended.set()

    running.encoder.script = script
    call = workers_pb2_grpc.TextEncoderServiceStub(running.channel).Encode(workers_pb2.EncodeRequest(), timeout=60)
    await call.read()
    call.cancel()
    await asyncio.wait_for(ended.wait(), 20)


async def test_a_caller_that_goes_while_a_response_waits_ends_the_handler(running: Running) -> None:
    """A handler held by flow control is not at an await of its own: its generator must be closed all the same."""
    ended = asyncio.Event()

    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        try:
            while True:
                yield workers_pb2.EncodeResponse(tensor=types_pb2.TensorPart(name="x", data=bytes(900_000)))
        finally:
            ended.set()

    running.encoder.script = script
    call = workers_pb2_grpc.TextEncoderServiceStub(running.channel).Encode(workers_pb2.EncodeRequest(), timeout=60)
    await call.read()
    await asyncio.sleep(0.3)  # nobody reads: the handler is soon stuck in a write
    call.cancel()
    await asyncio.wait_for(ended.wait(), 20)


async def test_a_caller_that_goes_while_a_response_waits_stops_the_verb(running: Running) -> None:
    runner, stopped = VerbRunner("test"), threading.Event()

    def verb(emit: Callable[[workers_pb2.EncodeResponse], None], cancelled: Cancelled) -> None:
        for _ in range(12):
            emit(workers_pb2.EncodeResponse(tensor=types_pb2.TensorPart(name="x", data=bytes(900_000))))
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if cancelled():
                stopped.set()
                return
            time.sleep(0.001)

    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        async for response in runner.stream(verb):
            yield response

    running.encoder.script = script
    call = workers_pb2_grpc.TextEncoderServiceStub(running.channel).Encode(workers_pb2.EncodeRequest(), timeout=60)
    await call.read()
    await asyncio.sleep(0.3)
    call.cancel()
    assert await asyncio.to_thread(stopped.wait, 15)
    runner.close()


async def test_a_message_of_just_under_the_limit_passes_both_ways(running: Running) -> None:
    received: list[int] = []

    async def script(request: workers_pb2.EncodeRequest) -> AsyncIterator[workers_pb2.EncodeResponse]:
        received.append(len(request.prompt))
        yield workers_pb2.EncodeResponse(tensor=types_pb2.TensorPart(data=bytes(MAX_MESSAGE_BYTES - 64)))

    running.encoder.script = script
    (response,) = await running.encode("a" * (MAX_MESSAGE_BYTES - 64))
    assert received == [MAX_MESSAGE_BYTES - 64]
    assert len(response.tensor.data) == MAX_MESSAGE_BYTES - 64


async def test_a_response_over_the_limit_is_refused(running: Running) -> None:
    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        yield workers_pb2.EncodeResponse(tensor=types_pb2.TensorPart(data=bytes(MAX_MESSAGE_BYTES)))

    running.encoder.script = script
    with pytest.raises(aio.AioRpcError) as caught:
        await running.encode()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_request_over_the_limit_never_reaches_the_handler(running: Running) -> None:
    called = False

    async def script(_: Any) -> AsyncIterator[workers_pb2.EncodeResponse]:
        nonlocal called
        called = True
        yield header(0)

    running.encoder.script = script
    server = RpcServer((SERVICE,))
    workers_pb2_grpc.add_TextEncoderServiceServicer_to_server(running.encoder, server.server)
    address = await server.start("127.0.0.1:0")
    async with aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = workers_pb2_grpc.TextEncoderServiceStub(channel).Encode(
            workers_pb2.EncodeRequest(prompt="a" * (MAX_MESSAGE_BYTES + 1)), timeout=20
        )
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not called
    await server.stop(grace_s=0)


async def test_an_unknown_method_is_unimplemented(running: Running) -> None:
    call = running.channel.unary_unary(f"/{SERVICE}/Paint")
    with pytest.raises(aio.AioRpcError) as caught:
        await call(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_says_serving_until_told_otherwise(running: Running, service: str) -> None:
    stub, request = health_pb2_grpc.HealthStub(running.channel), health_pb2.HealthCheckRequest(service=service)
    assert (await stub.Check(request, timeout=20)).status == health_pb2.HealthCheckResponse.SERVING
    await running.server.set_serving(False)
    assert (await stub.Check(request, timeout=20)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_server_may_start_before_it_serves() -> None:
    server = RpcServer((SERVICE,))
    address = await server.start("127.0.0.1:0", serving=False)
    async with connect(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(grace_s=0)


async def test_reflection_lists_the_services(running: Running) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(running.channel).ServerReflectionInfo(timeout=20)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.done_writing()
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
