from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job_log import JobLog
from orchestrator.replay import Replay


class Job:
    """A log that is written and the replay that is told of it at once."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "events.log"
        self._log = JobLog(self.path)
        self.replay = Replay()

    def append(self, event: video_pb2.Event) -> None:
        self._log.append(event)
        self.replay.advance(self.path, len(self._log))


def event(seq: int, size: int = 10) -> video_pb2.Event:
    return video_pb2.Event(seq=seq, job_id="job", fragment=types_pb2.Fragment(data=bytes([seq % 256]) * size))


def sent(record: bytes) -> video_pb2.Event:
    """What a caller makes of a record, whichever it has called."""
    attached, generated = video_pb2.AttachResponse.FromString(record), video_pb2.GenerateResponse.FromString(record)
    assert attached.event == generated.event
    return attached.event


async def collect(records: AsyncIterator[bytes]) -> list[video_pb2.Event]:
    return [sent(record) async for record in records]


async def seqs(records: AsyncIterator[bytes]) -> list[int]:
    return [event.seq for event in await collect(records)]


async def test_every_reader_sees_every_event_whenever_it_comes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    early = asyncio.create_task(collect(job.replay.read()))
    await asyncio.sleep(0)
    for seq in range(5):
        job.append(event(seq))
        await asyncio.sleep(0)
    late = asyncio.create_task(seqs(job.replay.read(3)))
    job.append(event(5))
    job.replay.end(None)
    assert await early == [event(seq) for seq in range(6)]
    assert await late == [3, 4, 5]
    assert await seqs(job.replay.read()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [0, 100, 16_000, 500_000])
async def test_events_of_any_size_are_told_apart(tmp_path: Path, size: int) -> None:
    job = Job(tmp_path)
    for seq in range(300):
        job.append(event(seq, size if seq % 100 else 1))
    job.replay.end(None)
    assert await seqs(job.replay.read()) == list(range(300))


async def test_what_is_on_disk_but_not_yet_told_is_not_read(tmp_path: Path) -> None:
    job = Job(tmp_path)
    JobLog(job.path).append(event(0))
    reader = job.replay.read()
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    job.replay.advance(job.path, 1)
    assert sent(await waiting) == event(0)


async def test_readers_get_all_events_before_the_error(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.append(event(0))
    job.replay.end(PhaseError("broken"))
    for _ in range(2):
        reader = job.replay.read()
        assert sent(await anext(reader)).seq == 0
        with pytest.raises(PhaseError, match="broken"):
            await anext(reader)


async def test_memory_does_not_grow_with_what_is_logged_or_with_stalled_readers(tmp_path: Path) -> None:
    job = Job(tmp_path)
    readers = [job.replay.read() for _ in range(20)]
    job.append(event(0))
    for reader in readers:
        await anext(reader)
    tracemalloc.start()
    for seq in range(1, 101):
        job.append(event(seq, 500_000))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1_000_000, f"{used} bytes held for 50 MB of events"
    assert sent(await anext(readers[0])).seq == 1


async def test_a_removed_log_can_still_be_read_by_who_reads_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.append(event(0))
    job.append(event(1))
    job.path.unlink()
    job.replay.end(None)
    assert await seqs(job.replay.read()) == [0, 1]


@pytest.mark.parametrize("left", [0, 5, 2000])
async def test_a_file_that_somebody_has_cut_is_told(tmp_path: Path, left: int) -> None:
    job = Job(tmp_path)
    job.append(event(0, 1000))
    job.append(event(1, 1000))
    os.truncate(job.path, left)
    with pytest.raises(PhaseError, match="the file is shorter than it was"):
        await anext(job.replay.read(1))
    with pytest.raises(PhaseError, match="the file is shorter than it was"):
        Replay().advance(job.path, 2)


async def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PhaseError, match="cannot be read: No such file or directory"):
        Replay().advance(tmp_path / "events.log", 1)


async def test_who_reads_before_the_job_is_known_waits_and_learns_if_it_never_is() -> None:
    replay = Replay()
    waiting = [asyncio.create_task(coroutine) for coroutine in (replay.begun(), seqs(replay.join()))]
    await asyncio.sleep(0)
    replay.end(PhaseError("unknown"))
    for task in waiting:
        with pytest.raises(PhaseError, match="unknown"):
            await task


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


def clip_job(path: Path, kinds: tuple[str | int, ...] = CLIP) -> Job:
    job = Job(path)
    for seq, kind in enumerate(("accepted", *kinds)):
        job.append(clip_event(seq, kind))
    return job


@pytest.mark.parametrize(
    ("from_chunk", "start"), [(0, 4), (1, 4), (2, 7), (3, 10), (4, 10), (5, 11), (None, 10)], ids=str
)
async def test_a_late_viewer_starts_at_a_keyframe(tmp_path: Path, from_chunk: int | None, start: int) -> None:
    job = clip_job(tmp_path)
    job.replay.end(None)
    assert await seqs(job.replay.join(from_chunk)) == [0, 2, *range(start, 13)]


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
    job = clip_job(tmp_path, ())
    viewer = asyncio.create_task(seqs(job.replay.join(from_chunk)))
    for seq, kind in enumerate(CLIP, start=1):
        await asyncio.sleep(0)
        job.append(clip_event(seq, kind))
    job.replay.end(None)
    assert await viewer == seen


async def test_the_init_segment_is_told_before_its_chunk_has_come(tmp_path: Path) -> None:
    job = clip_job(tmp_path, CLIP[:4])
    viewer = job.replay.join(4)
    assert [sent(await anext(viewer)).seq for _ in range(2)] == [0, 2]
    waiting = asyncio.ensure_future(anext(viewer))
    await asyncio.sleep(0)
    assert not waiting.done()
    for seq, kind in enumerate(CLIP[4:], start=5):
        job.append(clip_event(seq, kind))
    assert sent(await waiting).seq == 10


async def test_a_viewer_whose_chunk_never_comes_learns_why(tmp_path: Path) -> None:
    job = clip_job(tmp_path, CLIP[:6])
    viewer = job.replay.join(4)
    assert [sent(await anext(viewer)).seq for _ in range(2)] == [0, 2]
    job.replay.end(PhaseError("broken"))
    with pytest.raises(PhaseError, match="broken"):
        await anext(viewer)


async def test_a_job_without_media_still_shows_its_end(tmp_path: Path) -> None:
    job = clip_job(tmp_path, ("progress", "end", "progress"))
    job.replay.end(None)
    for from_chunk in (0, None):
        assert await seqs(job.replay.join(from_chunk)) == [0, 2, 3]


@pytest.mark.parametrize("from_chunk", [None, 2])
async def test_a_rendition_is_joined_like_a_stream_where_it_is_all_there_is(
    tmp_path: Path, from_chunk: int | None
) -> None:
    job = Job(tmp_path)
    payloads: list[dict[str, Any]] = [{"accepted": {}}, {"refine_started": {}}, {"refined_init_segment": {}}]
    payloads += [{"refined_fragment": {"is_keyframe": True, "chunk_index": chunk}} for chunk in (1, 2)]
    payloads += [{"refined_audio": {}}, {"completed": {}}]
    for seq, payload in enumerate(payloads):
        job.append(video_pb2.Event(seq=seq, **payload))
    job.replay.end(None)
    assert await seqs(job.replay.join(from_chunk)) == [0, 2, 4, 5, 6]


async def test_the_clip_is_joined_and_not_the_rendition_behind_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    payloads: list[dict[str, Any]] = [{"accepted": {}}, {"init_segment": {}}, {"fragment": {"is_keyframe": True}}]
    payloads += [{"stream_complete": {}}, {"refined_init_segment": {}}, {"refined_fragment": {"is_keyframe": True}}]
    for seq, payload in enumerate(payloads):
        job.append(video_pb2.Event(seq=seq, **payload))
    job.replay.end(None)
    assert await seqs(job.replay.join()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("from_chunk", "start"), [(0, 2), (1, 2), (2, 3), (3, 5)])
async def test_sound_alone_is_joined_where_the_pictures_of_a_chunk_begin(
    tmp_path: Path, from_chunk: int, start: int
) -> None:
    job = Job(tmp_path)
    chunks = [video_pb2.ChunkPlan(num_frames_emitted=frames) for frames in (0, 17, 34, 39)]
    job.append(video_pb2.Event(seq=0, accepted=video_pb2.Accepted(plan=video_pb2.Plan(chunks=chunks))))
    job.append(video_pb2.Event(seq=1, refined_init_segment={}))
    for seq, first_frame in enumerate((0, 17, 30, 34), start=2):
        fragment = types_pb2.Fragment(is_keyframe=True, chunk_index=-1, start_ticks=first_frame * 4000)
        job.append(video_pb2.Event(seq=seq, refined_fragment=fragment))
    job.append(video_pb2.Event(seq=6, refined_audio={}))
    job.replay.end(None)
    assert await seqs(job.replay.join(from_chunk)) == [0, 1, *range(start, 7)]
