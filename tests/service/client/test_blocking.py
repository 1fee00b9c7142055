"""Client against a real server. The rules are AsyncClient's; what is tested here is the waiting, which differs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

import h3stream
from h3stream import (
    BrokenStreamError,
    Client,
    DeadlineError,
    Event,
    Fragment,
    GenerateRequest,
    JobCancelledError,
    JobNotFoundError,
    MuxError,
    NotReadyError,
)
from tests.fakes import ADAPTERS, SERVER_INFO, FakeVideoService, Script, events_of, media_of, plan_of

PLAN = plan_of(GenerateRequest("a fox"))


async def test_every_event_arrives_in_order_as_it_was_made(address: str) -> None:
    def run() -> list[Event]:
        with Client(address) as client:
            return list(client.generate("a fox"))

    assert await asyncio.to_thread(run) == list(events_of(PLAN))


async def test_the_program_in_the_package_docstring_works(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert h3stream.__doc__ is not None
    lines = [line[4:] for line in h3stream.__doc__.splitlines() if line.startswith("    ")]
    program = "\n".join(lines).replace("127.0.0.1:50051", address)
    assert address in program
    assert len([line for line in lines if line]) <= 5
    monkeypatch.chdir(tmp_path)
    await asyncio.to_thread(exec, program, {})
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)


async def test_what_was_delivered_before_a_failure_stays_valid(address: str, service: FakeVideoService) -> None:
    service.script = Script(fail_at=5, fail_with=MuxError("no encoder", job_id="job-0", phase="decode", chunk_index=0))
    received: list[Event] = []

    def run() -> None:
        with Client(address) as client:
            events = client.generate("a fox")
            with pytest.raises(MuxError, match="no encoder") as caught:
                received.extend(events)
            assert isinstance(caught.value.__cause__, grpc.RpcError)
            assert list(events) == []
            assert events.job_id == "job-0"

    await asyncio.to_thread(run)
    assert received == list(events_of(PLAN))[:5]


async def test_a_gap_is_refused_and_ends_the_call(address: str, service: FakeVideoService) -> None:
    service.script = Script(drop=2, stall_at=4)

    def run() -> None:
        with Client(address) as client, pytest.raises(BrokenStreamError, match="event 3 came where 2 was due"):
            list(client.generate("a fox"))

    await asyncio.to_thread(run)
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_breaking_out_of_a_loop_ends_the_call(address: str, service: FakeVideoService) -> None:
    service.script = Script(stall_at=3)
    with Client(address) as client:

        def run() -> None:
            for event in client.generate("a fox"):
                if event.seq == 3:
                    break

        await asyncio.to_thread(run)
        await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_leaving_the_block_early_ends_the_call(address: str, service: FakeVideoService) -> None:
    service.script = Script(stall_at=3)
    with Client(address) as client:
        kept = await asyncio.to_thread(client.generate, "a fox")

        def run() -> None:
            with kept as events:
                assert [next(events).seq for _ in range(4)] == [0, 1, 2, 3]

        await asyncio.to_thread(run)
        await asyncio.wait_for(service.disconnected.wait(), 2)


@pytest.mark.parametrize("script", [Script(stall_at=3), Script(silent_at=3)], ids=["heartbeats", "silence"])
async def test_a_job_that_stands_still_is_given_up(address: str, service: FakeVideoService, script: Script) -> None:
    service.script = script

    def run() -> None:
        with Client(address) as client, pytest.raises(DeadlineError, match=r"not moved for 0\.3 s"):
            list(client.generate("a fox", stall_timeout_s=0.3))

    await asyncio.to_thread(run)
    await asyncio.wait_for(service.disconnected.wait(), 2)


async def test_cancel_from_another_thread_ends_the_stream(address: str, service: FakeVideoService) -> None:
    service.script = Script(stall_at=3)
    with Client(address) as client:
        events = await asyncio.to_thread(client.generate, "a fox")
        await asyncio.to_thread(next, events)
        rest = asyncio.create_task(asyncio.to_thread(list, events))
        assert (await asyncio.to_thread(client.cancel, events.job_id)).state == "cancelled"
        with pytest.raises(JobCancelledError):
            await rest


async def test_save_writes_the_stream(address: str, tmp_path: Path) -> None:
    with Client(address) as client:
        completed = await asyncio.to_thread(client.save, "a fox", tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").read_bytes() == media_of(PLAN)
    assert completed == list(events_of(PLAN))[-1]


async def test_save_raises_where_the_job_succeeds_without_a_stream(
    address: str, service: FakeVideoService, tmp_path: Path
) -> None:
    service.script = Script(has_stream=False)
    (tmp_path / "clip.mp4").write_bytes(b"older")
    with Client(address) as client, pytest.raises(MuxError, match=r"the server has of the job: audio\.flac") as caught:
        await asyncio.to_thread(client.save, "a fox", tmp_path / "clip.mp4")
    assert caught.value.job_id == "job-0"
    assert not (tmp_path / "clip.mp4").exists()


async def test_the_file_is_whole_after_every_event(address: str, service: FakeVideoService, tmp_path: Path) -> None:
    first = next(e for e in events_of(PLAN) if isinstance(e, Fragment))
    service.script = Script(stall_at=first.seq + 1)
    path = tmp_path / "clip.mp4"
    with Client(address) as client:
        saving = asyncio.create_task(asyncio.to_thread(client.save, "a fox", path))
        due = b"".join(event.media for event in events_of(PLAN) if event.seq <= first.seq)
        while not path.exists() or len(path.read_bytes()) < len(due):
            await asyncio.sleep(0.01)
        assert path.read_bytes() == due
        await asyncio.to_thread(client.cancel, "job-0")
        with pytest.raises(JobCancelledError):
            await saving
    assert path.read_bytes() == due


async def test_plan_job_adapters_and_server_info_arrive_whole(address: str) -> None:
    def run() -> None:
        with Client(address) as client:
            assert client.plan("a fox") == PLAN
            assert client.adapters() == ADAPTERS
            assert client.server_info() == SERVER_INFO
            with pytest.raises(JobNotFoundError):
                client.job("job-0")
            list(client.generate("a fox"))
            assert client.job("job-0").plan == PLAN

    await asyncio.to_thread(run)


def test_a_server_that_is_not_there_is_not_ready() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(NotReadyError, match=r"nothing answers at 127\.0\.0\.1:1; is a server running there"):
            next(client.generate("a fox"))
        with pytest.raises(NotReadyError):
            client.server_info()
