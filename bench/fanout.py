"""What viewers cost the job they watch: the time to sample a clip with and without them, in turns on one server.

    python bench/fanout.py MODEL [--viewers 200] [--rounds 5] [--frames 73] [--width 512] [--height 288]

Every viewer has an open connection of its own and follows the whole job. Workers have the first core to themselves, as
a GPU would be; the others are for the orchestrator and the edge, then for the viewers, which have to wait.
What is compared is the server's own measure of sampling. In a third run of each round the same viewers watch a clip
that was made before: they, the edge and the machine do the same work, but none of it is about the job that is timed.
Prints ratios measured in one run, with their conditions.
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


def edge_of(orchestrator: psutil.Process) -> psutil.Process:
    """The process that viewers reach."""
    (edge,) = [child for child in orchestrator.children() if "orchestrator.edge" in child.cmdline()]
    return edge


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


@dataclasses.dataclass(frozen=True)
class Run:
    """What making a clip took."""

    sampling_s: float
    """Seconds until its last chunk was sampled."""
    busy_s: dict[str, float]
    """Seconds of processor time that processes took until everybody had seen everything."""


class Service:
    """A server on its cores, and the viewers that may watch it."""

    def __init__(self, server: subprocess.Popen[str], address: str, num_viewers: int) -> None:
        first, *others = sorted(os.sched_getaffinity(0))
        orchestrator = psutil.Process(server.pid)
        edge = edge_of(orchestrator)
        for child in orchestrator.children(recursive=True):
            run_on(child, others if child == edge else [first])
        run_on(orchestrator, others)
        self.client = Client(address)
        self.audience = Audience(address, num_viewers, others)
        self.job_id = ""
        """The job made last."""
        viewers = [psutil.Process(process.pid) for process in self.audience.processes]
        self._processes = {"orchestrator": [orchestrator], "edge": [edge], "viewers": viewers}

    def make(self, clip: ClipSpec, watched: str = "") -> Run:
        """Makes a clip while the audience watches a job ("this" is the one being made), or none."""
        fields = {k: v for k, v in dataclasses.asdict(clip).items() if k != "adapters"}
        before = self._busy_s()
        with self.client.generate(PROMPT, **fields) as events:
            next(events)
            if watched:
                self.audience.send(events.job_id if watched == "this" else watched)
            *_, last = events
        self.job_id = events.job_id
        assert isinstance(last, Completed)
        if watched:
            assert len(set(self.audience.digests())) == 1, "viewers saw different streams"
        return Run(last.timings.sampling_s, {name: end - before[name] for name, end in self._busy_s().items()})

    def _busy_s(self) -> dict[str, float]:
        return {name: sum(map(busy_s, processes)) for name, processes in self._processes.items()}


def print_ratios(what: str, runs: list[Run], bases: list[Run]) -> None:
    ratios = [run.sampling_s / base.sampling_s for run, base in zip(runs, bases, strict=True)]
    print(f"{what}: {statistics.median(ratios):.3f} (median of pairs; {min(ratios):.3f} to {max(ratios):.3f})")


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
    command = [sys.executable, "-m", "orchestrator", "--model", str(flags.model), "--listen", "127.0.0.1:0"]
    alone, watched, beside = [], [], []
    with tempfile.TemporaryDirectory() as data:
        server = subprocess.Popen(
            [*command, "--data", data, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert server.stdout is not None
        try:
            address = next(line for line in server.stdout if line.startswith("listening on ")).split()[-1]
            service = Service(server, address, flags.viewers)
            service.make(clip, "this")  # so that neither side pays for first calls
            for _ in range(flags.rounds):
                alone.append(service.make(clip))
                watched.append(service.make(clip, "this"))
                beside.append(service.make(clip, service.job_id))
            service.audience.send("")
            service.client.close()
        finally:
            server.terminate()
            server.wait()
    print(f"{flags.frames} frames {flags.width}x{flags.height}, {clip.steps} steps, {os.cpu_count()} cores, "
          f"{platform.machine()}; {flags.viewers} viewers, {flags.rounds} rounds")  # fmt: skip
    print_ratios("sampling watched / not watched", watched, alone)
    print_ratios("sampling while another clip is watched / not watched", beside, alone)
    print_ratios("sampling watched / while another clip is watched", watched, beside)
    seconds = [run.sampling_s for run in alone]
    print(f"not watched: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    for name in alone[0].busy_s:
        costs = [run.busy_s[name] - base.busy_s[name] for run, base in zip(watched, alone, strict=True)]
        print(f"processor time for viewers, {name}: {statistics.median(costs):.2f} s of a clip")


if __name__ == "__main__":
    main()
