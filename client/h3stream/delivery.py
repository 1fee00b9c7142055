"""A clip from a server to a file or a pipe, and every way in which that can end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from enum import Enum

from h3stream.aio import AsyncClient, AsyncGeneration
from h3stream.clip_file import ClipFile
from h3stream.errors import GenerationError
from h3stream.progress import Display, Lines, LiveBar, Tally
from h3stream.report import say
from h3stream.still_files import StillFiles

STANDARD_OUTPUT = "-"
DEFAULT_COLUMNS = 80
"""For terminals that do not know their width."""


class Ending(Enum):
    """How a delivery ended."""

    WHOLE = "whole"
    INTERRUPTED = "interrupted"
    READER_GONE = "reader gone"
    NOT_WRITTEN = "not written"


async def deliver(
    address: str,
    follow: Callable[[AsyncClient], AsyncGeneration],
    output: str,
    tally: Tally,
    *,
    owns_job: bool,
    stills: StillFiles | None = None,
) -> Ending:
    """Writes a clip to a file, or to standard output, while showing how far it is.

    follow: makes the clip, or follows the job that does.  owns_job: where this ends early, the job is cancelled.
    stills: where those of the clip go, if anywhere.

    The user is told of an early end. Raises GenerationError if the job fails.
    """

    async def leave() -> str:
        job_id = events.job_id
        return await _cancel(client, job_id) if owns_job else f"job {job_id} goes on"

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as asyncio does for Ctrl-C
    async with AsyncClient(address) as client, follow(client) as events:
        try:
            await _write(events, output, tally, stills)
        except asyncio.CancelledError:
            task.uncancel()
            say(f"h3stream: interrupted; {await leave()}{_kept(output, tally)}")
            return Ending.INTERRUPTED
        except OSError as error:
            if output == STANDARD_OUTPUT and isinstance(error, BrokenPipeError):
                say(f"h3stream: the reader has gone; {await leave()}")
                return Ending.READER_GONE
            say(f"h3stream: cannot write {output}: {error.strerror}; {await leave()}")
            return Ending.NOT_WRITTEN
        except GenerationError:
            if tally.num_chunks:  # it had been accepted
                say(f"h3stream: the clip is not whole{_kept(output, tally)}")
            raise
    return Ending.WHOLE


async def _write(events: AsyncGeneration, output: str, tally: Tally, stills: StillFiles | None) -> None:
    started_s = time.monotonic()
    display: Display
    if sys.stderr.isatty():
        display = LiveBar(sys.stderr, lambda: os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS)
    else:
        display = Lines(sys.stderr)
    # Written past sys.stdout, so nothing waits in a buffer and nothing complains at exit if the reader has gone.
    with ClipFile(os.dup(sys.stdout.fileno()) if output == STANDARD_OUTPUT else output) as file:
        try:
            async for event in events:
                file.write(event)
                if stills is not None:
                    stills.write(event)
                elapsed_s = time.monotonic() - started_s
                tally.add(event, elapsed_s)
                display.show(tally, event, elapsed_s)
        finally:
            display.close()


async def _cancel(client: AsyncClient, job_id: str) -> str:
    """Cancels the job of a stream that is being left; returns what became of it, in words."""
    if not job_id:
        return "no job had been accepted"
    try:
        await client.cancel(job_id)
    except GenerationError as error:
        return f"job {job_id} could not be cancelled ({error.message})"
    return "the job is cancelled"


def _kept(output: str, tally: Tally) -> str:
    if output == STANDARD_OUTPUT or tally.first_fragment_s is None:
        return ""
    return f"; {output} keeps the {tally.num_frames_received} of {tally.num_frames} frames that had arrived"
