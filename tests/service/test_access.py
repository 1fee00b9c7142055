"""Who may call, over real sockets and an edge in a process of its own; and that secrets are nowhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from h3stream.errors import (
    ArtifactNotFoundError,
    JobNotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    StartupError,
    UnauthenticatedError,
)
from h3stream.status import from_rpc_error
from h3stream.v1 import video_pb2
from orchestrator.access import guard, store
from orchestrator.access.__main__ import main as keys_command
from orchestrator.access.guard import NUM_FAILURES, NUM_PROBES
from orchestrator.caller import KEY_ID_KEY, SCOPES_KEY, TENANT_KEY
from orchestrator.edge_process import EdgeProcess
from orchestrator.edge_settings import EdgeSettings
from services.common.rpc import connect
from tests.service.conftest import Service
from tests.service.keyed import AccessKeys, Keyed, keyed_edge, keyed_process
from tests.service.test_cancel_and_queue import until

REQUESTS: dict[str, Any] = {
    "Generate": video_pb2.GenerateRequest(prompt="a fox"),
    "RefineAudio": video_pb2.RefineAudioRequest(header=video_pb2.RefineHeader(job_id="JOB")),
    "Attach": video_pb2.AttachRequest(job_id="JOB"),
    "DownloadArtifact": video_pb2.DownloadArtifactRequest(job_id="JOB", name="video.mp4"),
    "GetJob": video_pb2.GetJobRequest(job_id="JOB"),
    "CancelJob": video_pb2.CancelJobRequest(job_id="JOB"),
    "DeleteJob": video_pb2.DeleteJobRequest(job_id="JOB"),
    "ListJobs": video_pb2.ListJobsRequest(),
    "PlanGeneration": video_pb2.PlanGenerationRequest(),
    "ListAdapters": video_pb2.ListAdaptersRequest(),
    "GetServerInfo": video_pb2.GetServerInfoRequest(),
}
"""One of each call; JOB stands for a job."""


@pytest.fixture
def keys(tmp_path: Path) -> AccessKeys:
    keys = AccessKeys(tmp_path / "access.json")
    keys.add("fox", "foxes", "generate")
    keys.add("owl", "owls", "generate")
    keys.add("eye", "owls", "read_all")
    keys.add("look", "foxes", "read_own")
    keys.add("root", "staff", "admin")
    return keys


@pytest.fixture
async def keyed(service: Service, keys: AccessKeys, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keyed]:
    monkeypatch.setattr(guard, "RECHECK_S", 0.1)
    monkeypatch.setattr(store, "CHECK_S", 0.1)
    monkeypatch.setattr(guard, "SILENCE_S", 0.1)
    async with keyed_edge(service, keys) as keyed:
        yield keyed


@pytest.fixture
async def process(service: Service, keys: AccessKeys) -> AsyncIterator[Keyed]:
    """The same in a process of its own, as it is served."""
    async with keyed_process(service, keys) as keyed:
        yield keyed


async def call(stub: Any, name: str, job_id: str = "none") -> list[Any]:
    """The answers to one of REQUESTS, about a job."""
    request = type(REQUESTS[name])()
    request.CopyFrom(REQUESTS[name])
    if getattr(request, "job_id", "") == "JOB":
        request.job_id = job_id
    if name == "RefineAudio":
        request.header.job_id = job_id
        return [answer async for answer in stub.RefineAudio(iter([request]))]
    answers = getattr(stub, name)(request)
    if hasattr(answers, "__aiter__"):
        return [answer async for answer in answers]
    return [await answers]


async def refusal(*arguments: Any) -> Any:
    """The error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(*arguments)
    return from_rpc_error(refused.value)


async def begin(stub: Any, **fields: Any) -> tuple[Any, str]:
    """A job that is being made, and the call that made it."""
    stream = stub.Generate(video_pb2.GenerateRequest(prompt="a fox", **fields))
    return stream, (await anext(aiter(stream))).event.job_id


