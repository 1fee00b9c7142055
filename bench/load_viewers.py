"""Viewers for `bench/load.py`: many of the SDK's and of another language's, and some that stop reading."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from h3stream import AsyncClient
from h3stream.channel import CHANNEL_OPTIONS
from h3stream.v1 import video_pb2, video_pb2_grpc
from services.common.rpc import connect

VIEWERS_EACH = 50
"""Viewers of one process."""
ROOT = Path(__file__).parents[1]
NODE_PROGRAM = ROOT / "bench" / "load_node" / "viewers.js"


@dataclasses.dataclass(frozen=True)
class Watched:
    """What one viewer was told of a job."""

    num_events: int
    """Events that came, the last number plus one."""
    num_lost: int
    """Numbers that were left out."""
    num_doubled: int
    """Events that came with a number that had come before."""
    digest: str
    """SHA-256 over the media in order."""
    num_cuts: int = 0
    """Connections that were lost; what the SDK mends by itself is not counted."""
    error: str = ""
    """What ended it before the job's end."""


async def watch(client: AsyncClient, job_id: str) -> Watched:
    """Follows a job to its end."""
    digest = hashlib.sha256()
    num_events = num_lost = num_doubled = 0
    try:
        async for event in client.attach(job_id):
            if event.seq < num_events:
                num_doubled += 1
                continue
            num_lost += event.seq - num_events
            num_events = event.seq + 1
            digest.update(event.media)
    except Exception as error:  # a viewer that failed is a result, not the end of the run
        return Watched(num_events, num_lost, num_doubled, digest.hexdigest(), error=f"{type(error).__name__}: {error}")
    return Watched(num_events, num_lost, num_doubled, digest.hexdigest())


def _watch_in_process(address: str, num_viewers: int, jobs: Any, results: Any) -> None:
    """One process of viewers: one job after the other, until told an empty name."""
    os.nice(19)  # viewers are elsewhere: what they take themselves must not be taken from the server
    logging.getLogger("h3stream").setLevel(logging.ERROR)  # that a connection was lost is what was meant
    CHANNEL_OPTIONS.append(("grpc.use_local_subchannel_pool", 1))  # a connection for each of them

    async def follow() -> None:
        clients = [AsyncClient(address) for _ in range(num_viewers)]
        while job_id := await asyncio.to_thread(jobs.get):
            results.put(await asyncio.gather(*(watch(client, job_id) for client in clients)))
        for client in clients:
            await client.close()

    asyncio.run(follow())


class Audience:
    """Viewers in processes of their own, which can watch a job together."""

    def __init__(self, address: str, num_sdk: int, num_node: int) -> None:
        """num_sdk, num_node: viewers of either kind."""
        self.num_viewers = num_sdk + num_node
        self._address = address
        self._num_node = num_node
        self._node: subprocess.Popen[str] | None = None
        spawning = multiprocessing.get_context("spawn")
        self._jobs: list[Any] = []
        self._results = spawning.Queue()
        for start in range(0, num_sdk, VIEWERS_EACH):
            self._jobs.append(spawning.Queue())
            arguments = (address, min(VIEWERS_EACH, num_sdk - start), self._jobs[-1], self._results)
            spawning.Process(target=_watch_in_process, args=arguments, daemon=True).start()

    def send(self, job_id: str) -> None:
        """Has all of them follow a job from its first event."""
        for jobs in self._jobs:
            jobs.put(job_id)
        if self._num_node:
            command = ["nice", "-n", "19", "node", str(NODE_PROGRAM), self._address, str(ROOT / "protos"), job_id]
            self._node = subprocess.Popen([*command, str(self._num_node)], stdout=subprocess.PIPE, text=True)

    def watched(self) -> tuple[list[Watched], list[Watched]]:
        """What the SDK's viewers and the others were told, once all of them are done."""
        by_sdk = [one for _ in self._jobs for one in self._results.get()]
        if self._node is None:
            return by_sdk, []
        output, _ = self._node.communicate()
        return by_sdk, [Watched(**json.loads(line)) for line in output.splitlines()]

    def close(self) -> None:
        """Ends the processes."""
        for jobs in self._jobs:
            jobs.put("")


class Stalled:
    """Calls that follow a job, take its first event and then read no more until they are told to."""

    def __init__(self, address: str, job_id: str, num_viewers: int) -> None:
        self._read_on: Callable[[], object]
        self._have_begun = threading.Barrier(2)
        self._digests: list[str] = []
        work = self._follow(address, job_id, num_viewers)
        self._thread = threading.Thread(target=lambda: asyncio.run(work), daemon=True)
        self._thread.start()
        self._have_begun.wait()

    def read_on(self) -> list[str]:
        """Reads what there is to the end; returns the SHA-256 of each one's media."""
        self._read_on()
        self._thread.join()
        return self._digests

    async def _follow(self, address: str, job_id: str, num_viewers: int) -> None:
        may_read = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._read_on = lambda: loop.call_soon_threadsafe(may_read.set)

        async def one(channel: Any, begun: asyncio.Event) -> str:
            digest = hashlib.sha256()
            call = video_pb2_grpc.VideoServiceStub(channel).Attach(video_pb2.AttachRequest(job_id=job_id))
            responses = aiter(call)
            await anext(responses)  # `accepted`, which has no media
            begun.set()
            await may_read.wait()
            async for response in responses:
                payload = response.event.WhichOneof("payload")
                if payload in ("init_segment", "fragment"):
                    digest.update(getattr(response.event, payload).data)
            return digest.hexdigest()

        # One connection for all: gRPC lets a connection's other calls go on when one is not read.
        async with connect(address) as channel:
            begun = [asyncio.Event() for _ in range(num_viewers)]
            reading = [asyncio.create_task(one(channel, event)) for event in begun]
            for event in begun:
                await event.wait()
            await asyncio.to_thread(self._have_begun.wait)
            self._digests = list(await asyncio.gather(*reading))
