"""What the service holds under load: viewers, cut connections, readers that stall, a queue of a thousand jobs.

    cd bench/load_node && npm install && cd -
    python -m bench.load MODEL [--sdk 200] [--node 50] [--jobs 1000] [--storms 5] [--stalled 100] [--report FILE]

A real server (`python -m orchestrator`: Ray, one lane, the edge) makes real clips of a small model. Every viewer has a
connection of its own. The SDK's run in processes of 50, Node's (@grpc/grpc-js, the protos read by @grpc/proto-loader)
in one, all of them niced, because they share the machine with the server. Prints counts and ratios of this run; a part
whose number is 0 is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench.fanout import busy_s, edge_of
from bench.load_viewers import Audience, Stalled, Watched, watch
from h3stream import AsyncClient, Client, Completed, Event, Fragment, Generation
from h3stream.request import ClipSpec
from orchestrator.model_info import read_model_info

PROMPT = "a red fox trots through fresh snow"
SMALLEST = {"num_frames": 22, "width": 64, "height": 64, "steps": 1}
"""The clip of a job that waits: nothing of it is ever made."""
LONGEST = 362
"""Frames of the clip that has the lane while others are handed in."""
SUBMITTERS = 32
"""Calls that hand in jobs at a time."""
TIMED_JOBS = 5
"""Jobs that are timed with a full queue and with an empty one."""


@dataclasses.dataclass
class Service:
    """A server and what is measured of its processes."""

    process: psutil.Process
    address: str
    client: Client
    clip: ClipSpec

    def make(self, **changed: int) -> Generation:
        """Submits the clip and yields its events; the job goes before all that wait."""
        fields = {name: value for name, value in dataclasses.asdict(self.clip).items() if name != "adapters"}
        return self.client.generate(PROMPT, priority="high", **{**fields, **changed})

    def rss(self) -> dict[str, int]:
        """Resident bytes of the two processes that callers are served by."""
        return {"core": self.process.memory_info().rss, "edge": edge_of(self.process).memory_info().rss}


class Report:
    """Lines of the table that is printed and written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str, *notes: str) -> None:
        self._add(f"\n## {title}\n", *notes, *("",) * bool(notes), "| | |", "| --- | --- |")

    def row(self, what: str, value: object) -> None:
        self._add(f"| {what} | {value} |")

    def _add(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
            self.lines.append(line)


def tell_watched(report: Report, kind: str, watched: list[Watched], reference: Watched) -> None:
    """Rows on what some viewers were told, against a plain reading of the same job."""
    same = sum(one.digest == reference.digest and one.num_events == reference.num_events for one in watched)
    report.row(f"{kind}: saw every event and the same bytes", f"{same} of {len(watched)}")
    report.row(f"{kind}: events lost", sum(one.num_lost for one in watched))
    report.row(f"{kind}: events doubled", sum(one.num_doubled for one in watched))
    for error in sorted({one.error for one in watched if one.error}):
        report.row(f"{kind}: failed", error)


def read_plainly(service: Service, job_id: str) -> Watched:
    """What one reader is told of a job that has ended."""

    async def read() -> Watched:
        async with AsyncClient(service.address) as client:
            return await watch(client, job_id)

    return asyncio.run(read())


def storm(service: Service, audience: Audience, num_storms: int, report: Report) -> str:
    """All viewers follow a live job while the process that serves them is killed again and again; returns the job."""
    gaps_s: list[float] = []
    with service.make() as events:
        first = next(events)
        audience.send(first.job_id)
        for event in events:
            if isinstance(event, Fragment) and len(gaps_s) < num_storms:
                edge = edge_of(service.process)
                edge.kill()
                edge.wait()
                gaps_s.append(seconds_until_served(service.address))
    sdk, node = audience.watched()
    reference = read_plainly(service, first.job_id)
    report.section(
        "Viewers and reconnect storms",
        f"{audience.num_viewers} viewers follow one job from its first event; the edge, and with it every connection, "
        f"is killed (SIGKILL) {len(gaps_s)} times while the job runs.",
    )
    report.row("connections cut at once, each time", audience.num_viewers)
    report.row("connections can be made again, slowest", f"{max(gaps_s, default=0.0):.1f} s after a kill")
    report.row("events of the job", reference.num_events)
    tell_watched(report, "SDK", sdk, reference)
    tell_watched(report, "Node", node, reference)
    return first.job_id


def seconds_until_served(address: str) -> float:
    """How long nobody can connect from now on."""
    started_s = time.monotonic()
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port))).close()
        except OSError:
            time.sleep(0.01)
        else:
            return time.monotonic() - started_s


