"""Connections that are cut anywhere, again and again: a client still sees every event once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from h3stream import AsyncClient, Client, Event, codec, stream
from tests.job_logs import read_log
from tests.service.conftest import Service

MIN_FIRST_BYTES = 4_000
"""What the first connection carries at least: the job's first event, after which its name is known."""
MAX_BYTES = 4_000
"""What later ones carry at most; an event is below that."""


@dataclass
class CuttingProxy:
    """Passes connections on to a server and cuts each after a random number of the server's bytes."""

    target: str
    dice: random.Random
    num_cuts: int = 0
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    """The connections; asyncio itself holds them weakly, and lets them go in the middle once their sockets are shut."""
    _next_limit: int = 0

    def __post_init__(self) -> None:
        self._next_limit = MIN_FIRST_BYTES + self.dice.randrange(MAX_BYTES)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def close(self) -> None:
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit, self._next_limit = self._next_limit, self.dice.randrange(MAX_BYTES)
        host, _, port = self.target.rpartition(":")
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        upwards = asyncio.create_task(self._copy(reader, server_writer))
        try:
            while limit and (data := await server_reader.read(limit)):
                limit -= len(data)
                writer.write(data)
                await writer.drain()
            self.num_cuts += not limit
        except ConnectionError:
            pass
        finally:
            upwards.cancel()
            await asyncio.gather(upwards, return_exceptions=True)
            server_writer.transport.abort()
            if self.dice.random() < 0.5:
                writer.transport.abort()  # what was not sent yet is lost too
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)


@asynccontextmanager
async def cutting(service: Service, seed: int) -> AsyncIterator[tuple[CuttingProxy, str]]:
    proxy = CuttingProxy(service.address, random.Random(seed))

    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    try:
        yield proxy, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await proxy.close()


def logged(service: Service, job_id: str) -> list[Event]:
    return [codec.event_from_proto(event) for event in read_log(service.job(job_id).log)]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_DELAY_S", 0.01)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Callers that go are nothing for the server's log."""
    yield
    server = [record for record in caplog.get_records("call") if not record.name.startswith("h3stream.")]
    assert [record.getMessage() for record in server if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("seed", range(8))
async def test_every_event_comes_exactly_once_over_connections_that_are_cut(service: Service, seed: int) -> None:
    async with cutting(service, seed) as (proxy, address), AsyncClient(address) as client:
        received = [event async for event in client.generate("a fox", num_frames=192, steps=8)]
    made = logged(service, received[0].job_id)
    assert [event.seq for event in received] == list(range(len(made)))
    assert received == made
    assert proxy.num_cuts >= 5


@pytest.mark.parametrize("seed", range(8, 11))
async def test_the_blocking_client_survives_cuts_too(service: Service, seed: int) -> None:
    def run(address: str) -> list[Event]:
        with Client(address) as client:
            return list(client.generate("a fox", num_frames=192, steps=8))

    async with cutting(service, seed) as (proxy, address):
        received = await asyncio.to_thread(run, address)
    assert received == logged(service, received[0].job_id)
    assert proxy.num_cuts >= 5


@pytest.mark.parametrize("seed", range(11, 14))
async def test_the_media_of_a_late_viewer_are_whole_over_cuts(service: Service, seed: int) -> None:
    made = await service.generate(num_frames=192, steps=8)
    async with cutting(service, seed) as (proxy, address), AsyncClient(address) as client:
        received = [event async for event in client.attach(made[0].job_id, from_chunk=3)]
    whole = [codec.event_from_proto(event) for event in made]
    start = next(e.seq for e in made if e.HasField("fragment") and e.fragment.chunk_index == 3)
    media = b"init" + b"".join(event.media for event in whole[start:])
    assert b"".join(event.media for event in received) == media
    assert [event.seq for event in received[2:]] == list(range(start, len(made)))
    assert proxy.num_cuts >= 2