async def end_of(stream: Any) -> Any:
    """The error that ends a stream, which must be one."""

    async def read_on() -> None:
        async with asyncio.timeout(20):
            async for _ in stream:
                pass

    with pytest.raises(grpc.aio.AioRpcError) as end:
        await read_on()
    return from_rpc_error(end.value)


def test_every_call_of_the_service_is_asked_for() -> None:
    service = video_pb2.DESCRIPTOR.services_by_name["VideoService"]
    assert sorted(REQUESTS) == sorted(method.name for method in service.methods)


async def test_nobody_calls_without_a_key_but_for_the_health(keyed: Keyed) -> None:
    async with keyed.caller() as nobody, connect(keyed.address) as channel:
        for name in REQUESTS:
            assert type(await refusal(nobody, name)) is UnauthenticatedError, name
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert isinstance(await end_of(reflection), UnauthenticatedError)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert keyed.service.scheduler.page(None, (), "", 10)[0] == [], "no job was made"


async def test_a_key_allows_its_scopes_and_no_more(keyed: Keyed) -> None:
    texts = keyed.keys.texts
    async with keyed.caller(texts["fox"]) as fox, keyed.caller(texts["look"]) as look:
        stream, job_id = await begin(fox)
        assert (await call(look, "GetJob", job_id))[0].job.tenant == "foxes"
        for name in ("Generate", "RefineAudio"):
            error = await refusal(look, name, job_id)
            assert type(error) is PermissionDeniedError
            assert error.message == "that needs a key with the scope generate; this one allows read_own"
        for name in ("CancelJob", "DeleteJob"):
            assert isinstance(await refusal(look, name, job_id), PermissionDeniedError | JobNotFoundError)
        (info,) = await call(look, "GetServerInfo")
        assert (info.caller.tenant, list(info.caller.scopes)) == ("foxes", ["read_own"])
        assert [response async for response in stream][-1].event.HasField("completed")


async def test_other_tenants_jobs_are_unknown_in_every_call_running_or_ended(keyed: Keyed) -> None:
    texts = keyed.keys.texts
    gate = keyed.service.script.gates["sample:1.1"] = asyncio.Event()
    about_a_job = [name for name, request in REQUESTS.items() if "JOB" in str(request)]
    async with keyed.caller(texts["fox"]) as fox, keyed.caller(texts["owl"]) as owl, keyed.caller(texts["eye"]) as eye:
        stream, job_id = await begin(fox)
        await until(keyed.service, "sample:1.1")
        watching = asyncio.create_task(call(fox, "Attach", job_id))  # what the edge knows of the job it knows for foxes
        for _ in range(2):
            for name in about_a_job:
                error = await refusal(owl, name, job_id)
                assert type(error) is JobNotFoundError, name
                assert error.message == (await refusal(owl, name, "0" * len(job_id))).message.replace(
                    "0" * len(job_id), job_id
                ), f"{name}: a job of others looks like none"
            assert (await call(owl, "ListJobs"))[0].jobs == []
            everybodys = owl.ListJobs(video_pb2.ListJobsRequest(all_tenants=True))
            assert await everybodys.code() == grpc.StatusCode.PERMISSION_DENIED
            branch = video_pb2.GenerateRequest(branch=video_pb2.Branch(job_id=job_id, from_chunk=1))
            assert await owl.Generate(branch).code() == grpc.StatusCode.NOT_FOUND
            assert isinstance(await refusal(eye, "CancelJob", job_id), PermissionDeniedError | JobNotFoundError)
            assert (await call(eye, "GetJob", job_id))[0].job.job_id == job_id
            gate.set()
            await watching
        made = [response.event async for response in stream]
        assert made[-1].HasField("completed")
        assert [answer.event for answer in await call(eye, "Attach", job_id)][1:] == made
        assert isinstance(await refusal(eye, "DownloadArtifact", job_id), ArtifactNotFoundError), "it is known to it"
    async with keyed.caller(texts["root"]) as root:
        await call(root, "DeleteJob", job_id)
        assert isinstance(await refusal(root, "GetJob", job_id), JobNotFoundError)


