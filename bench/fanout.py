"""What viewers cost the job they watch: the time to sample a clip with and without them, in turns on one server.

    python bench/fanout.py MODEL [--viewers 200] [--rounds 5] [--frames 73] [--width 512] [--height 288]

Every viewer has an open connection of its own and follows the whole job. Workers have the first core to themselves, as
a GPU would be; the orchestrator has the other cores, before the viewers, which have to wait for it. What is compared is
the server's own measure of sampling. Prints ratios measured in one run, with their conditions.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from grpc import aio

from h3stream import Client, Completed
from h3stream.channel import CHANNEL_OPTIONS
from h3stream.request import ClipSpec
from h3stream.v1 import video_pb2, video_pb2_grpc
from orchestrator.model_info import read_model_info

PROMPT = "a red fox trots through fresh snow"
VIEWERS_EACH = 50
"""Viewers of one process."""


def run_on(process: psutil.Process, cores: list[int]) -> None:
    """Keeps every thread of a process on these cores."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


def busy_s(process: psutil.Process) -> float:
    """Seconds of processor time that a process has taken."""
    times = process.cpu_times()
    return times.user + times.system


async def watch(channel: aio.Channel, job_id: str) -> str:
    """Follows a job to its end; returns a digest of what came."""
    digest = hashlib.sha256()
    async for response in video_pb2_grpc.VideoServiceStub(channel).Attach(video_pb2.AttachRequest(job_id=job_id)):
        digest.update(response.event.SerializeToString())
    return digest.hexdigest()


def watch_all(address: str, jobs: multiprocessing.Queue[str], results: multiprocessing.Queue[list[str]]) -> None:
    """One process of viewers: one job after the other, until told an empty name."""
    os.nice(19)  # viewers are elsewhere: what they take themselves must not be taken from the server

    async def follow() -> None:
        # Otherwise all channels of a process would share one connection.
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        channels = [aio.insecure_channel(address, options) for _ in range(VIEWERS_EACH)]
        while job_id := await asyncio.to_thread(jobs.get):
            results.put(await asyncio.gather(*(watch(channel, job_id) for channel in channels)))
        for channel in channels:
            await channel.close()

    asyncio.run(follow())


class Audience:
    """The viewers, in processes that are there before anything is measured."""

    def __init__(self, address: str, num_viewers: int, cores: list[int]) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.jobs: list[multiprocessing.Queue[str]] = []
        self.results: multiprocessing.Queue[list[str]] = spawning.Queue()
        self.processes = []
        for _ in range(num_viewers // VIEWERS_EACH):
            self.jobs.append(spawning.Queue())
            process = spawning.Process(target=watch_all, args=(address, self.jobs[-1], self.results), daemon=True)
            process.start()
            assert process.pid is not None
            run_on(psutil.Process(process.pid), cores)
            self.processes.append(process)

    def send(self, job_id: str) -> None:
        for jobs in self.jobs:
            jobs.put(job_id)

    def digests(self) -> list[str]:
        return [digest for _ in self.processes for digest in self.results.get()]


def sampling_s(client: Client, clip: ClipSpec, audience: Audience | None) -> float:
    """Makes a clip while an audience watches it, or none; returns the seconds until its last chunk was sampled."""
    fields = {k: v for k, v in dataclasses.asdict(clip).items() if k != "adapters"}
    with client.generate(PROMPT, **fields) as events:
        next(events)
        if audience is not None:
            audience.send(events.job_id)
        *_, last = events
    assert isinstance(last, Completed)
    if audience is not None:
        assert len(set(audience.digests())) == 1, "viewers saw different streams"
    return last.timings.sampling_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=73)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--height", type=int, default=288)
    flags = parser.parse_args()
    clip = dataclasses.replace(
        read_model_info(flags.model).default_clip, num_frames=flags.frames, width=flags.width, height=flags.height
    )
    first, *others = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "orchestrator", "--model", str(flags.model), "--listen", "127.0.0.1:0"]
    without, watched, cpu_s = [], [], []
    with tempfile.TemporaryDirectory() as data:
        server = subprocess.Popen(
            [*command, "--data", data, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert server.stdout is not None
        try:
            address = next(line for line in server.stdout if line.startswith("listening on ")).split()[-1]
            orchestrator = psutil.Process(server.pid)
            for child in orchestrator.children(recursive=True):
                run_on(child, [first])
            run_on(orchestrator, others)
            audience = Audience(address, flags.viewers, others)
            with Client(address) as client:
                sampling_s(client, clip, audience)  # so that neither side pays for first calls
                for _ in range(flags.rounds):
                    cpu_s.append(busy_s(orchestrator))
                    without.append(sampling_s(client, clip, None))
                    cpu_s.append(busy_s(orchestrator))
                    watched.append(sampling_s(client, clip, audience))
                    cpu_s.append(busy_s(orchestrator))
            audience.send("")
        finally:
            server.terminate()
            server.wait()
    costs = [(end - between) - (between - start) for start, between, end in zip(*[iter(cpu_s)] * 3, strict=True)]
    ratios = [b / a for a, b in zip(without, watched, strict=True)]
    print(f"{flags.frames} frames {flags.width}x{flags.height}, {clip.steps} steps, {len(others) + 1} cores, "
          f"{platform.machine()}; {flags.viewers} viewers, {flags.rounds} rounds")  # fmt: skip
    print(f"sampling watched / not watched: {statistics.median(ratios):.3f} (median of pairs; "
          f"{min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    print(f"({statistics.median(without):.2f} s not watched, {statistics.median(watched):.2f} s watched; "
          f"spread of those not watched {max(without) / min(without):.3f})")  # fmt: skip
    print(f"processor time the orchestrator takes for the viewers: {statistics.median(costs):.2f} s of a clip")


if __name__ == "__main__":
    main()
