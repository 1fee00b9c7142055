from __future__ import annotations

import os
from pathlib import Path

import pytest

from h3stream.clip_file import ClipFile
from h3stream.errors import MuxError
from h3stream.events import Completed, Fragment, InitSegment
from h3stream.request import GenerateRequest
from tests.fakes import events_of, media_of, plan_of, without_stream

PLAN = plan_of(GenerateRequest("a fox"))


def test_the_file_holds_after_every_event_what_has_come(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    due = b""
    with ClipFile(path) as file:
        for event in events_of(PLAN):
            file.write(event)
            due += event.media
            assert (path.read_bytes() if path.exists() else b"") == due
    assert path.read_bytes() == media_of(PLAN)


def test_an_older_file_goes_once_the_job_has_been_accepted_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"x" * 100_000)
    with ClipFile(path):
        assert path.read_bytes() == b"x" * 100_000
    assert path.read_bytes() == b"x" * 100_000
    with ClipFile(path) as file:
        for event in events_of(PLAN):
            file.write(event)
            if isinstance(event, InitSegment):
                break
            assert path.read_bytes() == b""
    assert path.read_bytes() == event.media


def test_an_older_file_does_not_pass_for_the_clip_of_a_job_without_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"older")
    with ClipFile(path) as file:
        for event in without_stream(events_of(PLAN)):
            file.write(event)
    assert not path.exists()
    assert isinstance(event, Completed)
    told = "is not whole: no encoder can open; there is no file; the server has of the job: audio.flac"
    with pytest.raises(MuxError, match=told):
        file.check(event)


def test_a_link_is_kept_though_nothing_came_for_its_target(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").symlink_to("target.mp4")
    with ClipFile(tmp_path / "clip.mp4") as file:
        file.write(next(iter(events_of(PLAN))))
    assert (tmp_path / "target.mp4").read_bytes() == b""
    assert (tmp_path / "clip.mp4").is_symlink()


def test_a_whole_stream_passes_the_check(tmp_path: Path) -> None:
    with ClipFile(tmp_path / "clip.mp4") as file:
        for event in events_of(PLAN):
            file.write(event)
    assert isinstance(event, Completed)
    file.check(event)


def test_a_file_that_was_never_written_can_be_closed(tmp_path: Path) -> None:
    with ClipFile(tmp_path / "clip.mp4"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_descriptor_is_written_to_and_closed() -> None:
    read_end, write_end = os.pipe()
    fragment = next(event for event in events_of(PLAN) if isinstance(event, Fragment))
    with ClipFile(write_end) as file:
        file.write(fragment)
        assert os.read(read_end, 65536) == fragment.data
    assert os.read(read_end, 1) == b""
    os.close(read_end)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_end)