async def test_the_same_idempotency_key_of_two_tenants_names_two_jobs(keyed: Keyed) -> None:
    texts = keyed.keys.texts
    async with keyed.caller(texts["fox"]) as fox, keyed.caller(texts["owl"]) as owl:
        streams = [await begin(stub, idempotency_key="once") for stub in (fox, fox, owl)]
        job_ids = [job_id for _, job_id in streams]
        assert job_ids[0] == job_ids[1] != job_ids[2]
        for stream, _ in streams:
            assert [response async for response in stream][-1].event.HasField("completed")


async def test_reflection_is_for_holders_of_keys(keyed: Keyed) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async with connect(keyed.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        metadata = (("authorization", f"Bearer {keyed.keys.texts['look']}"),)
        answer = await anext(aiter(stub.ServerReflectionInfo(iter([asked]), metadata=metadata)))
        assert "h3stream.v1.VideoService" in {service.name for service in answer.list_services_response.service}
        assert isinstance(await end_of(stub.ServerReflectionInfo(iter([asked]))), UnauthenticatedError)


async def test_callers_cannot_say_who_they_are_by_themselves(keyed: Keyed) -> None:
    claims = {TENANT_KEY: "owls", SCOPES_KEY: "admin", KEY_ID_KEY: "root"}
    async with keyed.caller(keyed.keys.texts["look"], **claims) as look, keyed.caller(**claims) as nobody:
        (info,) = await call(look, "GetServerInfo")
        assert (info.caller.tenant, list(info.caller.scopes)) == ("foxes", ["read_own"])
        assert isinstance(await refusal(look, "Generate"), PermissionDeniedError)
        assert isinstance(await refusal(nobody, "GetServerInfo"), UnauthenticatedError)
    open_to_all = video_pb2.GetServerInfoRequest()
    answer = await keyed.service.stub.GetServerInfo(open_to_all, metadata=tuple(claims.items()))
    assert answer.caller.tenant == "default"


async def test_keys_are_rotated_and_revoked_while_the_server_runs(
    process: Keyed, capsys: pytest.CaptureFixture[str]
) -> None:
    keys_command(["rotate", "--file", str(process.keys.path), "fox", "--overlap", "600"])
    new = capsys.readouterr().out.strip()
    async with process.caller(process.keys.texts["fox"]) as old_caller, process.caller(new) as new_caller:
        await valid(new_caller)
        await call(old_caller, "GetServerInfo")
        keys_command(["revoke", "--file", str(process.keys.path), "fox"])
        await invalid(old_caller)
        await call(new_caller, "GetServerInfo")


async def valid(stub: Any) -> None:
    """Returns once a key is taken."""
    async with asyncio.timeout(10):
        while True:
            try:
                await call(stub, "GetServerInfo")
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)


async def invalid(stub: Any) -> None:
    """Returns once a key is no longer taken."""
    async with asyncio.timeout(10):
        while True:
            try:
                await call(stub, "GetServerInfo")
            except grpc.aio.AioRpcError:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["revoked", "expired", "fewer scopes"])
async def test_streams_of_a_key_that_is_no_longer_valid_end_and_the_job_goes_on(keyed: Keyed, way: str) -> None:
    gate = keyed.service.script.gates["sample:1.1"] = asyncio.Event()
    expires = datetime.now(UTC) + timedelta(seconds=2) if way == "expired" else None
    ending = keyed.keys.add("ending", "foxes", "generate", expires=expires)
    async with keyed.caller(ending) as stub, keyed.caller(keyed.keys.texts["fox"]) as fox:
        await valid(stub)
        stream, job_id = await begin(stub)
        attached = stub.Attach(video_pb2.AttachRequest(job_id=job_id))
        await anext(aiter(attached))
        others = fox.Attach(video_pb2.AttachRequest(job_id=job_id))
        if way == "revoked":
            keyed.keys.revoke("ending")
        elif way == "fewer scopes":
            changed = [
                key if key.key_id != "ending" else type(key)(**{**vars(key), "scopes": ("read_own",)})
                for key in keyed.keys.content.keys
            ]
            keyed.keys.write(keys=changed)
        for call_ in (stream, attached):
            error = await end_of(call_)
            assert type(error) is UnauthenticatedError
            assert error.message == "the key of this call is no longer valid: it has been changed, or has expired"
        gate.set()
        assert [response async for response in others][-1].event.HasField("completed")


