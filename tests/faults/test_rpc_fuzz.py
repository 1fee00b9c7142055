"""Anything at all sent to every public RPC of a real server: typed answers that tell nothing of its insides, bounded
memory, no restart."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h3stream import Client
from h3stream.status import DETAILS_KEY, DOMAIN
from h3stream.v1 import status_pb2, video_pb2
from tests.e2e.conftest import Server, edge_of
from tests.faults.messages import messages

METHODS = {method.name: method for method in video_pb2.DESCRIPTOR.services_by_name["VideoService"].methods}
TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ALREADY_EXISTS,
}
"""What a caller may be told who sent nonsense."""
INSIDES = re.compile(r"Traceback|File \"|\.py\b|/tmp/|/root/|/home/|site-packages|0x[0-9a-f]{6,}")
CALL_S = 20.0
LIMITS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class Raw:
    """A channel that sends bytes as they are."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)

    def ask(self, method: MethodDescriptor, requests: Iterable[bytes]) -> grpc.RpcError | None:
        """Calls a method, reads at most a few answers; returns how the call failed, None if it had not by then."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        call: Any = None
        try:
            match method.client_streaming, method.server_streaming:
                case False, False:
                    self._channel.unary_unary(path)(next(iter(requests)), timeout=CALL_S)
                case False, True:
                    call = self._channel.unary_stream(path)(next(iter(requests)), timeout=CALL_S)
                case True, True:
                    call = self._channel.stream_stream(path)(iter(requests), timeout=CALL_S)
            if call is not None:
                for _ in zip(call, range(2), strict=False):  # an accepted job may go on: it is left to itself
                    pass
        except grpc.RpcError as error:
            return error
        finally:
            if call is not None:
                call.cancel()
        return None

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def raw(attacked_server: Server) -> Iterator[Raw]:
    channel = Raw(attacked_server.address)
    yield channel
    channel.close()
    with Client(attacked_server.address) as client:
        assert client.server_info().model_name  # it serves on


def check_answer(error: grpc.RpcError | None) -> None:
    if error is None:
        return
    code, details = error.code(), error.details() or ""
    assert code in TYPED, (code, details)
    assert INSIDES.search(details) is None, details
    trailer = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
    assert trailer is not None, (code, details)
    told = status_pb2.RpcStatus.FromString(trailer)
    info = status_pb2.RpcErrorInfo.FromString(told.details[0].value)
    assert (info.domain, bool(info.reason)) == (DOMAIN, True)
    assert INSIDES.search(str(told)) is None


@pytest.mark.parametrize("name", METHODS)
def test_any_message_is_answered_in_type(raw: Raw, name: str) -> None:
    method = METHODS[name]

    @LIMITS
    @given(st.lists(messages(method.input_type), min_size=1, max_size=3 if method.client_streaming else 1))
    def attack(requests: list[Message]) -> None:
        check_answer(raw.ask(method, [request.SerializeToString() for request in requests]))

    attack()


@pytest.mark.parametrize("name", METHODS)
def test_any_bytes_are_answered_in_type(raw: Raw, name: str) -> None:
    method = METHODS[name]

    @LIMITS
    @given(st.lists(st.binary(max_size=300), min_size=1, max_size=3 if method.client_streaming else 1))
    def attack(requests: list[bytes]) -> None:
        check_answer(raw.ask(method, requests))

    attack()


@pytest.mark.parametrize("name", METHODS)
def test_a_message_beyond_the_limit_is_refused(raw: Raw, name: str) -> None:
    error = raw.ask(METHODS[name], [b"\x0a\xff\xff\x7f" + bytes(2_097_151)])
    assert error is not None
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def resident_bytes(server: Server) -> int:
    """Of the process that runs jobs and of the one that callers reach."""
    pids = (server.process.pid, edge_of(server.process.pid))
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def test_a_million_tiny_messages_cost_no_memory(attacked_server: Server, raw: Raw) -> None:
    before = resident_bytes(attacked_server)
    header = video_pb2.RefineAudioRequest(
        header={"upload": {"prompt": "a fox", "size_bytes": 1_000_000}}
    ).SerializeToString()
    piece = video_pb2.RefineAudioRequest(data=b"x").SerializeToString()
    sent = 0
    peak = before

    def pieces() -> Iterator[bytes]:
        nonlocal sent, peak
        yield header
        for sent in range(NUM_TINY):
            if sent % 2_000 == 0:
                peak = max(peak, resident_bytes(attacked_server))
            yield piece

    check_answer(raw.ask(METHODS["RefineAudio"], pieces()))
    assert sent == NUM_TINY - 1
    assert peak - before < 64e6


NUM_TINY = int(os.environ.get("H3STREAM_TEST_TINY_MESSAGES", 20_000))
"""A million take minutes; the memory of a sound server is the same after a few thousand."""


def test_connections_that_never_speak_hold_nobody_up(attacked_server: Server, raw: Raw) -> None:
    host, _, port = attacked_server.address.rpartition(":")
    before = resident_bytes(attacked_server)
    silent = [socket.create_connection((host, int(port))) for _ in range(200)]
    for index, connection in enumerate(silent):
        if index % 2:
            connection.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: index % 24])  # and then no more
    try:
        check_answer(raw.ask(METHODS["GetServerInfo"], [b""]))
        assert resident_bytes(attacked_server) - before < 200 * 300_000
    finally:
        for connection in silent:
            connection.close()


def test_bytes_that_are_no_http_end_the_connection_alone(attacked_server: Server, raw: Raw) -> None:
    host, _, port = attacked_server.address.rpartition(":")

    def talk(data: bytes) -> None:
        with socket.create_connection((host, int(port)), timeout=30) as connection, suppress(OSError):
            connection.sendall(data)
            while connection.recv(4096):
                pass

    garbage = [b"GET / HTTP/1.1\r\n\r\n", os.urandom(5_000), b"\x16\x03\x01" + os.urandom(300), b"\0" * 100_000]
    talkers = [threading.Thread(target=talk, args=(data,)) for data in garbage]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()
    check_answer(raw.ask(METHODS["GetServerInfo"], [b""]))


def test_the_log_shows_no_failure_of_the_server_s_own(attacked_server: Server, raw: Raw) -> None:
    log = Path(attacked_server.log).read_text()
    assert "Traceback" not in log
    assert "internal error" not in log