def replay(service: Service, audience: Audience, job_id: str, report: Report) -> None:
    """All viewers read a job that has ended, as fast as they are served."""
    reference = read_plainly(service, job_id)
    edge = edge_of(service.process)
    before_s, rss, started_s = busy_s(edge), edge.memory_info().rss, time.monotonic()
    audience.send(job_id)
    sdk, node = audience.watched()
    took_s, cpu_s = time.monotonic() - started_s, busy_s(edge) - before_s
    num_events = sum(one.num_events for one in (*sdk, *node))
    report.section("Message rate", f"{audience.num_viewers} viewers read the same ended job at the same time.")
    tell_watched(report, "SDK", sdk, reference)
    tell_watched(report, "Node", node, reference)
    report.row("events sent", num_events)
    report.row("events per second of one core of the edge", f"{num_events / cpu_s:,.0f}")
    report.row("events per second, viewers on the same cores", f"{num_events / took_s:,.0f}")
    report.row("memory of the edge, after / before", f"{edge.memory_info().rss / rss:.2f}")


def stall(service: Service, num_stalled: int, report: Report) -> None:
    """A job is made while readers hold their calls open and read nothing, and again without them."""
    alone, beside = [], []
    rss: dict[str, int] = {}
    is_same = 0
    for _ in range(TIMED_JOBS):
        (*_, last) = service.make()
        assert isinstance(last, Completed)
        alone.append(last.timings.sampling_s)
        before = service.rss()
        with service.make() as events:
            first = next(events)
            stalled = Stalled(service.address, first.job_id, num_stalled)
            (*_, last) = events
        assert isinstance(last, Completed)
        beside.append(last.timings.sampling_s)
        rss = {name: max(rss.get(name, 0), size - before[name]) for name, size in service.rss().items()}
        reference = read_plainly(service, first.job_id).digest
        is_same += sum(digest == reference for digest in stalled.read_on())
    report.section(
        "Readers that stall",
        f"{num_stalled} calls take the first event of a running job and then read nothing until it has ended; "
        f"{TIMED_JOBS} jobs with them, {TIMED_JOBS} without, in turns.",
    )
    report.row("sampling beside them / alone", ratio(beside, alone))
    report.row("most memory they cost the core, the edge", f"{mib(rss['core'])}, {mib(rss['edge'])}")
    report.row("then read all of it, the same bytes", f"{is_same} of {num_stalled * TIMED_JOBS}")


def queue(service: Service, num_jobs: int, report: Report) -> None:
    """Jobs are made while many wait, and again when none does."""
    rss = service.rss()["core"]
    with service.make(num_frames=LONGEST) as holder:  # has the lane until all are there
        next(holder)
        started_s = time.monotonic()
        waiting = asyncio.run(submit(service.address, num_jobs))
        submitted_s = time.monotonic() - started_s
        grown = service.rss()["core"] - rss
        full = timed(service, holder)
    started_s = time.monotonic()
    asyncio.run(cancel(service.address, waiting))
    cancelled_s = time.monotonic() - started_s
    empty = timed(service, ())
    report.section("The queue", f"{num_jobs} jobs of low priority wait while others go before them.")
    report.row("jobs taken", f"{len(waiting)} of {num_jobs}, {num_jobs / submitted_s:,.0f} a second")
    report.row("sampling with a full queue / an empty one", ratio(full.sampling_s, empty.sampling_s))
    report.row("processor time of the core for an event, full / empty", f"{full.event_cpu_s / empty.event_cpu_s:.2f}")
    report.row("memory of the core for each job that waits", f"{max(0, grown) / max(1, len(waiting)) / 1024:.0f} KiB")
    report.row("cancelled", f"{num_jobs / cancelled_s:,.0f} a second")


@dataclasses.dataclass
class Timed:
    """What some jobs in a row took."""

    sampling_s: list[float]
    """Sampling of each of them, by the server's own measure."""
    event_cpu_s: float
    """Processor time of the core for each of their events."""


def timed(service: Service, before: Iterable[Event]) -> Timed:
    """Makes some jobs that are there together, so that none of lower priority runs between them.

    before: events of the job that has the lane, which are read to their end first.
    """
    running = [service.make() for _ in range(TIMED_JOBS)]
    for events in running:
        next(events)
    for _ in before:
        pass
    before_s, sampling_s, num_events = busy_s(service.process), [], 0
    for events in running:
        *others, last = events
        assert isinstance(last, Completed)
        sampling_s.append(last.timings.sampling_s)
        num_events += len(others) + 1
    return Timed(sampling_s, (busy_s(service.process) - before_s) / num_events)


