"""The `h3stream` command where jobs are listed, branched, followed over a restart and removed, and who it is to a
server."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from h3stream import Branch, Fragment, GenerateRequest, RefineSpec, TlsOptions
from h3stream.cli import make_parser
from h3stream.endpoint import Endpoint, endpoint_of
from h3stream.errors import ConfigError
from tests.fakes import FakeVideoService, Script, events_of, media_of, plan_of, serve_video
from tests.service.certificates import Authority
from tests.service.client.conftest import Run, finish, start, until

PLAN = plan_of(GenerateRequest("a fox"))
MADE = list(events_of(PLAN))
FRAGMENTS = [event for event in MADE if isinstance(event, Fragment)]
KEY = "h3s_k1_" + "s3cret" * 7


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        ([], media_of(PLAN)),
        (["--from-chunk", "2"], b"".join(event.media for event in MADE if event.media and event != FRAGMENTS[0])),
        (["--live"], b"".join(event.media for event in MADE if event.media and event != FRAGMENTS[0])),
    ],
    ids=["whole", "chunk", "live"],
)
async def test_attach_goes_on_when_the_server_is_back(tmp_path: Path, begin: list[str], expected: bytes) -> None:
    service = FakeVideoService()
    async with AsyncExitStack() as first:
        address = await first.enter_async_context(serve_video(service))
        result = await finish(await start("generate", "a fox", "-o", "made.mp4", "--server", address, cwd=tmp_path))
        assert result.status == 0, result.err
        service.script = Script(silent_at=FRAGMENTS[-1].seq)
        process = await start("attach", "job-0", "-o", "clip.mp4", *begin, "--server", address, cwd=tmp_path)
        await until(lambda: len(service.attached) == 1)
    service.script = Script()
    async with serve_video(service, address):
        result = await finish(process)
    assert result.status == 0, result.err
    assert (tmp_path / "clip.mp4").read_bytes() == expected
    told = [line for line in result.err.splitlines() if "connect" in line]
    assert told == ["h3stream: connection lost; trying again for up to 60 s", "h3stream: connected again"]


async def test_a_job_that_a_stopping_server_leaves_to_the_next_can_be_followed(
    run: Run, address: str, service: FakeVideoService
) -> None:
    service.script = Script(restart_at=[FRAGMENTS[0].seq + 1])
    result = await run("generate", "a fox", "-o", "clip.mp4")
    assert result.status == 1
    way, kept, error, _ = result.err.splitlines()[-4:]
    assert way == f"h3stream: job job-0 goes on; follow it with: h3stream attach job-0 --server {address} -o FILE"
    assert kept.endswith("clip.mp4 keeps the 17 of 39 frames that had arrived")
    assert error.startswith("h3stream: SERVER_STOPPING: ")


async def test_a_branch_is_made_with_every_option(run: Run, service: FakeVideoService, tmp_path: Path) -> None:
    await run("generate", "a fox", "-o", "made.mp4")
    result = await run("branch", "job-0", "--from-chunk", "2", "-o", "clip.mp4")
    assert result.status == 0, result.err
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN, "job-1")
    options = (
        "--prompt snow --seed 7 --artifact final.mp4 --priority high --deadline 90.5 --idempotency-key again "
        "--no-cancel-on-disconnect --refine-steps 3"
    )
    for _ in range(2):
        result = await run("branch", "job-0", "--from-chunk", "1", "-o", "clip.mp4", *options.split())
        assert result.status == 0, result.err
        assert "job job-2: " in result.err
    assert service.requests[1:] == [
        GenerateRequest(branch=Branch("job-0", 2), cancel_on_disconnect=True),
        GenerateRequest(
            branch=Branch("job-0", 1, "snow", 7), artifacts=("final.mp4",), priority="high", deadline_s=90.5,
            refine_audio=RefineSpec(steps=3),
        ),
    ]  # fmt: skip
    result = await run("branch", "job-9", "--from-chunk", "1", "-o", "clip.mp4")
    assert (result.status, result.err.splitlines()[0]) == (1, "h3stream: JOB_NOT_FOUND: there is no job 'job-9'")


async def test_order_and_name_of_a_request_arrive(run: Run, service: FakeVideoService) -> None:
    order = ("--priority", "low", "--deadline", "60", "--idempotency-key", "my-fox")
    result = await run("generate", "a fox", "-o", "clip.mp4", *order)
    assert result.status == 0, result.err
    (request,) = service.requests
    assert (request.priority, request.deadline_s, service.idempotency_keys) == ("low", 60.0, ["my-fox"])
    result = await run("refine", "job-0", "-o", "louder.mp4", *order[:-1], "my-sound")
    assert result.status == 0, result.err
    (header,) = service.headers
    assert (header.priority, header.deadline_s, header.idempotency_key) == (1, 60.0, "my-sound")
    for wrong in (("--deadline", "nan"), ("--idempotency-key", "two words")):
        assert (await run("generate", "a fox", "-o", "clip.mp4", *wrong)).status == 2


async def test_jobs_are_a_table_or_json_and_can_be_removed(run: Run, service: FakeVideoService) -> None:
    assert (await run("jobs")).out == b"none\n"
    for prompt in ("a fox", "\x1b[31ma bear\n" + "in the snow " * 9):
        await run("generate", prompt, "-o", "clip.mp4")
    await run("cancel", "job-0")
    heading, second, first = (await run("jobs")).out.decode().splitlines()
    assert re.split(r"\s{2,}", heading) == ["job", "state", "created", "frames", "prompt"]
    assert re.fullmatch(r"job-1 +running +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +17/39 +\[31ma bear in the snow .*…", second)
    assert re.fullmatch(r"job-0 +cancelled .* a fox", first)
    assert (await run("jobs", "--limit", "1")).out.count(b"\n") == 2
    assert b"job-1" not in (await run("jobs", "--state", "cancelled", "--state", "failed")).out
    listed = json.loads((await run("jobs", "--json", "--all-tenants")).out)
    assert [(job["job_id"], job["prompt"][:5]) for job in listed] == [("job-1", "\x1b[31m"), ("job-0", "a fox")]
    assert service.listed[-1].all_tenants
    result = await run("delete", "job-1", "job-7", "job-0")
    assert (result.status, result.out) == (1, b"job-0\n")
    assert "job-1 has not ended" in result.err
    assert "there is no job 'job-7'" in result.err
    assert service.deleted == {"job-0"}
    assert (await run("jobs", "--limit", "0")).status == 2


async def test_the_key_comes_from_a_file_or_the_environment_and_is_never_told(
    service: FakeVideoService, address: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.api_keys = {KEY: "studio"}
    (tmp_path / "key").write_text(f"{KEY}\n")
    refused = await run("generate", "a fox", "-o", "clip.mp4")
    assert (refused.status, refused.err) == (1, "h3stream: UNAUTHENTICATED: that needs an API key\n")
    results = [await run("generate", "a fox", "-o", "clip.mp4", "--api-key-file", "key")]
    results.append(await run("jobs", "--api-key-file", "key"))
    monkeypatch.setenv("H3STREAM_API_KEY", KEY)
    results.append(await run("download", "job-0", "final.mp4"))
    results.append(await run("job", "job-0"))
    (tmp_path / "key").write_text("another")
    results.append(await run("job", "job-0", "--api-key-file", "key"))
    assert [result.status for result in results] == [0, 0, 0, 0, 1]
    assert "no such API key" in results[-1].err
    (tmp_path / "key").write_bytes(b"two s3cret words")
    results.append(await run("job", "job-0", "--api-key-file", "key"))
    results.append(await run("job", "job-0", "--api-key-file", "missing"))
    assert [result.status for result in results[-2:]] == [2, 2]
    assert "missing cannot be read: No such file" in results[-1].err
    assert not [result for result in results if "s3cret" in result.err or b"s3cret" in result.out]


async def test_a_command_speaks_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    authority = Authority(tmp_path, "authority")
    cert, key = authority.issue("server", "IP:127.0.0.1")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    service = FakeVideoService()
    async with serve_video(service, credentials=credentials) as address:
        ca = ("--server", address, "--tls-ca", str(authority.cert))
        result = await finish(await start("generate", "a fox", "-o", "clip.mp4", *ca, cwd=tmp_path))
        assert result.status == 0, result.err
        service.script = Script(has_stream=False)
        result = await finish(await start("attach", "job-0", "-o", "clip.mp4", *ca, cwd=tmp_path))
        assert result.err.rstrip().endswith(f"h3stream download job-0 NAME {' '.join(ca)}")
        result = await finish(await start("jobs", "--server", address, cwd=tmp_path))
        assert (result.status, result.out) == (1, b"")
        assert f"what listens at {address} ends the connection: it may ask for TLS" in result.err


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ("", {}, None),
        ("--tls", {}, True),
        ("", {"H3STREAM_TLS": "1"}, True),
        ("", {"H3STREAM_TLS": "no", "H3STREAM_TLS_CA": "ca.pem"}, None),
        ("--tls", {"H3STREAM_TLS": "no", "H3STREAM_TLS_CA": "ca.pem"}, TlsOptions(ca="ca.pem")),
        (
            "",
            {"H3STREAM_TLS_CA": "ca.pem", "H3STREAM_CLIENT_CERT": "", "H3STREAM_CLIENT_KEY": ""},
            TlsOptions(ca="ca.pem"),
        ),
        ("--tls-cert c --tls-key k", {"H3STREAM_CLIENT_KEY": "other"}, TlsOptions(cert=Path("c"), key=Path("k"))),
    ],
)
def test_flags_come_before_the_environment(
    arguments: str, environment: dict[str, str], expected: TlsOptions | bool | None
) -> None:
    parsed = make_parser().parse_args(["info", "--server", "studio:1", *arguments.split()])
    endpoint = endpoint_of(parsed, environment | {"H3STREAM_API_KEY": KEY})
    assert (endpoint.tls, endpoint.api_key) == (expected, KEY)
    assert "s3cret" not in f"{endpoint!r} {endpoint.options}"


def test_a_variable_that_is_neither_yes_nor_no_is_refused() -> None:
    parsed = make_parser().parse_args(["info"])
    with pytest.raises(ConfigError, match="H3STREAM_TLS is 'perhaps'; it must be one of 0, false, no, 1, true, yes"):
        endpoint_of(parsed, {"H3STREAM_TLS": "perhaps"})


def test_what_names_a_server_can_be_typed_again() -> None:
    tls = TlsOptions(ca="my ca.pem", cert="c", key="k")
    assert Endpoint("a:1", KEY, tls).options == "--server a:1 --tls-ca 'my ca.pem' --tls-cert c --tls-key k"
    assert Endpoint("a:1", KEY, True).options == "--server a:1 --tls"


@pytest.mark.parametrize(("command", "words"), [("keys", "add"), ("doctor", "--json")])
async def test_programs_of_the_server_are_run_with_their_own_options(command: str, words: str, tmp_path: Path) -> None:
    result = await finish(await start(command, "--help", cwd=tmp_path))
    assert (result.status, result.err) == (0, "")
    assert words in result.out.decode()
