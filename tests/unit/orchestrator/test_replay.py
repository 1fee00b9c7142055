from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.replay import JobLog


def event(seq: int, size: int = 10) -> video_pb2.Event:
    return video_pb2.Event(seq=seq, job_id="job", fragment=types_pb2.Fragment(data=bytes([seq % 256]) * size))


async def test_every_reader_sees_every_event_whenever_it_comes(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    early = asyncio.create_task(collect(log))
    await asyncio.sleep(0)
    for seq in range(5):
        log.append(event(seq))
        await asyncio.sleep(0)
    late = asyncio.create_task(collect(log, from_seq=3))
    log.append(event(5))
    log.close(None)
    assert [e.seq for e in await early] == [0, 1, 2, 3, 4, 5]
    assert [e.seq for e in await late] == [3, 4, 5]
    assert [e.seq for e in await collect(log)] == [0, 1, 2, 3, 4, 5]
    assert (await early)[2] == event(2)


async def test_an_event_is_in_the_file_before_a_reader_has_it(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    reader = aiter(log.read())
    log.append(event(0, 1000))
    assert await anext(reader) == event(0, 1000)
    assert (tmp_path / "events.log").stat().st_size == event(0, 1000).ByteSize()


async def test_readers_get_all_events_before_the_error(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    log.close(PhaseError("broken"))
    for _ in range(2):
        reader = aiter(log.read())
        assert (await anext(reader)).seq == 0
        with pytest.raises(PhaseError, match="broken"):
            await anext(reader)


async def test_gaps_and_events_after_the_end_break_loudly(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    with pytest.raises(AssertionError, match="event 1 appended as number 0"):
        log.append(event(1))
    log.close(None)
    with pytest.raises(AssertionError, match="after the end"):
        log.append(event(0))


async def test_memory_does_not_grow_with_what_is_logged_or_with_stalled_readers(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    readers = [aiter(log.read()) for _ in range(20)]
    log.append(event(0))
    for reader in readers:
        await anext(reader)
    tracemalloc.start()
    for seq in range(1, 101):
        log.append(event(seq, 500_000))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1_000_000, f"{used} bytes held for 50 MB of events"
    assert (await anext(readers[0])).seq == 1


async def test_a_removed_log_can_still_be_read_by_who_reads_it(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    (tmp_path / "events.log").unlink()
    log.append(event(1))
    log.close(None)
    assert [e.seq for e in await collect(log)] == [0, 1]


async def collect(log: JobLog, from_seq: int = 0) -> list[video_pb2.Event]:
    return [e async for e in log.read(from_seq)]
