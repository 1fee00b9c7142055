"""TLS and certificates as keys, on real sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from h3stream.errors import ConfigError, StartupError, UnauthenticatedError
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator.access.access_file import Certificate
from orchestrator.edge import Edge
from orchestrator.edge_process import EdgeProcess
from orchestrator.edge_settings import EdgeSettings
from tests.service.certificates import Authority, encrypt
from tests.service.conftest import Service
from tests.service.keyed import AccessKeys, Showing

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")

SERVER_NAMES = ("DNS:localhost", "IP:127.0.0.1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@asynccontextmanager
async def edge_of(service: Service, **settings: Any) -> AsyncIterator[str]:
    edge = Edge(f"unix:{service.data}/core.sock", EdgeSettings(**settings))
    yield await edge.start("127.0.0.1:0")
    await edge.stop(grace_s=0)


@asynccontextmanager
async def caller(
    address: str, trusted: Path, identity: tuple[Path, Path] | None = None, key: str = ""
) -> AsyncIterator[Any]:
    """The stub of one who trusts an authority, and may show a certificate and a key."""
    cert, private = (None, None) if identity is None else (identity[0].read_bytes(), identity[1].read_bytes())
    credentials = grpc.ssl_channel_credentials(trusted.read_bytes(), private, cert)
    # A pool of its own: gRPC would else take the connection of an earlier channel, with its handshake.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        yield video_pb2_grpc.VideoServiceStub(Showing(channel, [("authorization", f"Bearer {key}")] if key else []))


async def who(stub: Any) -> str:
    """The tenant that a caller is."""
    return str((await stub.GetServerInfo(video_pb2.GetServerInfoRequest())).caller.tenant)


async def status(stub: Any) -> grpc.StatusCode:
    """What a call that fails ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await who(stub)
    return refused.value.code()


async def test_callers_that_trust_the_authority_are_served_and_others_and_plain_text_are_not(
    service: Service, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("server", *SERVER_NAMES)
    async with edge_of(service, tls_cert=cert, tls_key=key) as address:
        async with caller(address, authority.cert) as stub:
            assert await who(stub) == "default"
        async with caller(address, Authority(tmp_path, "theirs").cert) as stub:
            assert await status(stub) == grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as channel:
            assert await status(video_pb2_grpc.VideoServiceStub(channel)) == grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_counts_without_a_restart_and_a_broken_one_does_not(
    service: Service, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_authority = Authority(tmp_path, "new")
    cert, key = authority.issue("server", *SERVER_NAMES)
    new_cert, new_key = new_authority.issue("next", *SERVER_NAMES)
    async with edge_of(service, tls_cert=cert, tls_key=key) as address, caller(address, authority.cert) as early:
        assert await who(early) == "default"
        shutil.copy(new_cert, cert)  # the key is still the old one's
        async with caller(address, authority.cert) as stub:
            assert await who(stub) == "default"
        assert "the one before stays in use" in caplog.text
        os.replace(new_key, key)
        async with caller(address, new_authority.cert) as stub:
            assert await who(stub) == "default"
        async with caller(address, authority.cert) as stub:
            assert await status(stub) == grpc.StatusCode.UNAVAILABLE
        assert await who(early) == "default", "connections last"


async def test_a_certificate_stands_for_a_key_and_is_needed_beside_one(
    service: Service, authority: Authority, tmp_path: Path
) -> None:
    cert, private = authority.issue("server", *SERVER_NAMES)
    render = authority.issue("render", "DNS:render.acme", "URI:spiffe://acme/render")
    unknown = authority.issue("unknown")
    foreign = Authority(tmp_path, "theirs").issue("render2", "DNS:render.acme")
    keys = AccessKeys(tmp_path / "access.json")
    key = keys.add("fox", "foxes", "generate")
    keys.write(certificates=[Certificate("spiffe://acme/render", "acme", ("read_own",))])
    tls = {"tls_cert": cert, "tls_key": private, "tls_client_ca": authority.cert}
    async with edge_of(service, keys=keys.path, **tls) as address:
        async with caller(address, authority.cert, render) as stub:
            assert await who(stub) == "acme"
        async with caller(address, authority.cert, unknown, key) as stub:
            assert await who(stub) == "foxes"
        async with caller(address, authority.cert, unknown) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await who(stub)
            error = from_rpc_error(refused.value)
            assert isinstance(error, UnauthenticatedError)
            assert error.message == "the certificate of 'unknown' is no caller of this server, and there is no key"
        for identity in (None, foreign):
            async with caller(address, authority.cert, identity, key) as stub:
                assert await status(stub) == grpc.StatusCode.UNAVAILABLE
    async with edge_of(service, **tls) as address, caller(address, authority.cert, unknown) as stub:
        assert await who(stub) == "default", "without an access file the authority's word is enough"


async def test_calls_of_a_certificate_that_is_no_caller_any_more_end(
    service: Service, authority: Authority, tmp_path: Path
) -> None:
    service.script.gates["sample:1.1"] = asyncio.Event()
    cert, private = authority.issue("server", *SERVER_NAMES)
    identity = authority.issue("render")
    keys = AccessKeys(tmp_path / "access.json")
    keys.write(certificates=[Certificate("render", "acme", ("generate",))])
    tls = {"tls_cert": cert, "tls_key": private, "tls_client_ca": authority.cert}
    async with (
        edge_of(service, keys=keys.path, **tls) as address,
        caller(address, authority.cert, identity) as stub,
    ):
        stream = stub.Generate(video_pb2.GenerateRequest(prompt="a fox"))
        await anext(aiter(stream))
        keys.write(certificates=[Certificate("render", "others", ("generate",))])
        with pytest.raises(grpc.aio.AioRpcError) as end:
            [_ async for _ in stream]
        assert end.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_files_that_cannot_be_used_are_refused_at_the_start(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    _, other_key = authority.issue("other")
    _, open_key = authority.issue("open")
    open_key.chmod(0o644)
    _, locked_key = authority.issue("locked")
    encrypt(locked_key, "secret")
    for private, words in (
        (other_key, "KEY_VALUES_MISMATCH"),
        (open_key, "every user may read the private key .mode 0644.; run `chmod o-rwx` on it"),
        (locked_key, ""),
        (cert, ""),
    ):
        with pytest.raises(ConfigError, match=f"^tls_cert: the certificate cannot be used: .*(?i:{words})"):
            Edge("unix:/nowhere", EdgeSettings(tls_cert=cert, tls_key=private))
    with pytest.raises(ConfigError, match=f"the certificate cannot be used: .*{key}"):
        Edge("unix:/nowhere", EdgeSettings(tls_cert=cert, tls_key=key, tls_client_ca=key))
    process = EdgeProcess("unix:/nowhere", EdgeSettings(tls_cert=cert, tls_key=other_key))
    with pytest.raises(StartupError, match=r"^tls_cert: the certificate cannot be used"):
        await process.start("127.0.0.1:0")
    await process.stop()


@pytest.mark.parametrize("has_tls", [False, True])
async def test_keys_that_travel_in_plain_text_beyond_this_machine_are_warned_of(
    authority: Authority, tmp_path: Path, has_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = AccessKeys(tmp_path / "access.json")
    keys.add("fox", "foxes", "generate")
    cert, private = authority.issue("server")
    tls = {"tls_cert": cert, "tls_key": private} if has_tls else {}
    edge = Edge(f"unix:{tmp_path}/core.sock", EdgeSettings(keys=keys.path, **tls))
    await edge.start("0.0.0.0:0")
    await edge.stop(grace_s=0)
    assert ("keys travel unencrypted" in caplog.text) == (not has_tls)
