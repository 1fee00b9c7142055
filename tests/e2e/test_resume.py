"""Workers of a whole service, killed in the middle of a clip: it comes out as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from h3stream import AsyncClient, Completed, Event, JobWarning, Progress
from h3stream.events import PhaseChange
from services.common.ledger import overlaps, read_ledger
from tests.e2e.conftest import Server, children

CLIP = {"num_frames": 73, "width": 64, "height": 64, "steps": 3, "seed": 11}
COMPARED = {"stream.mp4", "final.mp4", "audio.flac", "latents.safetensors"}
ALL = ("text_encoder", "dit", "vae")


@dataclass(frozen=True)
class Made:
    """What a clip came out as."""

    media: bytes
    """What its viewer got."""
    latents_sha256: str
    artifacts: dict[str, str]
    """SHA-256 by name."""


def during(phase: str, chunk_index: int = -1, step: int = 0) -> Callable[[Event], bool]:
    """Whether an event says that the job is there; the step is one that is done."""

    def is_there(event: Event) -> bool:
        if step:
            return isinstance(event, Progress) and (event.chunk_index, event.step) == (chunk_index, step)
        return isinstance(event, PhaseChange) and (event.phase, event.chunk_index) == (phase, chunk_index)

    return is_there


async def make(
    server: Server,
    prompt: str,
    workers: tuple[str, ...] = (),
    when: Callable[[Event], bool] | None = None,
    number: signal.Signals = signal.SIGKILL,
) -> tuple[Made, list[Event]]:
    """Makes a clip, sends workers a signal once an event is there, and fetches what it left."""
    events = []
    async with AsyncClient(server.address) as client:
        async for event in client.generate(prompt, **CLIP):  # type: ignore[arg-type]
            events.append(event)
            if when is not None and when(event):
                when = None
                pids = children(server.process.pid)
                for worker in workers:
                    os.kill(pids[worker], number)
    assert when is None, "the job has never been there"
    completed = events[-1]
    assert isinstance(completed, Completed)
    assert [event.seq for event in events] == list(range(len(events)))
    digests = {artifact.name: artifact.sha256 for artifact in completed.artifacts if artifact.name in COMPARED}
    return Made(b"".join(event.media for event in events), completed.latents_sha256, digests), events


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Made]:
    """What clips come out as, by their prompts."""
    return {}


@pytest.mark.parametrize(
    ("workers", "when"),
    [
        (("dit",), during("denoise", 2, step=1)),
        (("dit",), during("commit", 1)),
        (("vae",), during("decode", 2)),
        (ALL, during("denoise", 2, step=2)),
        (("dit", "vae"), during("decode", 4)),
    ],
    ids=["dit while it samples", "dit while it commits", "vae while it decodes", "all", "dit and vae at the end"],
)
async def test_a_clip_outlives_the_workers_that_make_it(
    server: Server, undisturbed: dict[str, Made], workers: tuple[str, ...], when: Callable[[Event], bool]
) -> None:
    if not undisturbed:
        undisturbed["a fox"], _ = await make(server, "a fox")
        assert undisturbed["a fox"].artifacts.keys() == COMPARED
    made, events = await make(server, "a fox", workers, when)
    assert made == undisturbed["a fox"]
    assert "RESUMED" in [event.reason for event in events if isinstance(event, JobWarning)]
    sampled = {(e.chunk_index, e.step) for e in events if isinstance(e, Progress) and e.step}
    assert sampled == {(chunk, step) for chunk in range(5) for step in (1, 2, 3)}
    assert overlaps(read_ledger(server.ledger)) == []


async def test_a_clip_outlives_the_encoder_of_its_text(server: Server) -> None:
    made, _ = await make(server, "a fox that nobody has asked for", ("text_encoder",), during("encode"))
    again, _ = await make(server, "a fox that nobody has asked for")
    assert made == again


async def test_only_the_worker_that_is_lost_is_started_anew(server: Server) -> None:
    before = children(server.process.pid)
    await make(server, "a fox", ("vae",), during("denoise", 3, step=1))
    after = children(server.process.pid)
    assert {name for name in before if before[name] != after[name]} == {"vae"}
