"""kill -9 of the whole server, again and again: its jobs go on, and what they make is what they would have made."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from h3stream import AsyncClient, AsyncGeneration, Completed, Event, JobWarning
from h3stream.events import PhaseChange
from tests.e2e.conftest import Server, start_server, stop_server

CLIP = {"num_frames": 73, "width": 64, "height": 64, "steps": 2}
REPRODUCED = ("stream.mp4", "final.mp4", "audio.flac", "latents.safetensors")
"""Artifacts that depend on request and seed alone."""

KILLS = [("prefill", -1), ("denoise", 1), ("decode", 2), ("commit", 2), ("decode", 3), ("finish", -1)]
"""Phases, with their chunks, in which the server is killed: each later in the clip than the one before."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class MortalServer:
    """A server on one port and one data directory that is killed and started again."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._model = model
        self._directory = directory
        self.running = self.start()

    async def die_and_come_back(self) -> None:
        os.kill(self.running.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.running.process.wait)
        self.running = await asyncio.to_thread(self.start)

    def start(self) -> Server:
        return start_server(self._model, self._directory, "--listen", self.address)


async def artifacts_of(client: AsyncClient, job_id: str, directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    found = {}
    for name in REPRODUCED:
        await client.download(job_id, name, directory / name)
        found[name] = (directory / name).read_bytes()
    return found


@pytest.mark.timeout(600)
async def test_a_job_outlives_the_death_of_its_server_in_every_phase(tiny_model: Path, tmp_path: Path) -> None:
    server = MortalServer(tiny_model, tmp_path)
    try:
        async with AsyncClient(server.address) as client:
            undisturbed = [e async for e in client.generate("a fox in the snow", **CLIP)]  # type: ignore[arg-type]
            expected = await artifacts_of(client, undisturbed[0].job_id, tmp_path / "undisturbed")
            kills = list(KILLS)
            events: list[Event] = []
            async for event in client.generate("a fox in the snow", **CLIP, reconnect_s=240):  # type: ignore[arg-type]
                events.append(event)
                if kills and isinstance(event, PhaseChange) and (event.phase, event.chunk_index) == kills[0]:
                    del kills[0]
                    await server.die_and_come_back()
            assert kills == []
            made = await artifacts_of(client, events[0].job_id, tmp_path / "disturbed")
            job = await client.job(events[0].job_id)
        assert isinstance(events[-1], Completed)
        assert isinstance(undisturbed[-1], Completed)
        assert [event.seq for event in events] == list(range(len(events)))
        assert b"".join(e.media for e in events) == b"".join(e.media for e in undisturbed)
        assert events[-1].latents_sha256 == undisturbed[-1].latents_sha256
        assert made == expected
        # Death in the last phase may come behind the end, which nobody then has to take up again.
        assert job.num_resumes in (len(KILLS) - 1, len(KILLS))
        told = [event for event in events if isinstance(event, JobWarning) and event.reason == "RESUMED"]
        assert len(told) == job.num_resumes
    finally:
        assert stop_server(server.running) == 0


@pytest.mark.timeout(600)
async def test_what_waited_and_what_had_ended_is_there_after_the_death_of_the_server(
    tiny_model: Path, tmp_path: Path
) -> None:
    server = MortalServer(tiny_model, tmp_path)
    try:
        async with AsyncClient(server.address) as client:
            ended = [e async for e in client.generate("a fox", num_frames=22, width=64, height=64, steps=1)]
            running = client.generate("a bear", **{**CLIP, "steps": 30}, reconnect_s=240)  # type: ignore[arg-type]
            waiting = [
                client.generate(f"a bird, number {n}", num_frames=22, width=64, height=64, steps=1, reconnect_s=240)
                for n in range(3)
            ]
            async for event in running:
                if isinstance(event, PhaseChange) and event.phase == "denoise":
                    break
            for stream in waiting:
                await anext(stream)
            await server.die_and_come_back()
            again = [event async for event in client.attach(ended[0].job_id)]
            assert again == ended
            kept = await artifacts_of(client, ended[0].job_id, tmp_path / "ended")
            assert kept["stream.mp4"] == b"".join(event.media for event in ended)
            ends = await asyncio.gather(*(last_event(stream) for stream in (running, *waiting)))
            assert all(isinstance(end, Completed) for end in ends)
            jobs = [await client.job(stream.job_id) for stream in (running, *waiting)]
            assert [job.state for job in jobs] == ["succeeded"] * 4
            end_times = [job.end_time for job in jobs]
            assert None not in end_times
            assert end_times == sorted(end_times)  # type: ignore[type-var]
    finally:
        assert stop_server(server.running) == 0


@pytest.mark.timeout(600)
async def test_a_server_whose_ray_is_killed_ends_and_the_next_one_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    server = MortalServer(tiny_model, tmp_path)
    try:
        async with AsyncClient(server.address) as client:
            undisturbed = [e async for e in client.generate("a fox in the snow", **CLIP)]  # type: ignore[arg-type]
            events: list[Event] = []
            async for event in client.generate("a fox in the snow", **CLIP, reconnect_s=240):  # type: ignore[arg-type]
                events.append(event)
                if isinstance(event, PhaseChange) and (event.phase, event.chunk_index) == ("denoise", 2):
                    below = psutil.Process(server.running.process.pid).children(recursive=True)
                    (gcs,) = [process for process in below if process.name() == "gcs_server"]
                    gcs.kill()
                    assert await asyncio.to_thread(server.running.process.wait, 60) == 1
                    assert "h3stream: Ray has ended, and the workers with it" in server.running.log.read_text()
                    server.running = await asyncio.to_thread(server.start)
        assert isinstance(events[-1], Completed)
        assert [event.seq for event in events] == list(range(len(events)))
        assert b"".join(e.media for e in events) == b"".join(e.media for e in undisturbed)
    finally:
        assert stop_server(server.running) == 0


async def last_event(stream: AsyncGeneration) -> Event:
    return [event async for event in stream][-1]
