from __future__ import annotations

import os
from pathlib import Path

import pytest

from h3stream.clip_file import ClipFile
from h3stream.events import Fragment, InitSegment
from h3stream.request import GenerateRequest
from tests.fakes import events_of, media_of, plan_of

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


def test_an_older_file_is_overwritten_by_the_first_media_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"x" * 100_000)
    with ClipFile(path) as file:
        for event in events_of(PLAN):
            file.write(event)
            if isinstance(event, InitSegment):
                break
            assert path.read_bytes() == b"x" * 100_000
    assert path.read_bytes() == event.media


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
