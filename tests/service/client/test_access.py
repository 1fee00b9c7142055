"""Both clients where a server wants to know who calls, and speaks TLS."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from h3stream import (
    AsyncClient,
    Client,
    ConfigError,
    GenerateRequest,
    InvalidRequestError,
    Job,
    JobNotFoundError,
    NotReadyError,
    PermissionDeniedError,
    RateLimitedError,
    TlsOptions,
    UnauthenticatedError,
    UnsupportedError,
)
from tests.fakes import FakeVideoService, Script, content_of, events_of, plan_of, serve_video
from tests.service.certificates import Authority

MADE = list(events_of(plan_of(GenerateRequest("a fox"))))
KEY = "h3s_k1_" + "s3cret" * 7


@pytest.fixture
def service() -> FakeVideoService:
    return FakeVideoService(api_keys={KEY: "studio"})


Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["asyncio", "blocking"])
async def ask(request: pytest.FixtureRequest) -> Ask:
    """`await ask(address, "job", "job-0", api_key=...)` makes one call with a client of its own."""

    async def with_asyncio(address: str, verb: str, *arguments: Any, **access: Any) -> Any:
        async with AsyncClient(address, **access) as client:
            made = getattr(client, verb)(*arguments)
            return [item async for item in made] if hasattr(made, "__aiter__") else await made

    def block(address: str, verb: str, *arguments: Any, **access: Any) -> Any:
        with Client(address, **access) as client:
            made = getattr(client, verb)(*arguments)
            return list(made) if hasattr(made, "__next__") else made

    async def with_threads(*arguments: Any, **access: Any) -> Any:
        return await asyncio.to_thread(block, *arguments, **access)

    return with_asyncio if request.param == "asyncio" else with_threads


async def test_every_call_carries_the_key(ask: Ask, address: str, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = [
        ("generate", "a fox"), ("attach", "job-0"), ("refine", "job-0"), ("branch", "job-0", 1), ("plan", "a fox"),
        ("job", "job-0"), ("job_page",), ("jobs",), ("adapters",), ("server_info",),
        ("download", "job-0", "final.mp4", tmp_path / "final.mp4"), ("save", "a fox", tmp_path / "clip.mp4"),
        ("cancel", "job-0"), ("delete", "job-0"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnauthenticatedError, match="needs an API key"):
            await ask(address, *call)
        await ask(address, *call, api_key=KEY)
    assert (tmp_path / "final.mp4").read_bytes() == content_of("job-0", "final.mp4")


async def test_a_key_is_kept_over_a_lost_connection(ask: Ask, address: str, service: FakeVideoService) -> None:
    service.script = Script(lose_at=[0, 3])
    assert await ask(address, "generate", "a fox", api_key=KEY) == MADE


async def test_refusals_are_raised_as_they_are(ask: Ask, address: str, service: FakeVideoService) -> None:
    with pytest.raises(UnauthenticatedError, match="no such API key"):
        await ask(address, "generate", "a fox", api_key="h3s_k2_other")
    for error in (PermissionDeniedError("needs admin"), RateLimitedError("too many calls", retry_after_s=3)):
        service.script = Script(refuse_with=error)
        with pytest.raises(type(error), match=error.message):
            await ask(address, "job", "job-0", api_key=KEY)


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "schlüssel"])
async def test_a_key_that_no_call_can_carry_is_refused_without_being_told(ask: Ask, key: str) -> None:
    with pytest.raises(ConfigError, match="the API key is empty or holds") as caught:
        await ask("127.0.0.1:1", "server_info", api_key=key)
    assert not key or key not in str(caught.value)


async def test_a_key_is_in_no_repr_error_or_log(ask: Ask, service: FakeVideoService, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve_video(service) as address:
        client = AsyncClient(address, api_key=KEY)
        events = client.generate("a fox")
        said = [repr(client), repr(events), repr(vars(events))]
        await events.aclose()
        await client.close()
        with pytest.raises(JobNotFoundError) as caught:
            await ask(address, "job", "job-9", api_key=KEY)
    said += [str(caught.value), repr(caught.value), str(caught.value.__cause__), caplog.text]
    assert not [text for text in said if "s3cret" in text]


async def test_a_key_that_leaves_the_machine_unencrypted_is_warned_of_once(caplog: Any) -> None:
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/h3stream"):
        await AsyncClient(address, api_key=KEY).close()
    await AsyncClient("studio.example:1").close()
    await AsyncClient("studio.example:1", api_key=KEY, tls=True).close()
    assert caplog.text == ""
    for _ in range(2):
        await AsyncClient("studio.example:1", api_key=KEY).close()
        Client("studio.example:1", api_key=KEY).close()
    (record,) = caplog.records
    assert "the API key goes to studio.example:1 unencrypted" in record.getMessage()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@asynccontextmanager
async def serve_tls(authority: Authority, *, asks_for_certificate: bool = False) -> AsyncIterator[str]:
    cert, key = authority.issue("server", "IP:127.0.0.1")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())],
        authority.cert.read_bytes() if asks_for_certificate else None,
        asks_for_certificate,
    )
    async with serve_video(FakeVideoService(), credentials=credentials) as address:
        yield address


async def test_a_server_is_known_by_its_certificate(ask: Ask, authority: Authority, tmp_path: Path) -> None:
    async with serve_tls(authority) as address:
        assert await ask(address, "generate", "a fox", tls=TlsOptions(ca=authority.cert)) == MADE
        for stranger in (True, TlsOptions(ca=Authority(tmp_path, "other").cert)):
            with pytest.raises(NotReadyError, match="no certificate that is trusted here vouches for this server"):
                await ask(address, "generate", "a fox", tls=stranger)
        with pytest.raises(NotReadyError, match="it may ask for TLS"):
            await ask(address, "generate", "a fox")


async def test_a_client_shows_its_own_certificate(ask: Ask, authority: Authority) -> None:
    cert, key = authority.issue("client")
    async with serve_tls(authority, asks_for_certificate=True) as address:
        tls = TlsOptions(ca=authority.cert, cert=cert, key=str(key))
        assert await ask(address, "generate", "a fox", tls=tls) == MADE
        with pytest.raises(NotReadyError, match="or for a client's certificate"):
            await ask(address, "server_info", tls=TlsOptions(ca=authority.cert))


async def test_a_server_without_tls_is_told(ask: Ask, address: str, authority: Authority) -> None:
    with pytest.raises(NotReadyError, match=f"what listens at {address} does not speak TLS"):
        await ask(address, "generate", "a fox", tls=TlsOptions(ca=authority.cert))


async def test_files_that_do_not_do_are_told(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS cert is given and TLS key is not: give both, or neither"):
        TlsOptions(cert="client.pem")
    with pytest.raises(ConfigError, match=r"TLS ca missing\.pem cannot be read: No such file or directory"):
        await ask("127.0.0.1:1", "server_info", tls=TlsOptions(ca="missing.pem"))
    (tmp_path / "ca.pem").write_bytes(b"\x30\x82")
    with pytest.raises(ConfigError, match=r"ca\.pem is no PEM file"):
        await ask("127.0.0.1:1", "server_info", tls=TlsOptions(ca=tmp_path / "ca.pem"))


async def test_jobs_are_listed_page_by_page_and_removed(ask: Ask, address: str, service: FakeVideoService) -> None:
    service.api_keys.clear()
    for _ in range(5):
        await ask(address, "generate", "a fox")
    await ask(address, "cancel", "job-1")
    async with AsyncClient(address) as client:
        listed = [job async for job in client.jobs(page_size=2)]
        assert [job.job_id for job in listed] == [f"job-{number}" for number in (4, 3, 2, 1, 0)]
        assert [request.page_token for request in service.listed] == ["", "3", "1"]
        assert [job.job_id async for job in client.jobs(states=["cancelled", "failed"], all_tenants=True)] == ["job-1"]
        assert (service.listed[-1].all_tenants, list(service.listed[-1].states)) == (True, [5, 4])
        page = await client.job_page(page_size=1)
        assert (page.jobs[0].prompt, page.next_page_token) == ("a fox", "4")
    jobs: list[Job] = await ask(address, "jobs")
    assert (len(jobs), jobs[3].state) == (5, "cancelled")
    with pytest.raises(UnsupportedError, match="job-0 has not ended"):
        await ask(address, "delete", "job-0")
    assert await ask(address, "delete", "job-1") is None
    with pytest.raises(JobNotFoundError):
        await ask(address, "job", "job-1")
    assert [job.job_id for job in await ask(address, "jobs")] == ["job-4", "job-3", "job-2", "job-0"]


async def test_a_list_that_no_message_can_ask_for_is_refused(address: str) -> None:
    with Client(address) as client:
        for wrong in ({"states": "failed"}, {"states": ["done"]}, {"page_size": 2**31}, {"page_size": "5"}):
            with pytest.raises(InvalidRequestError, match=rf"{next(iter(wrong))} is "):
                next(client.jobs(**wrong))  # type: ignore[arg-type]
