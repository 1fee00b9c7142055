"""What an artifact is downloaded to, whatever is at its path already."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from h3stream.artifact_file import is_written_into, open_sink
from h3stream.codec import artifact_to_proto
from h3stream.errors import BrokenStreamError
from h3stream.events import Artifact
from h3stream.v1 import video_pb2

DATA = b"artifact" * 1000


def messages(data: bytes = DATA, offset: int = 0) -> list[video_pb2.DownloadArtifactResponse]:
    """What a server sends of DATA, or of something else that it takes for it."""
    artifact = Artifact("a.bin", "video/mp4", len(DATA), hashlib.sha256(DATA).hexdigest(), "jobs/a.bin")
    head = video_pb2.DownloadArtifactResponse(artifact=artifact_to_proto(artifact))
    pieces = [data[start : start + 3000] for start in range(offset, len(data), 3000)]
    return [head, *(video_pb2.DownloadArtifactResponse(data=piece) for piece in pieces)]


def download(path: Path, data: bytes = DATA) -> None:
    with open_sink(path) as sink:
        for message in messages(data, sink.num_bytes):
            sink.take(message)
        assert sink.keep() is not None


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"older")
    with open_sink(path) as sink:
        for message in messages():
            sink.take(message)
            assert path.read_bytes() == b"older"
        sink.keep()
        assert path.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [path]


def test_the_target_of_a_link_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep/a.bin")
    download(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "a.bin").read_bytes() == DATA


def test_a_device_is_written_into_and_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        download(link)
    assert os.readlink(link) == "/dev/full"
    assert Path("/dev/full").is_char_device()
    assert list(tmp_path.iterdir()) == [link]


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    download(path)
    assert os.read(reader, 65536) == DATA
    with pytest.raises(BrokenStreamError, match="its checksum is another"):
        download(path, b"another!" * 1000)
    os.close(reader)
    assert is_written_into(path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_open_descriptor_goes_on_where_it_is(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        file.write(b"before ")
        file.flush()
        download(Path(f"/dev/fd/{file.fileno()}"))
        file.write(b" after")
    assert (tmp_path / "log").read_bytes() == b"before " + DATA + b" after"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/full", path)])
def test_what_is_in_the_way_of_the_part_is_named(tmp_path: Path, make: object) -> None:
    part = tmp_path / "a.bin.part"
    assert callable(make)
    make(part)
    with pytest.raises(OSError, match=r"a\.bin\.part, where what arrives is kept, is no regular file"):
        download(tmp_path / "a.bin")
    assert os.path.lexists(part)


def test_two_downloads_to_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    first, *rest = messages()
    with open_sink(path) as sink:
        sink.take(first)
        sink.take(rest[0])
        with pytest.raises(BlockingIOError, match=r"another download is writing .*a\.bin\.part"):
            download(path)
        assert sink.num_bytes == 3000
        for message in rest[1:]:
            sink.take(message)
        sink.keep()
        download(path)  # the first has its name: nothing is in the way of the next
    assert path.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [path]


def test_a_download_that_broke_off_before_its_first_byte_leaves_nothing(tmp_path: Path) -> None:
    with open_sink(tmp_path / "a.bin"):
        pass
    assert list(tmp_path.iterdir()) == []
