from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from h3stream.errors import PhaseError
from h3stream.v1 import types_pb2, video_pb2
from orchestrator.job_log import JobLog
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
