"""A clip from a server to a file or a pipe, and every way in which that can end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from h3stream.aio import AsyncClient, AsyncGeneration
from h3stream.artifact_file import is_written_into
from h3stream.clip_file import ClipFile
from h3stream.endpoint import Endpoint
from h3stream.errors import GenerationError, NotReadyError, ServerStoppingError
from h3stream.progress import Display, Lines, LiveBar, Tally
from h3stream.report import say
from h3stream.still_files import StillFiles
from h3stream.stream import Reconnection

STANDARD_OUTPUT = "-"
DEFAULT_COLUMNS = 80
"""For terminals that do not know their width."""


class Ending(Enum):
    """How a delivery ended."""

    WHOLE = "whole"
    INTERRUPTED = "interrupted"
    READER_GONE = "reader gone"
    NOT_WRITTEN = "not written"
    NOT_REFINED = "not refined"
    NOT_STREAMED = "not streamed"


@dataclass(frozen=True)
class Outputs:
    """Where what a job makes goes."""

    clip: str | None
    """File of the clip, written as it comes, or "-" for standard output; None where the job streams none."""
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Artifacts that are fetched once the job has ended, with their files."""
    stills: StillFiles | None = None
    """Where those of the clip go, if anywhere."""


async def deliver(
    server: Endpoint,
    follow: Callable[[AsyncClient], AsyncGeneration],
    outputs: Outputs,
    tally: Tally,
    *,
    owns_job: bool,
    is_lasting: bool,
    reconnect_s: float,
) -> Ending:
    """Writes what a job makes to files, or to standard output, while showing how far it is.

    follow: makes the clip, or follows the job that does.  owns_job: where this ends early, the job is cancelled.
    is_lasting: whether the server goes on when this ends.  reconnect_s: how long a download that breaks off is tried
    again.

    The user is told of an early end. Raises GenerationError if the job fails.
    """

    async def leave() -> str:
        if not events.job_id:
            return "no job had been accepted"
        return await _cancel(client, events.job_id) if owns_job else _way_back(events.job_id, server, outputs)

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as asyncio does for Ctrl-C
    async with server.client() as client, follow(client) as events:
        try:
            await _write(events, outputs, tally)
        except asyncio.CancelledError:
            task.uncancel()
            say(f"h3stream: interrupted; {await leave()}{_kept(outputs.clip, tally)}")
            return Ending.INTERRUPTED
        except OSError as error:
            if outputs.clip == STANDARD_OUTPUT and isinstance(error, BrokenPipeError):
                say(f"h3stream: the reader has gone; {await leave()}")
                return Ending.READER_GONE
            say(f"h3stream: cannot write {outputs.clip}: {error.strerror}; {await leave()}")
            return Ending.NOT_WRITTEN
        except GenerationError as error:
            if isinstance(error, ServerStoppingError) and events.job_id and is_lasting:
                say(f"h3stream: {_way_back(events.job_id, server, outputs)}")
            if tally.stream is not None and outputs.clip is not None:
                say(f"h3stream: {outputs.clip} is whole, but its sound is not refined")
            elif tally.num_chunks and outputs.clip is not None:  # it had been accepted
                say(f"h3stream: the clip is not whole{_kept(outputs.clip, tally)}")
            raise
        if outputs.clip is not None and tally.stream is None and tally.refined is None:
            say(_not_streamed(events.job_id, server, outputs.clip, tally, is_lasting=is_lasting))
            return Ending.NOT_STREAMED
        if failure := tally.refine_failure:
            say(f"h3stream: the clip is whole, but its sound is not refined: {failure.reason}: {failure.message}")
            return Ending.NOT_REFINED
        return await _fetch(client, events.job_id, outputs.artifacts, task, reconnect_s)


async def _write(events: AsyncGeneration, outputs: Outputs, tally: Tally) -> None:
    started_s = time.monotonic()
    display: Display
    if sys.stderr.isatty():
        display = LiveBar(sys.stderr, lambda: os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS)
    else:
        display = Lines(sys.stderr)
    # Written past sys.stdout, so nothing waits in a buffer and nothing complains at exit if the reader has gone.
    path = os.dup(sys.stdout.fileno()) if outputs.clip == STANDARD_OUTPUT else outputs.clip
    with nullcontext() if path is None else ClipFile(path) as file, _connection_told(display.note):
        try:
            async for event in events:
                if file is not None:
                    file.write(event)
                if outputs.stills is not None:
                    outputs.stills.write(event)
                elapsed_s = time.monotonic() - started_s
                tally.add(event, elapsed_s)
                display.show(tally, event, elapsed_s)
        finally:
            display.close()


async def _fetch(
    client: AsyncClient, job_id: str, artifacts: Mapping[str, str], task: asyncio.Task[Any], reconnect_s: float
) -> Ending:
    """Downloads artifacts of a job that has ended, each going on where it broke off if it goes to a file."""
    for name, path in artifacts.items():
        again = Reconnection(0.0 if is_written_into(path) else reconnect_s)
        try:
            while True:
                try:
                    await client.download(job_id, name, path)
                    break
                except NotReadyError:
                    if (delay_s := again.next_delay_s()) is None:
                        raise
                    await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            task.uncancel()
            say(f"h3stream: interrupted; job {job_id} has ended, but {path} is not whole")
            return Ending.INTERRUPTED
        except OSError as error:
            say(f"h3stream: cannot write {path}: {error.strerror}; job {job_id} has ended")
            return Ending.NOT_WRITTEN
    return Ending.WHOLE


async def _cancel(client: AsyncClient, job_id: str) -> str:
    """Cancels the job of a stream that is being left; returns what became of it, in words."""
    try:
        await client.cancel(job_id)
    except GenerationError as error:
        return f"job {job_id} could not be cancelled ({error.message})"
    return "the job is cancelled"


@contextmanager
def _connection_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Tells of lost and regained connections for as long as the block lasts."""
    handler = logging.Handler()
    handler.emit = lambda record: tell(f"h3stream: {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("h3stream.stream")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _way_back(job_id: str, server: Endpoint, outputs: Outputs) -> str:
    """How to come back to a job that is being left."""
    if outputs.clip is not None:
        return f"job {job_id} goes on; follow it with: h3stream attach {job_id} {server.options} -o FILE"
    return f"job {job_id} goes on; see how far it is with: h3stream job {job_id} {server.options}"


def _not_streamed(job_id: str, server: Endpoint, output: str, tally: Tally, *, is_lasting: bool) -> str:
    """Why a job that succeeded has no whole clip in its file, and where there is something of it."""
    artifacts = () if tally.completed is None else tally.completed.artifacts
    names = ", ".join(artifact.name for artifact in artifacts)
    told = f"the stream of the clip is not whole{_kept(output, tally)}"
    if not is_lasting:
        return f"h3stream: {told}; what else was made has gone with the server: name one with --server to keep it"
    return f"h3stream: {told}; the server has {names or 'nothing'}: h3stream download {job_id} NAME {server.options}"


def _kept(output: str | None, tally: Tally) -> str:
    if output in (None, STANDARD_OUTPUT) or tally.first_fragment_s is None:
        return ""
    return f"; {output} keeps the {tally.num_frames_received} of {tally.num_frames} frames that had arrived"
