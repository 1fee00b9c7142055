"""Connections that speak no HTTP/2, or too little of it, or too much: each has its end, and others are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator.access import guard
from orchestrator.access.connections import ConnectionLimits
from orchestrator.edge import Edge
from orchestrator.edge_process import EdgeProcess
from orchestrator.edge_settings import EdgeSettings
from services.common.rpc import RpcServer, connect
from tests.service.keyed import AccessKeys, standard_error_to

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000 04 00 00000000")
FIRST = (1).to_bytes(4, "big")
"""Number of the first stream."""
LIMITS = ConnectionLimits(handshake_s=0.5, idle_s=1.0, max_connections=30)


def frame(kind: int, flags: int, data: bytes) -> bytes:
    """An HTTP/2 frame of the first stream."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + FIRST + data


def literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK writes what is in no table."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


CALL = b"".join(
    literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/h3stream.v1.VideoService/GetJob"),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
HEADERS, CONTINUATION, DATA, RST_STREAM = 1, 9, 0, 3
END_OF_HEADERS, END_OF_STREAM = 4, 1
OPEN_HEADERS = PREFACE + SETTINGS + frame(HEADERS, 0, CALL[:20])
CALLED = PREFACE + SETTINGS + frame(HEADERS, END_OF_HEADERS, CALL)


@pytest.fixture
async def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(guard, "REQUEST_S", 0.5)
    core = RpcServer(())
    edge = Edge(await core.start(f"unix:{tmp_path}/core.sock"), connections=LIMITS)
    yield await edge.start("127.0.0.1:0")
    await edge.stop(grace_s=0)
    await core.stop(grace_s=0)


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def is_served(address: str) -> bool:
    async with connect(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


SLOW_OR_STRANGE = {
    "says nothing": (b"", b""),
    "speaks HTTP/1": (b"GET / HTTP/1.1\r\n\r\n", b""),
    "speaks TLS": (b"\x16\x03\x01\x02\x00\x01", b""),
    "says its preface a byte at a time": (b"", PREFACE),
    "says its preface alone": (PREFACE, b""),
    "calls nothing": (PREFACE + SETTINGS, b""),
    "changes its settings for ever": (PREFACE + SETTINGS, SETTINGS * 9),
    "does not end its headers": (OPEN_HEADERS, b""),
    "goes on with its headers": (OPEN_HEADERS, frame(CONTINUATION, 0, b"") * 9),
    "sends no request": (CALLED, b""),
    "sends its request a byte at a time": (CALLED, frame(DATA, 0, b"\0\0\0\x10\0abc")[:-1]),
}
"""What a connection says at once, and a byte at a time then."""


async def test_those_that_are_slow_or_strange_are_closed_each_by_itself(address: str) -> None:
    closed = []

    async def speak(name: str, begin: bytes, then: bytes) -> None:
        reader, writer = await dial(address)
        writer.write(begin)
        dribbling = asyncio.create_task(dribble(writer, then))
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        closed.append(name)
        dribbling.cancel()
        writer.close()

    with suppress(TimeoutError):
        async with asyncio.timeout(15):
            await asyncio.gather(*(speak(name, *said) for name, said in SLOW_OR_STRANGE.items()))
    assert sorted(closed) == sorted(SLOW_OR_STRANGE)
    assert await is_served(address)


async def dribble(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)


async def test_there_are_no_more_connections_than_allowed_and_room_again_when_some_go(address: str) -> None:
    connections = [await dial(address) for _ in range(LIMITS.max_connections + 10)]
    for _, writer in connections:
        writer.write(PREFACE + SETTINGS)
    first_bytes = await asyncio.gather(*(reader.read(1) for reader, _ in connections), return_exceptions=True)
    assert sum(data not in (b"",) and isinstance(data, bytes) for data in first_bytes) == LIMITS.max_connections
    for _, writer in connections:
        writer.close()
    async with asyncio.timeout(10):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if await is_served(address):
                    break


async def test_calls_that_are_taken_back_at_once_count_as_those_that_wait(tmp_path: Path) -> None:
    keys = AccessKeys(tmp_path / "access.json")
    keys.add("fox", "foxes", "generate")
    audit = tmp_path / "audit.jsonl"
    edge = Edge("unix:/nowhere", EdgeSettings(keys=keys.path, audit=audit))
    address = await edge.start("127.0.0.1:0")
    _, writer = await dial(address)
    reset = frame(RST_STREAM, 0, (8).to_bytes(4, "big"))
    calls = frame(HEADERS, END_OF_HEADERS, CALL) + reset
    streams = [calls.replace(FIRST, (2 * i + 1).to_bytes(4, "big")) for i in range(4 * guard.NUM_FAILURES)]
    writer.write(PREFACE + SETTINGS + b"".join(streams))
    async with connect(address) as channel, asyncio.timeout(10):
        stub = video_pb2_grpc.VideoServiceStub(channel)
        while await stub.GetJob(video_pb2.GetJobRequest()).code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
            pass
    writer.close()
    await edge.stop(grace_s=0)
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    assert len(entries) < 2 * guard.NUM_FAILURES, "the log does not grow with the others"
    assert {entry["peer"].rpartition(":")[0] for entry in entries} == {"ipv4:127.0.0.1"}
    assert "CANCELLED" in {entry["status"] for entry in entries}
    assert {entry["key_id"] for entry in entries} == {""}


async def test_metadata_that_is_junk_is_answered_and_not_in_the_log(tmp_path: Path) -> None:
    no_text = b"a\xff\nb"
    statuses = (
        ([(b"grpc-timeout", b"soon")], b"13"),  # INTERNAL, which is gRPC's own
        ([(b"x-note", no_text), (b"x-request-id", no_text)], b"12"),  # UNIMPLEMENTED, which is this core's
    )
    core = RpcServer(())
    edge = EdgeProcess(await core.start(f"unix:{tmp_path}/core.sock"))
    log = tmp_path / "edge.log"
    with standard_error_to(log):
        address = await edge.start("127.0.0.1:0")
    for junk, status in statuses:
        reader, writer = await dial(address)
        headers = CALL + b"".join(literal(*each) for each in junk)
        writer.write(
            PREFACE + SETTINGS + frame(HEADERS, END_OF_HEADERS, headers) + frame(DATA, END_OF_STREAM, bytes(5))
        )
        answer = b""
        async with asyncio.timeout(10):
            while b"grpc-status\x02" + status not in answer:
                answer += await reader.read(4096)
        writer.close()
    await edge.stop()
    await core.stop(grace_s=0)
    assert log.read_text() == ""


async def test_metadata_beyond_the_limit_is_refused_and_the_connection_goes_on(address: str) -> None:
    async with connect(address) as channel:
        stub = video_pb2_grpc.VideoServiceStub(channel)
        huge = (("x-much", "a" * 2 * LIMITS.metadata_bytes),)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetJob(video_pb2.GetJobRequest(), metadata=huge)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
