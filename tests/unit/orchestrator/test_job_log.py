from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from h3stream.errors import PhaseError, ServerStoppingError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job_log import SYNC_EVERY, JobLog
from tests.job_logs import read_log


def event(seq: int, size: int = 10) -> video_pb2.Event:
    return video_pb2.Event(seq=seq, job_id="job", fragment=types_pb2.Fragment(data=bytes([seq % 256]) * size))


async def test_an_event_is_in_the_file_before_a_follower_is_told(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    follower = log.follow()
    assert await anext(follower) == 0
    telling = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    assert not telling.done()
    log.append(event(0, 1000))
    assert await telling == 1
    assert read_log(log) == [event(0, 1000)]


async def test_a_follower_that_lags_is_told_of_the_latest_alone(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    follower = log.follow()
    log.append(event(0))
    assert await anext(follower) == 1
    for seq in range(1, 5):
        log.append(event(seq))
    assert await anext(follower) == 5
    log.close(None)
    assert [told async for told in follower] == []


async def test_followers_learn_how_the_job_ended_early_or_late(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    early = log.follow()
    assert await anext(early) == 1
    waiting = asyncio.ensure_future(anext(early))
    await asyncio.sleep(0)
    log.close(PhaseError("broken"))
    with pytest.raises(PhaseError, match="broken"):
        await waiting
    late = log.follow()
    assert await anext(late) == 1
    with pytest.raises(PhaseError, match="broken"):
        await anext(late)


async def test_gaps_and_events_after_the_end_break_loudly(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    with pytest.raises(AssertionError, match="event 1 appended as number 0"):
        log.append(event(1))
    log.close(None)
    with pytest.raises(AssertionError, match="after the end"):
        log.append(event(0))


async def test_an_event_that_does_not_fit_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    write, room = os.pwrite, [100]

    def write_some(fd: int, data: memoryview, offset: int) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: room.pop()], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_some)
        with pytest.raises(PhaseError, match="cannot be written: No space left on device"):
            log.append(event(1, 1000))
    assert len(log) == 1
    log.append(event(1, 2000))
    assert read_log(log) == [event(0), event(1, 2000)]


async def test_a_file_that_somebody_cuts_takes_no_more(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0, 500))
    os.truncate(log.path, 100)
    with pytest.raises(PhaseError, match="cannot be written: somebody has cut their file"):
        log.append(event(1))


def left(path: Path, events: list[video_pb2.Event], more: bytes = b"") -> bytes:
    """A log as an earlier process left it; returns its whole records."""
    whole = b"".join(video_pb2.AttachResponse(event=event).SerializeToString() for event in events)
    path.write_bytes(whole + more)
    return whole


@pytest.mark.parametrize(
    "more",
    [
        b"",
        video_pb2.AttachResponse(event=event(3, 300)).SerializeToString()[:-1],
        b"\n",
        b"\n\xff",
        b"\n" + b"\xff" * 20,
        b"\n\xff\xff\xff\xff\x0f",
        bytes(4096),
        b"\n\x00",
        b"\n\x04\xff\xff\xff\xff",
        video_pb2.AttachResponse(event=event(4)).SerializeToString(),
        video_pb2.AttachResponse(event=event(2)).SerializeToString(),
    ],
)
def test_what_does_not_continue_the_events_is_cut_off(tmp_path: Path, more: bytes) -> None:
    path = tmp_path / "events.log"
    events = [event(0), event(1, 300), event(2)]
    whole = left(path, events, more)
    log, found = JobLog.recover(path)
    assert list(found) == events
    assert path.read_bytes() == whole
    assert [log.event(seq) for seq in range(len(log))] == events
    log.append(event(3))
    assert read_log(log) == [*events, event(3)]


def test_a_log_cut_at_any_byte_keeps_its_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    events = [event(0), event(1, 200), event(2)]
    ends = [len(left(path, events[: number + 1])) for number in range(3)]
    for length in range(ends[-1] + 1):
        left(path, events)
        os.truncate(path, length)
        log, found = JobLog.recover(path)
        assert list(found) == events[: sum(end <= length for end in ends)]
        log.append(event(len(log), 50))
        assert len(read_log(log)) == len(log)


def test_a_log_that_is_gone_is_made_again(tmp_path: Path) -> None:
    log, found = JobLog.recover(tmp_path / "events.log")
    assert list(found) == []
    log.append(event(0))
    assert read_log(log) == [event(0)]


def test_every_sixteenth_event_in_a_row_is_on_the_disk_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JobLog(tmp_path / "events.log")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(len(log)))
    for seq in range(20):
        log.append(event(seq), sync=False)
    log.append(event(20))
    for seq in range(21, 40):
        log.append(event(seq), sync=False)
    assert synced == [SYNC_EVERY - 1, 20, 20 + SYNC_EVERY]


async def test_an_event_that_the_disk_does_not_take_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JobLog(tmp_path / "events.log")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(PhaseError, match="cannot be written: Input/output error"):
            log.append(event(0, 100))
    assert len(log) == 0
    log.append(event(0))
    recovered, found = JobLog.recover(log.path)
    assert list(found) == [event(0)]
    assert len(recovered) == 1


async def test_followers_are_let_go_where_the_log_goes_on_elsewhere(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "events.log")
    log.append(event(0))
    follower = log.follow()
    assert (await anext(follower), log.num_followers) == (1, 1)
    log.suspend(ServerStoppingError("stopping"))
    with pytest.raises(ServerStoppingError):
        await anext(follower)
    assert log.num_followers == 0