async def test_failing_calls_are_limited_by_address_and_no_other_calls_are(keyed: Keyed) -> None:
    async with keyed.caller("h3s_fox_" + "x" * 43) as guesser, keyed.caller(keyed.keys.texts["fox"]) as fox:
        errors = [await refusal(guesser, "GetServerInfo") for _ in range(NUM_FAILURES)]
        while not isinstance(error := await refusal(guesser, "GetServerInfo"), RateLimitedError):
            errors.append(error)  # those that came back meanwhile
        assert {type(error) for error in errors} == {UnauthenticatedError}
        assert error.retry_after_s > 0
        await call(fox, "GetServerInfo")
        await call(fox, "ListJobs")
    statuses = [entry["status"] for entry in await keyed.audited(len(errors) + 2)]
    assert sorted(statuses) == ["OK"] * 2 + ["UNAUTHENTICATED"] * len(errors), "the log does not grow with the others"


async def test_calls_to_the_health_service_are_limited_where_callers_are_told_apart(keyed: Keyed) -> None:
    request = health_pb2.HealthCheckRequest()
    async with connect(keyed.service.address) as channel:
        for _ in range(NUM_PROBES + 20):
            await health_pb2_grpc.HealthStub(channel).Check(request)
    async with connect(keyed.address) as channel, keyed.caller(keyed.keys.texts["fox"]) as fox:
        stub = health_pb2_grpc.HealthStub(channel)
        probes = [stub.Check(request) for _ in range(4 * NUM_PROBES)]  # more than come back meanwhile
        statuses = [await probe.code() for probe in probes]
        assert set(statuses) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        await call(fox, "GetServerInfo")


async def test_a_call_has_an_id_which_its_caller_may_choose(keyed: Keyed) -> None:
    key = keyed.keys.texts["fox"]
    seen = []
    for chosen, is_taken in (("a.b-c/1", True), ("", False), ("x" * 65, False), ("a b", False), (key, False)):
        async with keyed.caller(key, x_request_id=chosen) as stub:
            asked = stub.GetServerInfo(video_pb2.GetServerInfoRequest())
            await asked
            request_id = dict(await asked.initial_metadata())["x-request-id"]
            assert (request_id == chosen) == is_taken
            seen.append(request_id)
    async with keyed.caller(x_request_id="who") as nobody:
        refused = nobody.GetServerInfo(video_pb2.GetServerInfoRequest())
        assert dict(await refused.initial_metadata())["x-request-id"] == "who"
        assert await refused.code() == grpc.StatusCode.UNAUTHENTICATED
    assert [entry["request_id"] for entry in await keyed.audited(6)] == [*seen, "who"]


async def test_the_audit_log_says_who_called_what_and_how_it_ended(keyed: Keyed) -> None:
    texts = keyed.keys.texts
    async with keyed.caller(texts["fox"]) as fox, keyed.caller(texts["owl"]) as owl, keyed.caller() as nobody:
        job_id = (await call(fox, "Generate"))[0].event.job_id
        await refusal(owl, "GetJob", job_id)
        await refusal(owl, "GetJob", "../../etc/passwd")
        await refusal(nobody, "CancelJob", job_id)
    told = ("tenant", "key_id", "method", "job_id", "status")
    entries = await keyed.audited(4)
    assert [tuple(entry[name] for name in told) for entry in entries] == [
        ("foxes", "fox", "Generate", job_id, "OK"),
        ("owls", "owl", "GetJob", job_id, "NOT_FOUND"),
        ("owls", "owl", "GetJob", "", "NOT_FOUND"),
        ("", "", "CancelJob", "", "UNAUTHENTICATED"),
    ]
    reasons = [entry.get("reason") for entry in entries]
    assert reasons == [None, None, None, "this server needs a key: send the metadata `authorization: Bearer KEY`"]
    for entry in entries:
        assert datetime.fromisoformat(entry["time"]).tzinfo is not None
        assert entry["peer"].startswith("ipv4:127.0.0.1:")
    assert keyed.audit.stat().st_mode & 0o777 == 0o600


