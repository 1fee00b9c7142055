"""Clips that go on from other jobs' chunk boundaries, made by a whole service."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3stream import Client, Completed, Event, Fragment, GenerateRequest, InitSegment, JobWarning, Progress
from orchestrator.chunk_store import CHUNKS_NAME
from tests.e2e.conftest import Server, children, start_server, stop_server

CLIP = GenerateRequest("a fox in the snow", num_frames=73, width=64, height=64, steps=2, seed=3)
BOUNDARY = 2


@pytest.fixture(scope="module")
def own_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that loses a worker."""
    running = start_server(tiny_model, tmp_path_factory.mktemp("branches"))
    yield running
    assert stop_server(running) == 0, running.log.read_text()[-4000:]


@pytest.fixture(scope="module")
def client(own_server: Server) -> Iterator[Client]:
    with Client(own_server.address) as client:
        yield client


@pytest.fixture(scope="module")
def source(client: Client) -> list[Event]:
    """A job that has ended: its chunks are in its latents alone."""
    return list(client.generate(CLIP))


@pytest.fixture(scope="module")
def other_seed(client: Client, source: list[Event]) -> list[Event]:
    """Its branch with another seed."""
    return list(client.branch(source[0].job_id, BOUNDARY, seed=4))


def media(events: list[Event]) -> list[tuple[int, bytes]]:
    """Chunk and bytes of each piece; -1 for the init segment."""
    return [
        (event.chunk_index if isinstance(event, Fragment) else -1, event.data)
        for event in events
        if isinstance(event, InitSegment | Fragment)
    ]


def before(events: list[Event], boundary: int) -> list[tuple[int, bytes]]:
    return [piece for piece in media(events) if piece[0] < boundary]


def behind(events: list[Event], boundary: int) -> list[tuple[int, bytes]]:
    return [piece for piece in media(events) if piece[0] >= boundary]


def completed(events: list[Event]) -> Completed:
    assert isinstance(events[-1], Completed)
    return events[-1]


def content(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_without_changes_it_is_the_clip_of_its_source_to_the_byte(
    own_server: Server, client: Client, source: list[Event], tmp_path: Path
) -> None:
    directory = own_server.data / "jobs" / source[0].job_id
    files = content(directory)
    assert not (directory / CHUNKS_NAME).exists()
    same = list(client.branch(source[0].job_id, BOUNDARY))
    assert media(same) == media(source)
    assert completed(same).latents_sha256 == completed(source).latents_sha256
    for name in ("stream.mp4", "final.mp4", "audio.flac", "latents.safetensors"):
        client.download(same[0].job_id, name, tmp_path / name)
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == files[name], name
    assert content(directory) == files


@pytest.mark.parametrize("boundary", [1, BOUNDARY, 4])
def test_another_prompt_changes_what_follows_the_boundary_alone(
    client: Client, source: list[Event], boundary: int
) -> None:
    events = list(client.branch(source[0].job_id, boundary, prompt="a bear in the sea"))
    assert before(events, boundary) == before(source, boundary)
    assert len(before(events, boundary)) == max(1, boundary)
    assert not {data for _, data in behind(events, boundary)} & {data for _, data in behind(source, boundary)}
    assert client.job(events[0].job_id).prompt == "a bear in the sea"


def test_another_seed_changes_what_follows_the_boundary_alone(
    client: Client, source: list[Event], other_seed: list[Event]
) -> None:
    assert before(other_seed, BOUNDARY) == before(source, BOUNDARY)
    assert not {data for _, data in behind(other_seed, BOUNDARY)} & {data for _, data in behind(source, BOUNDARY)}
    branch = client.job(other_seed[0].job_id).plan.branch
    assert branch is not None
    assert (branch.job_id, branch.from_chunk, branch.prompt, branch.seed) == (source[0].job_id, 2, CLIP.prompt, 4)


def test_a_branch_of_a_branch_has_the_chunks_of_both(
    client: Client, source: list[Event], other_seed: list[Event]
) -> None:
    events = list(client.branch(other_seed[0].job_id, 4, seed=5))
    assert before(events, BOUNDARY) == before(source, BOUNDARY)
    assert before(events, 4) == before(other_seed, 4)
    assert behind(events, 4) != behind(other_seed, 4)
    again = list(client.branch(other_seed[0].job_id, 1))  # before the boundary of its source, whose seeds it keeps
    assert media(again) == media(other_seed)


def test_a_running_job_is_gone_on_from(own_server: Server, client: Client) -> None:
    sampler = children(own_server.process.pid)["dit"]
    with client.generate(CLIP, steps=6) as events:
        for event in events:
            if isinstance(event, Progress) and event.chunk_index == BOUNDARY and event.step == 1:
                break
        os.kill(sampler, signal.SIGSTOP)
        try:
            branch = client.branch(events.job_id, BOUNDARY)
            first = [next(branch) for _ in range(3)]
            assert client.job(events.job_id).state == "running"
        finally:
            os.kill(sampler, signal.SIGCONT)
        whole = [*first, *branch]
        of_source = list(client.attach(events.job_id))
    assert [type(event).__name__ for event in first] == ["Accepted", "InitSegment", "Fragment"]
    assert media(whole) == media(of_source)
    assert completed(whole).latents_sha256 == completed(of_source).latents_sha256


def test_a_branch_whose_worker_is_killed_ends_as_one_left_alone(
    own_server: Server, client: Client, source: list[Event], other_seed: list[Event]
) -> None:
    sampler, events, is_killed = children(own_server.process.pid)["dit"], [], False
    for event in client.branch(source[0].job_id, BOUNDARY, seed=4):
        events.append(event)
        if isinstance(event, Progress) and event.chunk_index > BOUNDARY and not is_killed:
            os.kill(sampler, signal.SIGKILL)
            is_killed = True
    assert is_killed
    assert [event.reason for event in events if isinstance(event, JobWarning)].count("RESUMED") == 1
    assert client.job(events[0].job_id).num_resumes == 1
    assert media(events) == media(other_seed)
    assert completed(events).latents_sha256 == completed(other_seed).latents_sha256
