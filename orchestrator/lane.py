"""One lane as the scheduler sees it: three connected workers and the grant of their device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from core.phases import Worker
from h3stream.errors import GenerationError, StartupError
from h3stream.v1 import workers_pb2
from orchestrator.phases import PhaseSequencer
from orchestrator.worker_clients import DitClient, TextEncoderClient, VaeClient, WorkerClient

log = logging.getLogger(__name__)


RETRY_S = 5.0
"""Between two tries to bring a lane back, which may have to wait for its GPU to be free again."""
T = TypeVar("T")


async def until_it_works(bring_back: Callable[[], Awaitable[T]]) -> T:
    """What bringing a lane's workers back gives, tried until it works: else its jobs would wait for ever."""
    while True:
        try:
            return await bring_back()
        except Exception:  # whatever Ray says
            log.exception("a lane could not be restarted; trying again in %.0f s", RETRY_S)
        await asyncio.sleep(RETRY_S)


class LaneHost(Protocol):
    """Whatever runs the workers of one lane; `orchestrator/lanes.py` has Ray's."""

    token: str
    """What callers of the workers prove themselves with; empty: they need not."""

    async def start(self) -> Mapping[Worker, str]:
        """Starts the workers; returns the address of each. Raises StartupError."""
        ...

    async def restart(self, worker: Worker) -> str:
        """Ends what is left of one worker and starts it anew; returns its address. Raises StartupError."""
        ...

    async def stop(self) -> None:
        """Stops the workers and frees what they held."""
        ...


class Lane:
    """Three workers that share one device."""

    text_encoder: TextEncoderClient
    dit: DitClient
    vae: VaeClient
    device: PhaseSequencer
    """Grants the device to one of them at a time."""

    def __init__(self, host: LaneHost) -> None:
        self._host = host
        self._clients: dict[Worker, WorkerClient] = {}
        self._described: dict[Worker, workers_pb2.DescribeResponse] = {}

    async def start(self) -> None:
        """Starts the workers and connects to them. Raises StartupError."""
        for worker, address in (await self._host.start()).items():
            self._connect(worker, address)
        self.device = PhaseSequencer(self._clients)
        try:
            await self.describe()
        except GenerationError as error:
            raise StartupError(f"a worker is gone as soon as it has started: {error.message}") from error

    async def describe(self) -> list[workers_pb2.DescribeResponse]:
        """What each worker is and what it holds. Raises a GenerationError if one does not answer."""
        await _all_of(self._describe(client) for client in self._clients.values())
        return self.last_descriptions()

    async def describe_those_that_answer(self) -> list[workers_pb2.DescribeResponse]:
        """What each worker is and what it holds, of one that does not answer as it said last.

        What a worker is made of stays the same from its start; what may be old is what it held at most.
        """
        with suppress(GenerationError):
            await self.describe()
        return self.last_descriptions()

    def last_descriptions(self) -> list[workers_pb2.DescribeResponse]:
        """What each worker said last."""
        return [self._described[worker] for worker in Worker if worker in self._described]

    async def is_alive(self) -> bool:
        """Whether every worker answers."""
        try:
            await self.describe()
        except GenerationError:
            return False
        return True

    async def clear(self, session_id: str) -> None:
        """Frees everything a session held, and the device. Returns once the lane is ready for the next job.

        The workers answer behind whatever they are doing, so this waits for one forward or one decode at most. Each is
        asked whatever becomes of the others. Raises a GenerationError if a worker cannot be cleared or is gone; the
        lane must then be restarted.
        """
        await _all_of((self.dit.close_session(session_id), self.vae.close_session(session_id)))
        await self.device.grant(None)
        await self.describe()  # a worker that held nothing is missed here, or by every job to come

    async def recover(self) -> list[Worker]:
        """Replaces the workers that are gone by fresh ones and leaves the others, with their sessions, as they are;
        returns who was gone.

        One whose call broke counts as gone also if it answers again: what it is in the middle of, nobody knows. Where
        one cannot be replaced by itself, all are. Raises StartupError; it can then be tried again.
        """
        answers = await asyncio.gather(*map(self._describe, self._clients.values()), return_exceptions=True)
        lost = [
            client.worker
            for client, answer in zip(self._clients.values(), answers, strict=True)
            if client.is_lost or answer is not None
        ]
        if self._clients:  # else the lane has been stopped, and not started again
            try:
                for worker in lost:
                    address, gone = await self._host.restart(worker), self._clients[worker]
                    self._connect(worker, address)
                    self.device.forget(worker)
                    await gone.close()
                await self.describe()
                return lost
            except Exception as error:  # whatever Ray says
                log.warning("a worker cannot be replaced by itself: %s; the lane is restarted", error)
        await self.restart()
        return list(self._clients)

    async def restart(self) -> None:
        """Replaces the workers by fresh ones. Raises StartupError."""
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """Ends the connections and the workers."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients = {}
        await self._host.stop()

    def _connect(self, worker: Worker, address: str) -> None:
        client: WorkerClient
        match worker:
            case Worker.TEXT_ENCODER:
                client = self.text_encoder = TextEncoderClient(address, self._host.token)
            case Worker.DIT:
                client = self.dit = DitClient(address, self._host.token)
            case Worker.VAE:
                client = self.vae = VaeClient(address, self._host.token)
        self._clients[worker] = client

    async def _describe(self, client: WorkerClient) -> None:
        self._described[client.worker] = await client.describe()


async def _all_of(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Awaits all calls, then raises what the first of those that failed raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if outcome is not None:
            raise outcome
