"""A viewer may come at any chunk, early or late, and sees what every other sees."""

from __future__ import annotations

import asyncio
import io

import av
import pytest

from h3stream import AsyncClient, Client, Event, Fragment
from tests.e2e.conftest import Server

FRAMES, CHUNKS = 73, 5


@pytest.fixture(scope="module")
def made(server: Server) -> list[Event]:
    with Client(server.address) as client:
        return list(client.generate("a fox in the snow", num_frames=FRAMES, width=64, height=64, steps=1))


def pictures(media: bytes) -> dict[int, bytes]:
    """Decoded pictures by their frame number in the whole clip."""
    with av.open(io.BytesIO(media)) as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        return {
            round(float(frame.pts * stream.time_base) * 24): frame.to_ndarray().tobytes()
            for frame in container.decode(stream)
            if frame.pts is not None
        }


@pytest.mark.parametrize("chunk_index", range(CHUNKS))
def test_a_viewer_that_comes_at_a_chunk_sees_the_pictures_from_there_on(
    server: Server, made: list[Event], chunk_index: int
) -> None:
    with Client(server.address) as client:
        received = list(client.attach(made[0].job_id, from_chunk=chunk_index))
    first = next(event for event in received if isinstance(event, Fragment))
    assert first.chunk_index == max(chunk_index, 1)
    assert first.is_keyframe
    whole = pictures(b"".join(event.media for event in made))
    assert sorted(whole) == list(range(FRAMES))
    expected = {number: picture for number, picture in whole.items() if number >= first.first_frame}
    assert pictures(b"".join(event.media for event in received)) == expected


async def test_viewers_of_a_job_in_progress_see_the_same_events(server: Server) -> None:
    async with AsyncClient(server.address) as client:
        events = client.generate("a bear in the snow", num_frames=FRAMES, width=64, height=64, steps=2)
        first = await anext(events)

        async def follow(delay_s: float) -> list[Event]:
            received = []
            async for event in client.attach(first.job_id):
                received.append(event)
                await asyncio.sleep(delay_s)
            return received

        viewers = [asyncio.create_task(follow(delay_s)) for delay_s in (0.0, 0.0, 0.02)]
        seen = [first, *[event async for event in events]]
        assert [await viewer for viewer in viewers] == [seen] * 3