async def test_the_audit_log_names_the_job_that_a_refused_call_was_to_go_on_from(keyed: Keyed) -> None:
    texts = keyed.keys.texts
    async with keyed.caller(texts["fox"]) as fox, keyed.caller(texts["owl"]) as owl:
        job_id = (await call(fox, "Generate"))[0].event.job_id
        branch = video_pb2.GenerateRequest(branch=video_pb2.Branch(job_id=job_id, from_chunk=1))
        assert await owl.Generate(branch).code() == grpc.StatusCode.NOT_FOUND
        await refusal(owl, "RefineAudio", job_id)
        made = (await anext(aiter(fox.Generate(branch)))).event.job_id
    told = [(entry["method"], entry["job_id"], entry["status"]) for entry in await keyed.audited(4)]
    assert told == [
        ("Generate", job_id, "OK"),
        ("Generate", job_id, "NOT_FOUND"),
        ("RefineAudio", job_id, "NOT_FOUND"),
        ("Generate", made, "CANCELLED"),
    ]


async def test_calls_that_a_stop_ends_are_written_down_too(service: Service, keys: AccessKeys) -> None:
    service.script.gates["sample:1.1"] = asyncio.Event()
    async with keyed_edge(service, keys) as keyed, keyed.caller(keys.texts["fox"]) as fox:
        _, job_id = await begin(fox)
        for _ in range(9):
            await anext(aiter(fox.Attach(video_pb2.AttachRequest(job_id=job_id))))
    assert [entry["status"] for entry in await keyed.audited(10)] == ["CANCELLED"] * 10


async def test_secrets_are_in_no_log_no_file_no_answer_and_no_process_list(
    process: Keyed, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "h3s_fox_" + "w" * 43
    answers: list[Any] = []
    for key in (process.keys.texts["fox"], wrong):
        async with process.caller(key, x_request_id=key) as stub:
            for name in ("Generate", "GetServerInfo", "ListJobs", "GetJob"):
                try:
                    answers += await call(stub, name)
                except grpc.aio.AioRpcError as error:
                    answers.append(f"{error.details()} {error.trailing_metadata()} {error.initial_metadata()}")
            await refusal(stub, "GetJob", key)  # a mistake, and so is what follows, of which the log tells
    process.keys.path.write_text(json.dumps({"keys": [process.keys.texts["fox"]]}))
    async with process.caller(wrong) as stub, asyncio.timeout(10):
        while "access file" not in process.log.read_text():
            await refusal(stub, "GetServerInfo")
            await asyncio.sleep(0.1)
    assert answers[0].event.HasField("accepted")
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    command_lines = [" ".join(each.cmdline()) for each in processes]
    assert any("orchestrator.edge" in line for line in command_lines)
    process.keys.path.unlink()
    files = [path.read_bytes() for path in process.service.data.rglob("*") if path.is_file()]
    everything = [caplog.text, *map(str, answers), *command_lines, *(str(data) for data in files)]
    for text in [*process.keys.texts.values(), wrong]:
        secret = text.split("_", 2)[2]
        assert [place[:200] for place in everything if secret in place] == []


@pytest.mark.parametrize("content", ["{", '{"keys": [{"id": 1}]}'])
async def test_an_edge_whose_access_file_is_broken_does_not_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "access.json"
    path.write_text(content)
    path.chmod(0o600)
    edge = EdgeProcess(f"unix:{tmp_path}/core.sock", EdgeSettings(keys=path))
    with pytest.raises(StartupError, match=f"^access file {path}: "):
        await edge.start("127.0.0.1:0")
    await edge.stop()
