"""A server that is killed at any moment costs its jobs time and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from core.phases import Worker
from h3stream.errors import GenerationError, JobNotFoundError, PhaseError, ResumeError
from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator import journal
from orchestrator import scheduler as scheduler_module
from orchestrator.config import Settings
from orchestrator.job import Job
from orchestrator.job_log import SYNC_EVERY
from orchestrator.scheduler import MAX_VAIN_RESUMES
from services.common.rpc import connect
from tests.job_logs import read_log
from tests.service.conftest import MODEL, serving
from tests.service.fake_workers import ADAPTERS
from tests.service.servers import Servers, ended, gate, media, record, warnings

HIGH, LOW = video_pb2.JOB_PRIORITY_HIGH, video_pb2.JOB_PRIORITY_LOW


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    await servers.close()


async def undisturbed(directory: Path) -> Job:
    """The job as it would have been."""
    directory.mkdir()
    servers = Servers(directory)
    await servers.start()
    job = servers.submit(record())
    await ended(job)
    await servers.close()
    return job


@pytest.mark.parametrize(
    "point",
    [
        "encode",
        "open",
        "sample:0.1",
        "commit:0",
        "sample:1.2",
        "decode:0",
        "decode:1",
        "commit:1",
        "decode:2",
        "finish",
    ],
)
async def test_a_job_goes_on_where_it_was_and_sends_what_it_would_have_sent(
    servers: Servers, tmp_path: Path, point: str
) -> None:
    wanted = await undisturbed(tmp_path / "undisturbed")
    await servers.start(until=gate(point))
    job = servers.submit(record())
    await servers.reached(point)
    servers.kill()
    told = read_log(job.log)

    await servers.start()
    again = servers.job(job.job_id)
    await ended(again)
    events = read_log(again.log)
    assert events[: len(told)] == told
    assert [event.seq for event in events] == list(range(len(events)))
    assert media(again) == media(wanted)
    assert events[-1].completed.latents_sha256 == read_log(wanted.log)[-1].completed.latents_sha256
    assert sorted(a.name for a in again.artifacts) == sorted(a.name for a in wanted.artifacts)
    assert [event.elapsed_s for event in events] == sorted(event.elapsed_s for event in events)
    assert len(warnings(again, "RESUMED")) == 1
    listed = servers.job(job.job_id).to_proto()
    assert (listed.state, listed.num_resumes) == (video_pb2.JOB_STATE_SUCCEEDED, 1)
    assert (listed.num_events, listed.num_frames_emitted) == (len(events), 39)


async def test_a_job_whose_events_are_gone_does_not_begin_again_under_numbers_that_were_told(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    waiting = servers.submit(record("a bear"))
    await servers.reached("sample:1.1")
    servers.kill()
    for job_id in (job.job_id, waiting.job_id):
        (servers.data / "jobs" / job_id / "events.log").unlink()
    await servers.start()
    again = servers.job(job.job_id)
    assert (again.state, type(again.error)) == (video_pb2.JOB_STATE_FAILED, ResumeError)
    begun = servers.job(waiting.job_id)  # of which nothing but its acceptance was told
    await ended(begun)
    assert begun.state == video_pb2.JOB_STATE_SUCCEEDED


async def test_a_viewer_goes_on_with_the_next_number(servers: Servers, tmp_path: Path) -> None:
    await servers.start(until=gate("sample:2.1"))
    job = servers.submit(record())
    await servers.reached("sample:2.1")
    servers.kill()
    seen = read_log(job.log)
    scheduler = servers.open()
    settings = Settings(model=tmp_path, data=servers.data)
    async with serving(tmp_path, scheduler, MODEL, ADAPTERS, settings) as address, connect(address) as channel:
        request = video_pb2.AttachRequest(job_id=job.job_id, from_seq=len(seen))
        rest = video_pb2_grpc.VideoServiceStub(channel).Attach(request)  # while the model is being loaded
        first = asyncio.create_task(anext(aiter(rest)))
        await scheduler.start()
        events = [*seen, (await first).event, *[response.event async for response in rest]]
        whole = [r.event async for r in video_pb2_grpc.VideoServiceStub(channel).Attach(
            video_pb2.AttachRequest(job_id=job.job_id)
        )]  # fmt: skip
    assert [event.seq for event in events] == list(range(len(events)))
    assert events == whole
    assert events[-1].HasField("completed")


async def test_jobs_that_wait_run_in_their_order_behind_those_that_ran(servers: Servers) -> None:
    await servers.start(until=gate("sample:0.1"))
    running = servers.submit(record())
    await servers.reached("sample:0.1")
    low, first, high, second = (
        servers.submit(record(priority=priority)) for priority in (LOW, 0, HIGH, 0)
    )  # fmt: skip
    servers.kill()
    scheduler = servers.open()
    order = [running, high, first, second, low]
    again = [servers.job(job.job_id) for job in order]
    assert [job.queue_position for job in again] == [0, 1, 2, 3, 4]
    assert [job.state for job in again] == [video_pb2.JOB_STATE_RUNNING] + [video_pb2.JOB_STATE_QUEUED] * 4
    await scheduler.start()
    await ended(*again)
    assert sorted(again, key=lambda job: job.ended_s or 0) == again
    assert [job.num_resumes for job in again] == [1, 0, 0, 0, 0]
    assert all(read_log(job.log)[-1].HasField("completed") for job in again)


async def test_two_lanes_take_up_the_two_jobs_that_ran(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"), num_lanes=2)
    jobs = [servers.submit(record(f"fox {number}")) for number in range(3)]
    await servers.reached("sample:1.1", times=2)
    servers.kill()
    await servers.start(until=gate("sample:1.1"), num_lanes=2)
    await servers.reached("sample:1.1", times=2)
    again = [servers.job(job.job_id) for job in jobs]
    assert [job.num_resumes for job in again] == [1, 1, 0]
    assert [job.state for job in again] == [video_pb2.JOB_STATE_RUNNING] * 2 + [video_pb2.JOB_STATE_QUEUED]


async def test_ended_jobs_are_as_they_were(servers: Servers) -> None:
    await servers.start()
    good = servers.submit(record())
    await ended(good)
    servers.script.errors["sample:1.1"] = PhaseError("the kernel is out of order")
    bad = servers.submit(record("a bear"))
    await ended(bad)
    servers.script.gates["sample:0.1"] = asyncio.Event()
    cancelled = servers.submit(record("a cat"))
    await servers.reached("sample:0.1", times=3)
    servers.scheduler.request_cancel(cancelled)
    servers.script.gates["sample:0.1"].set()
    await ended(cancelled)
    before = [servers.job(job.job_id).to_proto() for job in (good, bad, cancelled)]
    servers.kill()
    servers.open()
    again = [servers.job(job.job_id) for job in (good, bad, cancelled)]
    assert [job.to_proto() for job in again] == before
    assert [job.state for job in before] == [
        video_pb2.JOB_STATE_SUCCEEDED, video_pb2.JOB_STATE_FAILED, video_pb2.JOB_STATE_CANCELLED
    ]  # fmt: skip
    assert [told async for told in again[0].log.follow()] == [len(good.log)]
    follower = again[1].log.follow()
    assert await anext(follower) == len(bad.log)
    with pytest.raises(PhaseError) as failure:
        await anext(follower)
    assert bad.error is not None
    for name in ("message", "reason", "job_id", "phase", "chunk_index"):
        assert getattr(failure.value, name) == getattr(bad.error, name), name


async def test_jobs_of_earlier_servers_take_their_turn_to_be_removed(servers: Servers) -> None:
    await servers.start()
    old = [servers.submit(record(f"fox {number}")) for number in range(3)]
    await ended(*old)
    servers.kill()
    await servers.start(kept_jobs=2)
    new = servers.submit(record())
    await ended(new)
    with pytest.raises(JobNotFoundError):
        servers.job(old[0].job_id)
    left = {path.name for path in (servers.data / "jobs").glob("[!.]*")}
    assert left == {old[2].job_id, new.job_id}


async def test_what_was_written_halfway_is_no_event(servers: Servers) -> None:
    await servers.start(until=gate("sample:2.1"))
    job = servers.submit(record())
    await servers.reached("sample:2.1")
    servers.kill()
    log = servers.data / "jobs" / job.job_id / "events.log"
    whole = log.read_bytes()
    last = video_pb2.AttachResponse(event=read_log(job.log)[-1]).SerializeToString()
    log.write_bytes(whole + last[:-1])
    await servers.start()
    again = servers.job(job.job_id)
    await ended(again)
    assert again.log.path.read_bytes().startswith(whole)
    assert [event.seq for event in read_log(again.log)] == list(range(len(again.log)))
    assert again.state == video_pb2.JOB_STATE_SUCCEEDED


async def test_no_number_is_told_twice_after_a_loss_of_power(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    await servers.start(until=gate("sample:2.2"))
    job = servers.submit(record())
    await servers.reached("sample:2.2")
    servers.kill()
    told = read_log(job.log)
    names = [event.WhichOneof("payload") for event in told]
    synced = max(place for place, name in enumerate(names) if name not in ("phase", "progress", "preview"))
    assert synced < len(told) - 1
    log = servers.data / "jobs" / job.job_id / "events.log"
    log.write_bytes(b"".join(video_pb2.AttachResponse(event=e).SerializeToString() for e in told[: synced + 1]))
    monkeypatch.setattr(journal, "_boot_id", lambda: "another boot")
    await servers.start()
    again = servers.job(job.job_id)
    await ended(again)
    events = read_log(again.log)
    padding = events[synced + 1 : synced + 1 + SYNC_EVERY]
    assert all(event.progress.is_heartbeat for event in padding)
    assert len(told) <= padding[-1].seq + 1
    assert media(again) == media(await undisturbed(servers.data.parent / "undisturbed"))


async def test_a_job_that_ends_its_server_again_and_again_fails_and_the_others_run(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    other = servers.submit(record("a bear"))
    for _ in range(MAX_VAIN_RESUMES):
        await servers.reached("sample:1.1")
        servers.kill()
        await servers.start(until=gate("sample:1.1"))
    await servers.reached("sample:1.1")
    servers.kill()
    await servers.start()
    again = servers.job(job.job_id)
    await ended(again, servers.job(other.job_id))
    assert isinstance(again.error, ResumeError)
    assert again.error.message.startswith("the server was lost in phase denoise of chunk 1 although")
    assert servers.job(other.job_id).state == video_pb2.JOB_STATE_SUCCEEDED


async def test_a_job_may_lose_any_number_of_servers_while_it_comes_further(servers: Servers) -> None:
    points = ["sample:0.1", "sample:1.1", "decode:0", "decode:1", "sample:2.1", "decode:2", "finish"]
    await servers.start(until=gate(points[0]))
    job = servers.submit(record())
    for point, following in zip(points, [*points[1:], ""], strict=True):
        await servers.reached(point)
        servers.kill()
        await servers.start(until=gate(*([following] if following else [])))
    again = servers.job(job.job_id)
    await ended(again)
    assert (again.state, again.num_resumes) == (video_pb2.JOB_STATE_SUCCEEDED, len(points))
    assert len(points) > MAX_VAIN_RESUMES


async def test_a_job_that_waits_to_go_on_can_be_cancelled(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    await servers.reached("sample:1.1")
    servers.kill()
    scheduler = servers.open()
    again = servers.job(job.job_id)
    scheduler.request_cancel(again)
    await again.wait_ended()
    assert servers.job(job.job_id).state == video_pb2.JOB_STATE_CANCELLED
    await scheduler.start()
    next_job = servers.submit(record("a bear"))
    await ended(next_job)
    assert next_job.state == video_pb2.JOB_STATE_SUCCEEDED
    assert servers.script.calls.count("encode") == 1


async def test_a_key_names_its_job_beyond_its_server(servers: Servers) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record(idempotency_key="mine"))
    await servers.reached("sample:1.1")
    servers.kill()
    await servers.start()
    assert servers.submit(record(idempotency_key="mine")).job_id == job.job_id
    await ended(servers.job(job.job_id))
    assert servers.submit(record(idempotency_key="mine")).job_id == job.job_id
    with pytest.raises(GenerationError, match="has named another request"):
        servers.submit(record("a bear", idempotency_key="mine"))
    assert len(servers.scheduler.page(None, (), "", 10)[0]) == 1


async def test_viewers_hear_that_a_job_lives_while_the_model_is_loaded(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await servers.start(until=gate("sample:1.1"))
    job = servers.submit(record())
    await servers.reached("sample:1.1")
    servers.kill()
    monkeypatch.setattr(scheduler_module, "TICK_S", 0.005)
    monkeypatch.setattr(scheduler_module, "HEARTBEAT_S", 0.0)
    scheduler = servers.open()
    (host,) = servers.hosts
    start, may_load = host.start, asyncio.Event()

    async def load() -> Mapping[Worker, str]:
        await may_load.wait()
        return await start()

    monkeypatch.setattr(host, "start", load)
    starting = asyncio.create_task(scheduler.start())
    again = servers.job(job.job_id)
    follower = again.log.follow()
    num_events = await anext(follower)
    async with asyncio.timeout(10):
        while await anext(follower) < num_events + 3:
            pass
    assert all(event.progress.is_heartbeat for event in read_log(again.log)[num_events:])
    await follower.aclose()
    may_load.set()
    await starting
    await ended(again)
    assert again.state == video_pb2.JOB_STATE_SUCCEEDED