async def submit(address: str, num_jobs: int) -> list[str]:
    """Hands in jobs that will wait; returns those that were taken."""
    limit = asyncio.Semaphore(SUBMITTERS)

    async def one(client: AsyncClient, index: int) -> str:
        async with limit, client.generate(f"{PROMPT} {index}", priority="low", **SMALLEST) as events:
            return (await anext(events)).job_id

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(one(client, index) for index in range(num_jobs))))


async def cancel(address: str, job_ids: list[str]) -> None:
    limit = asyncio.Semaphore(SUBMITTERS)

    async def one(client: AsyncClient, job_id: str) -> None:
        async with limit:
            await client.cancel(job_id)

    async with AsyncClient(address) as client:
        await asyncio.gather(*(one(client, job_id) for job_id in job_ids))


def ratio(values: list[float], bases: list[float]) -> str:
    pairs = [value / base for value, base in zip(values, bases, strict=True)]
    return f"{statistics.median(pairs):.2f} (median of {len(pairs)} pairs; {min(pairs):.2f} to {max(pairs):.2f})"


def mib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / (1 << 20):.1f} MiB"


@contextlib.contextmanager
def serving(model: Path, clip: ClipSpec, num_jobs: int) -> Iterator[Service]:
    """A server of its own on a data directory of its own."""
    command = [sys.executable, "-m", "orchestrator", "--model", str(model), "--listen", "127.0.0.1:0"]
    with tempfile.TemporaryDirectory() as data, (Path(data) / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--data", f"{data}/data", "--threads", "1", "--max-queued-jobs", str(num_jobs + TIMED_JOBS + 1)],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert server.stdout is not None
        try:
            address = next(line for line in server.stdout if line.startswith("listening on ")).split()[-1]
            with Client(address) as client:
                yield Service(psutil.Process(server.pid), address, client, clip)
        except BaseException:
            print(Path(log.name).read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sdk", type=int, default=200, help="viewers of the SDK")
    parser.add_argument("--node", type=int, default=50, help="viewers of @grpc/grpc-js; 0 needs no Node")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs that wait")
    parser.add_argument("--storms", type=int, default=5, help="times that every connection is cut")
    parser.add_argument("--stalled", type=int, default=100, help="readers that read nothing")
    parser.add_argument("--frames", type=int, default=141)
    parser.add_argument("--report", type=Path, help="file that the report is written to, as Markdown")
    flags = parser.parse_args()
    clip = dataclasses.replace(read_model_info(flags.model).default_clip, num_frames=flags.frames)
    report = Report()
    loads = [os.getloadavg()[0]]
    with serving(flags.model, clip, flags.jobs) as service:
        audience = Audience(service.address, flags.sdk, flags.node)
        for _ in service.make():  # so that nothing below pays for first calls
            pass
        before = service.rss()
        if audience.num_viewers:
            job_id = storm(service, audience, flags.storms, report)
            replay(service, audience, job_id, report)
        if flags.stalled:
            stall(service, flags.stalled, report)
        if flags.jobs:
            queue(service, flags.jobs, report)
        audience.close()
        after = service.rss()
        loads.append(os.getloadavg()[0])
        report.section("Memory over the whole run", "Before: new processes that have served one job to one reader.")
        report.row("core, after / before", f"{after['core'] / before['core']:.2f}")
        report.row("edge, after / before", f"{after['edge'] / before['edge']:.2f}")
    if flags.report is not None:
        flags.report.write_text(document(report, clip, loads))


def document(report: Report, clip: ClipSpec, loads: list[float]) -> str:
    """The report as a page with its conditions.

    loads: of the machine, before the run and at its end.
    """
    conditions = (
        f"One run of `python -m bench.load` on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} shared cores, "
        f"{platform.machine()}, no GPU, Python {platform.python_version()}. The server, its workers and all viewers "
        f"share the cores, with other work beside them (load average {loads[0]:.0f} before, {loads[-1]:.0f} at the "
        f"end). The clip has {clip.num_frames} frames of {clip.width}x{clip.height}, {clip.steps} steps, of "
        "a tiny model: what is counted and compared here is the service around the model, not the model."
    )
    return "\n".join(("# The service under load", "", conditions, *report.lines, ""))


if __name__ == "__main__":
    main()
