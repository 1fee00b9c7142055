"""A data directory on a small disk that fills up under a real server: typed errors, a clean lane, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from h3stream import AsyncClient, Completed, Event, Fragment, PhaseError
from tests.e2e.conftest import Server, start_server, stop_server

DISK_BYTES = 24 << 20
LEFT_BYTES = 4 << 10
"""Room for an event or two that says little, and for nothing that a job makes."""
CLIP = {"num_frames": 73, "width": 64, "height": 64, "steps": 4}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    directory = tmp_path / "data"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", directory], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


class Ballast:
    """A file that leaves next to no room beside it."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def fill(self) -> None:
        stat = os.statvfs(self._path.parent)
        room = stat.f_bavail * stat.f_frsize - LEFT_BYTES
        with suppress(OSError), self._path.open("ab", buffering=0) as file:  # the server may be writing, too
            file.write(bytes(max(0, room)))

    def release(self) -> None:
        self._path.unlink()


async def make(client: AsyncClient, seen: list[Event] | None = None, ballast: Ballast | None = None) -> list[Event]:
    """The events of a clip, which go into `seen` as they come; the disk is filled in the middle of it."""
    seen = [] if seen is None else seen
    async for event in client.generate("a fox in the snow", **CLIP):  # type: ignore[arg-type]
        seen.append(event)
        if ballast is not None and isinstance(event, Fragment) and event.chunk_index == 1:
            ballast.fill()
    return seen


def media_of(events: list[Event]) -> bytes:
    return b"".join(event.media for event in events)


@pytest.mark.timeout(600)
async def test_a_full_disk_fails_what_needs_it_and_nothing_else(tiny_model: Path, disk: Path, tmp_path: Path) -> None:
    ballast = Ballast(disk)
    server: Server = start_server(tiny_model, tmp_path)
    try:
        async with AsyncClient(server.address) as client:
            undisturbed = await make(client)

            ballast.fill()
            with pytest.raises(PhaseError, match="No space left on device"):
                await make(client)
            ballast.release()
            assert media_of(await make(client)) == media_of(undisturbed)

            seen: list[Event] = []
            with pytest.raises(PhaseError, match="No space left on device") as failure:
                await make(client, seen, ballast)
            assert str(disk) not in str(failure.value)
            assert media_of(undisturbed).startswith(media_of(seen))
            failed = await client.job(seen[0].job_id)
            assert failed.state == "failed"
            ballast.release()
            assert media_of(await make(client)) == media_of(undisturbed)

        ballast.fill()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        ballast.release()
        server = start_server(tiny_model, tmp_path)
        async with AsyncClient(server.address) as client:
            assert (await client.job(failed.job_id)).state == "failed"
            again = [event async for event in client.attach(undisturbed[0].job_id)]
            assert again == undisturbed
            events = await make(client)
            assert isinstance(events[-1], Completed)
            assert media_of(events) == media_of(undisturbed)
    finally:
        assert stop_server(server) == 0
