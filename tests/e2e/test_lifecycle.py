"""Cancel, disconnect, queue, kill, stop: the lane is always free afterwards and the next clip is right."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from h3stream import (
    AsyncClient,
    AsyncGeneration,
    Completed,
    Event,
    Fragment,
    JobCancelledError,
    JobWarning,
    NotReadyError,
    Progress,
)
from h3stream.events import PhaseChange
from services.common.ledger import overlaps, read_ledger
from tests.e2e.conftest import Server, alive, children, descendants, edge_of, start_server, stop_server

SMALL = {"num_frames": 22, "width": 64, "height": 64, "steps": 1}


async def finish(client: AsyncClient, prompt: str = "a fox in the snow") -> Completed:
    events = [event async for event in client.generate(prompt, **SMALL)]  # type: ignore[arg-type]
    assert isinstance(events[-1], Completed)
    return events[-1]


async def until_step(stream: AsyncGeneration, step: int) -> None:
    async for event in stream:
        if isinstance(event, Progress) and event.step == step:
            return


async def until_gone(pids: list[int]) -> None:
    async with asyncio.timeout(30):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.1)


async def test_cancel_stops_within_one_forward_and_the_next_job_runs(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        undisturbed = await finish(client)
        stream = client.generate("a fox in the snow", num_frames=39, width=512, height=288, steps=50)
        await until_step(stream, 2)
        cancelling = asyncio.create_task(client.cancel(stream.job_id))
        with pytest.raises(JobCancelledError):
            await until_step(stream, 5)  # one forward may be done, one under way and one announced; never three more
        assert (await cancelling).state == "cancelled"
        assert (await finish(client)).latents_sha256 == undisturbed.latents_sha256
    assert overlaps(read_ledger(server.ledger)) == []


async def test_a_client_that_goes_leaves_its_job_running(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        async with client.generate("a fox in the snow", **SMALL) as stream:  # type: ignore[arg-type]
            await anext(stream)
        async with asyncio.timeout(60):
            while (job := await client.job(stream.job_id)).state != "succeeded":
                await asyncio.sleep(0.1)
        assert job.num_frames_emitted == 22


async def test_a_client_that_asked_for_it_cancels_by_going(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        options = {**SMALL, "steps": 100, "cancel_on_disconnect": True}
        async with client.generate("a fox in the snow", **options) as stream:  # type: ignore[arg-type]
            async for event in stream:
                if isinstance(event, Progress) and event.step:
                    break
        async with asyncio.timeout(60):
            while (await client.job(stream.job_id)).state != "cancelled":
                await asyncio.sleep(0.1)
        await finish(client)


async def test_two_jobs_run_one_after_the_other_and_do_not_touch_each_other(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        alone = [await finish(client, prompt) for prompt in ("a fox in the snow", "a bear on a bicycle")]
        together = await asyncio.gather(finish(client, "a fox in the snow"), finish(client, "a bear on a bicycle"))
    assert [c.latents_sha256 for c in together] == [c.latents_sha256 for c in alone]
    assert overlaps(read_ledger(server.ledger)) == []


async def test_a_worker_that_stands_still_is_bridged_by_heartbeats_and_changes_nothing(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        undisturbed = await finish(client)
        dit = children(server.process.pid)["dit"]
        stream = client.generate("a fox in the snow", **{**SMALL, "steps": 2})  # type: ignore[arg-type]
        await until_step(stream, 1)
        os.kill(dit, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                async for event in stream:
                    if isinstance(event, Progress) and event.is_heartbeat:
                        break
        finally:
            os.kill(dit, signal.SIGCONT)
        assert [event async for event in stream][-1].job_id == stream.job_id
        assert (await client.job(stream.job_id)).state == "succeeded"
        assert (await finish(client)).latents_sha256 == undisturbed.latents_sha256


async def test_a_directory_that_somebody_removes_costs_a_job_its_artifacts_and_no_other_job_anything(
    server: Server,
) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.generate("a fox in the snow", num_frames=39, width=64, height=64, steps=1)
        async for event in stream:
            if isinstance(event, Fragment):
                break
        shutil.rmtree(server.data / "jobs" / stream.job_id)
        events = [event async for event in stream]
        completed = events[-1]
        assert isinstance(completed, Completed)
        failed = [event for event in events if isinstance(event, JobWarning) and event.reason == "ARTIFACT_FAILED"]
        assert failed
        for artifact in completed.artifacts:  # what was begun later, in the directory that was made anew
            assert (server.data / artifact.relative_path).stat().st_size == artifact.size_bytes
            assert not any(artifact.name in warning.message.split() for warning in failed)
        assert all(str(server.data) not in warning.message for warning in failed)
        await finish(client)


async def test_a_killed_worker_and_a_frozen_one_cost_no_job(tiny_model: Path, tmp_path: Path) -> None:
    server = start_server(tiny_model, tmp_path)
    try:
        async with AsyncClient(server.address) as client:
            before = await finish(client)
            workers = children(server.process.pid)
            assert set(workers) == {"text_encoder", "dit", "vae"}
            stream = client.generate("a fox in the snow", num_frames=22, width=64, height=64, steps=30)
            await until_step(stream, 2)
            os.kill(workers["dit"], signal.SIGKILL)
            assert [event async for event in stream][-1].job_id == stream.job_id
            job = await client.job(stream.job_id)
            assert (job.state, job.num_resumes) == ("succeeded", 1)
            after = await finish(client)
            os.kill(children(server.process.pid)["vae"], signal.SIGSTOP)  # while the lane is idle
            later = await finish(client)
        assert after.latents_sha256 == later.latents_sha256 == before.latents_sha256
        entries = read_ledger(server.ledger)
        assert [e.worker for e in entries if e.event == "lost"] == ["dit"]
        assert overlaps(entries) == []
    finally:
        workers = children(server.process.pid)
        assert stop_server(server) == 0
    await until_gone(list(workers.values()))  # Ray's workers end once they miss their raylet


async def test_viewers_see_every_event_once_although_what_they_are_connected_to_is_killed(server: Server) -> None:
    async def follow(client: AsyncClient, job_id: str) -> list[Event]:
        return [event async for event in client.attach(job_id)]

    options = {"num_frames": 73, "width": 64, "height": 64, "steps": 4}
    async with AsyncClient(server.address) as client:
        undisturbed = [event async for event in client.generate("a fox in the snow", **options)]  # type: ignore[arg-type]
        events = client.generate("a fox in the snow", **options)  # type: ignore[arg-type]
        seen = [await anext(events)]
        async with AsyncClient(server.address) as other:
            viewers = [asyncio.create_task(follow(one, events.job_id)) for one in (client, other, other)]
            async for event in events:
                seen.append(event)
                if isinstance(event, Fragment) and event.chunk_index == 1:
                    edge = edge_of(server.process.pid)
                    os.kill(edge, signal.SIGKILL)
            assert [await viewer for viewer in viewers] == [seen] * 3
        assert edge_of(server.process.pid) != edge
    assert [event.seq for event in seen] == list(range(len(seen)))
    assert b"".join(event.media for event in seen) == b"".join(event.media for event in undisturbed)
    ends = [events[-1] for events in (seen, undisturbed)]
    assert all(isinstance(end, Completed) for end in ends)
    assert ends[0].latents_sha256 == ends[1].latents_sha256  # type: ignore[attr-defined]


async def test_stopping_lets_the_running_job_finish(tiny_model: Path, tmp_path: Path) -> None:
    server = start_server(tiny_model, tmp_path, "--worker-transport", "tcp")
    fragments = 0
    async with AsyncClient(server.address) as client:
        async for event in client.generate("a fox in the snow", num_frames=39, width=64, height=64):
            if isinstance(event, PhaseChange) and event.phase == "denoise" and event.chunk_index == 0:
                server.process.send_signal(signal.SIGTERM)
            fragments += isinstance(event, Fragment)
    assert isinstance(event, Completed)
    assert fragments == 3
    assert server.process.wait(60) == 0


async def test_a_signal_to_the_whole_group_lets_the_running_job_finish(tiny_model: Path, tmp_path: Path) -> None:
    """What `timeout` sends, and a shell that ends a job."""
    server = start_server(tiny_model, tmp_path, group=True)
    below = descendants(server.process.pid)
    async with AsyncClient(server.address) as client:
        async for event in client.generate("a fox in the snow", **SMALL):  # type: ignore[arg-type]
            if isinstance(event, PhaseChange) and event.phase == "denoise" and event.chunk_index == 0:
                os.killpg(server.process.pid, signal.SIGTERM)
    assert isinstance(event, Completed)
    assert server.process.wait(30) == 0
    await until_gone(below)


async def test_a_server_whose_ray_ends_with_it_leaves_its_job_to_the_next_one_and_stops(
    tiny_model: Path, tmp_path: Path
) -> None:
    """What systemd sends to every process of a service; Ray's own calls would wait for it for a minute."""
    server = start_server(tiny_model, tmp_path)
    try:
        below = descendants(server.process.pid)
        async with AsyncClient(server.address) as client:
            stream = client.generate("a fox in the snow", num_frames=39, width=512, height=288, steps=100)
            await until_step(stream, 1)
            for pid in (*below, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            with pytest.raises(NotReadyError):
                await until_step(stream, 100)
        assert server.process.wait(30) == 0
        assert not (server.data / "jobs" / stream.job_id / "end.binpb").exists()
        await until_gone(below)
    finally:
        server.process.kill()


def test_the_log_tells_the_start_in_order(server: Server) -> None:
    log = server.log.read_text()
    assert log.index("settings: ") < log.index("lane 0: loading the model") < log.index("lane 0 is up")
    assert "\x1b" not in log  # no colours: it is no terminal
