"""AsyncClient against a real server: what it yields, what it refuses to believe, and how it ends a call."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from h3stream import (
    AdapterChoice,
    AdapterUse,
    AsyncClient,
    AsyncGeneration,
    BrokenStreamError,
    Completed,
    DeadlineError,
    Event,
    Fragment,
    GenerateRequest,
    GenerationError,
    InitSegment,
    InvalidRequestError,
    JobCancelledError,
    JobNotFoundError,
    MuxError,
    NotReadyError,
    OffGridError,
    OverloadedError,
)
from tests.fakes import ADAPTERS, SERVER_INFO, FakeVideoService, Script, events_of, media_of, plan_of, serve_video

PLAN = plan_of(GenerateRequest("a fox"))


@pytest.fixture
async def client(service: FakeVideoService) -> AsyncIterator[AsyncClient]:
    async with serve_video(service) as address, AsyncClient(address) as client:
        yield client


async def collect(client: AsyncClient, **options: float | str) -> tuple[list[Event], GenerationError | None]:
    """The events of a job and the error that ended it."""
    received: list[Event] = []
    try:
        async for event in client.generate("a fox", **options):  # type: ignore[arg-type]
            received.append(event)
    except GenerationError as error:
        return received, error
    return received, None


async def exhaust(events: AsyncGeneration) -> None:
    async for _ in events:
        pass


async def test_every_event_arrives_in_order_as_it_was_made(client: AsyncClient) -> None:
    received, error = await collect(client)
    assert error is None
    assert received == list(events_of(PLAN))


async def test_a_dense_clip_arrives_in_order_as_it_was_made(client: AsyncClient) -> None:
    received, error = await collect(client, mode="dense")
    assert error is None
    assert received == list(events_of(plan_of(GenerateRequest("a fox", mode="dense"))))


async def test_the_request_arrives_as_it_was_made(client: AsyncClient, service: FakeVideoService) -> None:
    request = GenerateRequest("a fox", num_frames=22, seed=2**64 - 1, window="all", kv_storage="cpu", video_shift=5.5)
    async for _ in client.generate(request, steps=3):
        pass
    assert service.requests == [
        GenerateRequest(
            "a fox", num_frames=22, seed=2**64 - 1, window="all", kv_storage="cpu", video_shift=5.5, steps=3
        )
    ]


async def test_the_job_id_is_known_from_the_first_event_on(client: AsyncClient) -> None:
    events = client.generate("a fox")
    assert events.job_id == ""
    await anext(events)
    assert events.job_id == "job-0"
    await events.aclose()


async def test_what_was_delivered_before_a_failure_stays_valid(client: AsyncClient, service: FakeVideoService) -> None:
    first = next(e for e in events_of(PLAN) if isinstance(e, Fragment))
    service.script = Script(
        fail_at=first.seq + 1, fail_with=MuxError("no encoder", job_id="job-0", phase="decode", chunk_index=0)
    )
    received, error = await collect(client)
    assert received == list(events_of(PLAN))[: first.seq + 1]
    assert isinstance(error, MuxError)
    assert (error.message, error.job_id, error.phase, error.chunk_index) == ("no encoder", "job-0", "decode", 0)
    assert isinstance(error.__cause__, grpc.RpcError)


async def test_a_generation_that_has_failed_yields_nothing_more(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(fail_at=1, fail_with=MuxError("no encoder"))
    events = client.generate("a fox")
    await anext(events)
    with pytest.raises(MuxError):
        await anext(events)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


@pytest.mark.parametrize(
    ("script", "num_received", "words"),
    [
        (Script(drop=4), 4, "event 5 came where 4 was due"),
        (Script(drop=0), 0, "event 1 came where 0 was due"),
        (Script(repeat=4), 5, "event 4 came where 5 was due"),
        (Script(stop_at=6), 6, "ended after 6 events"),
        (Script(stop_at=0), 0, "ended after 0 events"),
    ],
)
async def test_a_stream_with_a_gap_a_repeat_or_no_end_is_refused(
    client: AsyncClient, service: FakeVideoService, script: Script, num_received: int, words: str
) -> None:
    service.script = script
    received, error = await collect(client)
    assert isinstance(error, BrokenStreamError)
    assert words in error.message
    assert received == list(events_of(PLAN))[:num_received]


async def test_a_gap_ends_the_call(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(drop=2, stall_at=4)
    _, error = await collect(client)
    assert isinstance(error, BrokenStreamError)
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_leaving_the_block_early_ends_the_call(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(stall_at=3)
    async with client.generate("a fox") as events:
        async for event in events:
            if event.seq == 3:
                break
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_breaking_out_of_a_loop_ends_the_call(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(stall_at=3)
    async for event in client.generate("a fox"):
        if event.seq == 3:
            break
    gc.collect()
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_a_generation_that_is_never_read_can_be_closed(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(stall_at=0)
    events = client.generate("a fox")
    while not service.requests:
        await asyncio.sleep(0.01)
    await events.aclose()
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_cancelling_the_reading_task_ends_the_call(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(silent_at=3)
    task = asyncio.create_task(collect(client))
    while not service.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(service.disconnected.wait(), 2)


@pytest.mark.parametrize("script", [Script(stall_at=3), Script(silent_at=3)], ids=["heartbeats", "silence"])
async def test_a_job_that_stands_still_is_given_up(
    client: AsyncClient, service: FakeVideoService, script: Script
) -> None:
    service.script = script
    started_s = asyncio.get_running_loop().time()
    received, error = await collect(client, stall_timeout_s=0.3)
    assert isinstance(error, DeadlineError)
    assert error.job_id == "job-0"
    assert 0.25 < asyncio.get_running_loop().time() - started_s < 3
    assert received[:3] == list(events_of(PLAN))[:3]
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_a_slow_reader_is_not_taken_for_a_job_that_stands_still(client: AsyncClient) -> None:
    num_events = 0
    async for _ in client.generate("a fox", stall_timeout_s=0.1):
        num_events += 1
        if num_events == 3:
            await asyncio.sleep(0.3)
    assert num_events == len(list(events_of(PLAN)))


async def test_cancel_ends_the_job_and_its_stream(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(stall_at=3)
    events = client.generate("a fox")
    for _ in range(3):
        await anext(events)
    job = await client.cancel(events.job_id)
    assert (job.job_id, job.state) == ("job-0", "cancelled")
    with pytest.raises(JobCancelledError, match="job-0 was cancelled"):
        await exhaust(events)


async def test_save_writes_the_stream_and_returns_the_last_event(client: AsyncClient, tmp_path: Path) -> None:
    completed = await client.save("a fox", tmp_path / "clip.mp4", num_frames=39)
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    assert isinstance(completed, Completed)
    assert completed == list(events_of(PLAN))[-1]


async def test_save_keeps_what_had_arrived_when_the_job_fails(
    client: AsyncClient, service: FakeVideoService, tmp_path: Path
) -> None:
    media = [e for e in events_of(PLAN) if isinstance(e, InitSegment | Fragment)]
    service.script = Script(fail_at=media[1].seq + 1, fail_with=MuxError("no encoder"))
    with pytest.raises(MuxError):
        await client.save("a fox", tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").read_bytes() == media[0].data + media[1].data


async def test_save_raises_where_the_job_succeeds_without_a_stream(
    client: AsyncClient, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(has_stream=False)
    with pytest.raises(MuxError, match=r"not whole: no encoder can open; .* has of the job: audio\.flac"):
        await client.save("a fox", tmp_path / "clip.mp4")
    assert list(tmp_path.iterdir()) == []


async def test_a_refused_request_leaves_an_older_file_alone(client: AsyncClient, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"older")
    with pytest.raises(OffGridError):
        await client.save("a fox", path, num_frames=40)
    assert path.read_bytes() == b"older"


async def test_a_request_that_no_message_can_hold_is_refused_before_it_is_sent(
    client: AsyncClient, service: FakeVideoService
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate("a fox", num_frames=2**31)
    assert [violation.field for violation in caught.value.violations] == ["num_frames"]
    assert service.requests == []


async def test_plan_job_adapters_and_server_info_arrive_whole(client: AsyncClient, service: FakeVideoService) -> None:
    assert await client.plan("a fox", num_frames=22) == plan_of(GenerateRequest("a fox", num_frames=22))
    dense = GenerateRequest("a fox", mode="dense", adapters=[AdapterChoice("turbo", 0.5), AdapterChoice("style")])
    plan = await client.plan(dense)
    assert plan == plan_of(dense)
    assert plan.clip.adapters == (AdapterUse("turbo", 0.5), AdapterUse("style", 1.0))
    assert service.requests == []
    assert await client.server_info() == SERVER_INFO
    assert await client.adapters() == ADAPTERS
    await collect(client)
    job = await client.job("job-0")
    assert (job.state, job.plan, job.create_time.isoformat()) == ("running", PLAN, "2026-01-02T03:04:05+00:00")
    assert (job.end_time, job.error) == (None, None)


async def test_a_job_that_does_not_exist_is_not_found(client: AsyncClient) -> None:
    for call in (client.job, client.cancel):
        with pytest.raises(JobNotFoundError) as caught:
            await call("job-7")
        assert caught.value.job_id == "job-7"


async def test_a_full_server_says_when_to_come_back(client: AsyncClient, service: FakeVideoService) -> None:
    service.script = Script(refuse_with=OverloadedError("4 jobs wait already", retry_after_s=2.5))
    _, error = await collect(client)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 2.5


async def test_a_server_that_is_not_there_is_not_ready() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        _, error = await collect(client)
        assert isinstance(error, NotReadyError)
        with pytest.raises(NotReadyError, match=r"nothing answers at 127\.0\.0\.1:1; is a server running there"):
            await client.server_info()


async def test_following_a_job_where_nobody_is_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(NotReadyError, match=r"nothing answers at 127\.0\.0\.1:1"):
            await exhaust(client.attach("job-1", reconnect_s=600))
    assert "connection lost" not in caplog.text


async def test_a_server_that_goes_away_mid_stream_is_not_ready() -> None:
    service = FakeVideoService(script=Script(stall_at=3))
    async with serve_video(service) as address:
        client = AsyncClient(address)
        events = client.generate("a fox", reconnect_s=0)
        await anext(events)
    with pytest.raises(NotReadyError):
        await exhaust(events)
    await client.close()


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)  # accepts, never answers
    port = server.sockets[0].getsockname()[1]
    async with AsyncClient(f"127.0.0.1:{port}", timeout_s=0.2) as client:
        with pytest.raises(DeadlineError):
            await client.server_info()
    server.close()
