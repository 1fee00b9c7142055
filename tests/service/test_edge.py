"""What stands between callers and the core: one follower for all viewers of a job, and answers that pass unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from h3stream.errors import InvalidRequestError, JobNotFoundError
from h3stream.status import from_rpc_error, is_connection_loss
from h3stream.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2, video_pb2, video_pb2_grpc
from orchestrator import edge_health
from orchestrator.caller import TENANT_KEY, Caller
from orchestrator.edge import Edge
from orchestrator.job_log import JobLog
from services.common.rpc import RpcServer, connect
from tests.service.conftest import Service
from tests.service.test_attach import attach
from tests.service.test_cancel_and_queue import start, until

HEALTH_NAMES = ("", "h3stream.v1.VideoService")


async def test_all_viewers_of_a_job_are_one_follower_to_the_core(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []
    follow = JobLog.follow

    def counted(log: JobLog) -> AsyncIterator[int]:
        followed.append(log)
        return follow(log)

    monkeypatch.setattr(JobLog, "follow", counted)
    gate = service.script.gates["sample:1.1"] = asyncio.Event()
    stream, job_id = await start(service)
    await until(service, "sample:1.1")
    starts: list[dict[str, Any]] = [{}, {"from_seq": 2}, {"live": True}, {"from_chunk": 1}]
    viewers = [asyncio.create_task(attach(service, job_id, **starts[i % 4])) for i in range(20)]
    gate.set()
    made = [response.event async for response in stream]
    assert all([(await viewer)[-1] == made[-1] for viewer in viewers])
    assert len(followed) == 1
    await attach(service, job_id)
    assert len(followed) == 2, "the first was let go with the last viewer"


class ScriptedCore(video_pb2_grpc.VideoServiceServicer, jobs_pb2_grpc.JobServiceServicer):
    """A core that notes what reaches it, with one job."""

    def __init__(self, directory: Path) -> None:
        self.log = JobLog(directory / "events.log")
        self.log.append(video_pb2.Event(seq=0, accepted=video_pb2.Accepted()))
        self.metadata: dict[str, Any] = {}
        self.remaining_s: float | None = None
        self.has_left = asyncio.Event()
        self.has_forgotten = False
        self.tells_more = True

    def log_much(self) -> None:
        """Events 1 to 39: more than gRPC takes on behalf of a viewer that reads nothing."""
        for seq in range(1, 40):
            self.log.append(video_pb2.Event(seq=seq, fragment=types_pb2.Fragment(data=bytes(900_000))))

    async def GetJob(self, request: video_pb2.GetJobRequest, context: Any) -> video_pb2.GetJobResponse:
        self.metadata = dict(context.invocation_metadata())
        self.remaining_s = context.time_remaining()
        if request.job_id == "slow":
            try:
                await asyncio.Event().wait()
            finally:
                self.has_left.set()
        return video_pb2.GetJobResponse(job=video_pb2.Job(job_id=request.job_id))

    async def Follow(self, request: jobs_pb2.FollowRequest, context: Any) -> AsyncIterator[jobs_pb2.FollowResponse]:
        if self.has_forgotten:
            raise JobNotFoundError("there is no such job any more")
        async for num_events in self.log.follow():
            yield jobs_pb2.FollowResponse(path=str(self.log.path), num_events=num_events)
            if not self.tells_more:
                await asyncio.Event().wait()


async def serve_core(core: ScriptedCore, directory: Path) -> RpcServer:
    server = RpcServer(("h3stream.v1.VideoService",))
    video_pb2_grpc.add_VideoServiceServicer_to_server(core, server.server)
    jobs_pb2_grpc.add_JobServiceServicer_to_server(core, server.server)
    await server.start(f"unix:{directory}/core.sock", serving=False)
    return server


@pytest.fixture
async def core(tmp_path: Path) -> ScriptedCore:
    return ScriptedCore(tmp_path)


@pytest.fixture
async def server(core: ScriptedCore, tmp_path: Path) -> AsyncIterator[RpcServer]:
    server = await serve_core(core, tmp_path)
    yield server
    await server.stop(grace_s=0)


@pytest.fixture
async def channel(server: RpcServer, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """To the edge in front of the scripted core."""
    edge = Edge(f"unix:{tmp_path}/core.sock")
    async with connect(await edge.start("127.0.0.1:0")) as channel:
        yield channel
    await edge.stop(grace_s=0)


async def test_the_deadline_reaches_the_core_and_of_the_metadata_who_calls(
    core: ScriptedCore, channel: grpc.aio.Channel
) -> None:
    stub = video_pb2_grpc.VideoServiceStub(channel)
    request = video_pb2.GetJobRequest(job_id="a")
    metadata = (("x-request-id", "17"), ("x-bytes-bin", b"\0\xff"), ("user-agent", "fox"), (TENANT_KEY, "owls"))
    assert (await stub.GetJob(request, timeout=50, metadata=metadata)).job.job_id == "a"
    assert core.remaining_s is not None
    assert 0 < core.remaining_s < 60
    told = {key: value for key, value in core.metadata.items() if key != "user-agent"}
    assert told == dict(Caller(request_id="17").metadata())
    assert "fox" not in core.metadata["user-agent"]
    await stub.GetJob(request)
    assert core.remaining_s is None


async def test_many_calls_at_once_all_have_their_answer(core: ScriptedCore, channel: grpc.aio.Channel) -> None:
    stub = video_pb2_grpc.VideoServiceStub(channel)
    calls = [stub.GetJob(video_pb2.GetJobRequest(job_id="a")) for _ in range(3000)]
    assert {await call.code() for call in calls} == {grpc.StatusCode.OK}


async def test_a_caller_that_goes_leaves_the_core_too(core: ScriptedCore, channel: grpc.aio.Channel) -> None:
    call = video_pb2_grpc.VideoServiceStub(channel).GetJob(video_pb2.GetJobRequest(job_id="slow"))
    async with asyncio.timeout(10):
        while core.remaining_s is None and not core.metadata:
            await asyncio.sleep(0.01)
        call.cancel()
        await core.has_left.wait()


@pytest.mark.parametrize("name", HEALTH_NAMES)
async def test_health_is_the_cores(server: RpcServer, channel: grpc.aio.Channel, name: str) -> None:
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=name)
    watch = stub.Watch(request)
    assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.set_serving(True)
    assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stub.Check(health_pb2.HealthCheckRequest(service="h3stream.v1.JobService"))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_without_the_core_the_server_lives_and_nothing_is_ready(
    core: ScriptedCore, server: RpcServer, channel: grpc.aio.Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_health, "RETRY_S", 0.05)
    stub = health_pb2_grpc.HealthStub(channel)
    lives, ready = (health_pb2.HealthCheckRequest(service=name) for name in HEALTH_NAMES)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    await server.set_serving(True)
    watch = stub.Watch(ready)
    assert (await watch.read()).status == serving
    await server.stop(grace_s=0)
    assert (await watch.read()).status == not_serving
    assert (await stub.Check(lives)).status == serving
    assert (await stub.Check(ready)).status == not_serving
    again = await serve_core(core, tmp_path)
    await again.set_serving(True)
    async with asyncio.timeout(20):
        assert (await watch.read()).status == serving
    await again.stop(grace_s=0)


async def test_callers_see_and_reach_the_public_services_alone(channel: grpc.aio.Channel) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.done_writing()
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == {"h3stream.v1.VideoService", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await jobs_pb2_grpc.JobServiceStub(channel).FindArtifact(jobs_pb2.FindArtifactRequest())
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_job_that_is_removed_is_read_on_by_who_reads_it_and_unknown_to_others(
    core: ScriptedCore, channel: grpc.aio.Channel
) -> None:
    core.log_much()
    core.log.close(None)
    stub = video_pb2_grpc.VideoServiceStub(channel)
    stalled = aiter(stub.Attach(video_pb2.AttachRequest(job_id="a")))
    seen = [(await anext(stalled)).event.seq]
    core.log.path.unlink()
    core.has_forgotten = True
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Attach(video_pb2.AttachRequest(job_id="a")).read()
    assert isinstance(from_rpc_error(refused.value), JobNotFoundError)
    seen += [response.event.seq async for response in stalled]
    assert seen == list(range(40))


async def test_a_caller_that_knows_of_events_before_the_edge_does_is_believed(
    core: ScriptedCore, channel: grpc.aio.Channel
) -> None:
    core.tells_more = False
    stub = video_pb2_grpc.VideoServiceStub(channel)
    early = stub.Attach(video_pb2.AttachRequest(job_id="a"))
    await early.read()
    core.log_much()
    assert (await stub.Attach(video_pb2.AttachRequest(job_id="a", from_seq=39)).read()).event.seq == 39
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Attach(video_pb2.AttachRequest(job_id="a", from_seq=41)).read()
    assert refused.value.details() == "from_seq is 41; the job has 40 events so far, the most it may be"


async def test_a_core_that_is_lost_is_a_lost_connection_and_no_viewer_keeps_others_from_a_new_one(
    core: ScriptedCore, server: RpcServer, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    core.log_much()
    stub = video_pb2_grpc.VideoServiceStub(channel)
    stalled = stub.Attach(video_pb2.AttachRequest(job_id="a"))
    await stalled.read()
    viewer = stub.Attach(video_pb2.AttachRequest(job_id="a", from_seq=39))
    await viewer.read()
    await server.stop(grace_s=0)
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await viewer.read()
    assert is_connection_loss(lost.value)

    again = await serve_core(core, tmp_path)
    async with asyncio.timeout(20):
        while True:  # until the edge has found it
            viewer = stub.Attach(video_pb2.AttachRequest(job_id="a", from_seq=39))
            with suppress(grpc.aio.AioRpcError):
                assert (await viewer.read()).event.seq == 39
                break
            await asyncio.sleep(0.1)
    core.log.close(InvalidRequestError("wrong after all"))
    with pytest.raises(grpc.aio.AioRpcError) as end:
        await viewer.read()
    assert end.value.details() == "wrong after all"
    stalled.cancel()
    await again.stop(grace_s=0)
