from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.replay import WAKE_AT_ONCE, JobLog


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


async def test_many_readers_do_not_keep_the_job_waiting(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    num_told = [0, 0]

    async def follow() -> None:
        async for seen in log.read():
            num_told[seen.seq] += 1

    readers = [asyncio.create_task(follow()) for _ in range(200)]
    gone = [asyncio.create_task(follow()) for _ in range(5)]
    await asyncio.sleep(0)
    for reader in gone:
        reader.cancel()
    log.append(event(1))
    for turn in range(1, 4):
        assert num_told[1] <= turn * WAKE_AT_ONCE
        await asyncio.sleep(0)
    log.close(None)
    await asyncio.gather(*readers)
    assert num_told == [205, 200]


async def test_a_removed_log_can_still_be_read_by_who_reads_it(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    (tmp_path / "events.log").unlink()
    log.append(event(1))
    log.close(None)
    assert [e.seq for e in await collect(log)] == [0, 1]


async def collect(log: JobLog, from_seq: int = 0) -> list[video_pb2.Event]:
    return [e async for e in log.read(from_seq)]


CLIP = ("progress", "init", "progress", 1, "progress", -1, 2, "progress", 2, 4, "end", "progress")
"""A job's events after the first: a number is a fragment of that chunk that starts with a keyframe, below 0 without."""


def clip_event(seq: int, kind: str | int) -> video_pb2.Event:
    made = video_pb2.Event(seq=seq, job_id="job")
    match kind:
        case int():
            made.fragment.CopyFrom(types_pb2.Fragment(chunk_index=abs(kind), is_keyframe=kind > 0))
        case "init":
            made.init_segment.data = b"init"
        case "end":
            made.stream_complete.num_fragments = 3
        case "progress":
            made.progress.step = 1
        case _:
            made.accepted.SetInParent()
    return made


def clip_log(path: Path, kinds: tuple[str | int, ...] = CLIP) -> JobLog:
    log = JobLog(path / "events.log")
    for seq, kind in enumerate(("accepted", *kinds)):
        log.append(clip_event(seq, kind))
    return log


@pytest.mark.parametrize(
    ("from_chunk", "start"), [(0, 4), (1, 4), (2, 7), (3, 10), (4, 10), (5, 11), (None, 10)], ids=str
)
async def test_a_late_viewer_starts_at_a_keyframe(tmp_path: Path, from_chunk: int | None, start: int) -> None:
    log = clip_log(tmp_path)
    log.close(None)
    assert [e.seq async for e in log.join(from_chunk)] == [0, 2, *range(start, 13)]


@pytest.mark.parametrize(
    ("from_chunk", "seen"),
    [
        (0, [0, 2, *range(4, 13)]),
        (2, [0, 2, *range(7, 13)]),
        (4, [0, 2, *range(10, 13)]),
        (None, [0, 2, *range(4, 13)]),
    ],
    ids=str,
)
async def test_an_early_viewer_waits_for_where_it_starts(
    tmp_path: Path, from_chunk: int | None, seen: list[int]
) -> None:
    log = clip_log(tmp_path, ())
    viewer = asyncio.create_task(joined(log, from_chunk))
    for seq, kind in enumerate(CLIP, start=1):
        await asyncio.sleep(0)
        log.append(clip_event(seq, kind))
    log.close(None)
    assert [e.seq for e in await viewer] == seen


async def test_the_init_segment_is_told_before_its_chunk_has_come(tmp_path: Path) -> None:
    log = clip_log(tmp_path, CLIP[:4])
    viewer = log.join(4)
    assert [(await anext(viewer)).seq for _ in range(2)] == [0, 2]
    waiting = asyncio.ensure_future(anext(viewer))
    await asyncio.sleep(0)
    assert not waiting.done()
    for seq, kind in enumerate(CLIP[4:], start=5):
        log.append(clip_event(seq, kind))
    assert (await waiting).seq == 10


async def test_a_viewer_whose_chunk_never_comes_learns_why(tmp_path: Path) -> None:
    log = clip_log(tmp_path, CLIP[:6])
    viewer = log.join(4)
    assert [(await anext(viewer)).seq for _ in range(2)] == [0, 2]
    log.close(PhaseError("broken"))
    with pytest.raises(PhaseError, match="broken"):
        await anext(viewer)


async def test_a_job_without_media_still_shows_its_end(tmp_path: Path) -> None:
    log = clip_log(tmp_path, ("progress", "end", "progress"))
    log.close(None)
    for from_chunk in (0, None):
        assert [e.seq for e in await joined(log, from_chunk)] == [0, 2, 3]


async def joined(log: JobLog, from_chunk: int | None) -> list[video_pb2.Event]:
    return [e async for e in log.join(from_chunk)]
