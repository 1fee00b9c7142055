"""Stills of a real clip: there before anything else is, like the frames that follow, and without a trace in them."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest

from h3stream import Client, Completed, Event, Fragment, GenerateRequest, PhaseChange, Progress
from h3stream.events import Preview
from h3stream.request import PreviewSpec
from tests.e2e.conftest import Server

STREAMED = GenerateRequest("a fox in the snow", num_frames=39, width=256, height=160, steps=3, seed=5)
DENSE = GenerateRequest("a fox in the snow", num_frames=39, width=256, height=160, steps=3, seed=5, mode="dense")
OFF, SELDOM = PreviewSpec(0, 1), PreviewSpec(64, 2)

Picture = npt.NDArray[np.uint8]


def events_of(server: Server, request: GenerateRequest, preview: PreviewSpec | None = None) -> list[Event]:
    with Client(server.address) as client:
        return list(client.generate(request, preview=preview))


def result(events: list[Event]) -> tuple[str, list[bytes]]:
    completed = events[-1]
    assert isinstance(completed, Completed)
    return completed.latents_sha256, [event.data for event in events if isinstance(event, Fragment)]


def stills(events: list[Event]) -> list[Preview]:
    return [event for event in events if isinstance(event, Preview)]


def pictures(data: bytes) -> list[Picture]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def blocks(picture: Picture, size: int) -> npt.NDArray[np.float64]:
    """Mean colours of squares of `size` pixels: `[rows, columns, 3]`."""
    height, width, _ = picture.shape
    means: npt.NDArray[np.float64] = picture.reshape(height // size, size, width // size, size, 3).mean(axis=(1, 3))
    return means


def test_the_first_still_is_there_after_the_first_forward_and_each_follows_its_step(server: Server) -> None:
    events = events_of(server, STREAMED)
    found = stills(events)
    assert [(s.chunk_index, s.step, s.num_steps) for s in found] == [(c, s, 3) for c in range(3) for s in (1, 2, 3)]
    for still in found:
        before = events[still.seq - 1]
        while isinstance(before, Progress) and before.is_heartbeat:
            before = events[before.seq - 1]
        assert isinstance(before, Progress)
        assert (before.chunk_index, before.step) == (still.chunk_index, still.step)
    first = events[: found[0].seq]
    assert [e.chunk_index for e in first if isinstance(e, PhaseChange) and e.phase == "denoise"] == [0]
    assert not any(isinstance(e, Progress) and e.step > 1 for e in first)


@pytest.mark.parametrize("request_", [STREAMED, DENSE], ids=["streaming", "dense"])
def test_a_clip_is_the_same_bytes_with_and_without_them(server: Server, request_: GenerateRequest) -> None:
    default, off, seldom = (events_of(server, request_, preview) for preview in (None, OFF, SELDOM))
    assert result(default) == result(off) == result(seldom)
    assert not stills(off)
    chunks = [-1] if request_.mode == "dense" else [0, 1, 2]
    assert [(s.chunk_index, s.step) for s in stills(seldom)] == [(c, s) for c in chunks for s in (2, 3)]
    for events, size in ((default, (256, 160)), (seldom, (64, 40))):
        for still in stills(events):
            assert (still.width, still.height, still.media_type) == (*size, "image/jpeg")
            (picture,) = pictures(still.data)
            assert picture.shape == (size[1], size[0], 3)


def test_the_last_still_of_a_chunk_looks_like_its_frames(server: Server) -> None:
    events = events_of(server, STREAMED)
    frames = pictures(b"".join(event.media for event in events))
    correlations = []
    for still in stills(events):
        if still.step < still.num_steps or still.chunk_index == 2:
            continue
        first = 17 * still.chunk_index + 5  # of the four frames of the third latent
        (shown,) = pictures(still.data)
        pair = [blocks(shown, 16), np.mean([blocks(frame, 16) for frame in frames[first : first + 4]], axis=0)]
        correlations += [np.corrcoef(*(p[..., colour].flatten() for p in pair))[0, 1] for colour in range(3)]
    print("correlations of stills with frames:", [f"{c:.2f}" for c in correlations])
    assert len(correlations) == 6
    assert min(correlations) > 0.5


def test_the_map_is_kept_for_the_next_start(server: Server) -> None:
    (kept,) = (server.data / "preview_maps").iterdir()
    assert isinstance(kept, Path)
    assert kept.suffix == ".json"
