"""Runs a worker's verbs, which block, from its gRPC handlers, which must not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

T = TypeVar("T")
Cancelled = Callable[[], bool]
"""Polled by a verb between forwards; True once the caller has gone."""


class VerbCancelled(Exception):
    """Raised by a verb that found its caller gone."""


def poll(cancelled: Cancelled) -> None:
    """Raises VerbCancelled once the caller has gone."""
    if cancelled():
        raise VerbCancelled


class VerbRunner:
    """One thread per worker, so two verbs never compute at once and each sees what the one before it left."""

    def __init__(self, name: str) -> None:
        # torch's grad mode belongs to a thread: switched off elsewhere, it would still be on here.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=torch.set_grad_enabled, initargs=(False,)
        )

    async def run(self, verb: Callable[[Cancelled], T]) -> T:
        """Runs a verb to its end and returns its result; tells it when the caller is cancelled."""
        flag = threading.Event()
        try:
            run = copy_context().run  # so that what it logs tells of the job
            return await asyncio.get_running_loop().run_in_executor(self._thread, run, verb, flag.is_set)
        finally:
            flag.set()

    async def stream(self, verb: Callable[[Callable[[T], None], Cancelled], object]) -> AsyncIterator[T]:
        """Yields what a verb emits, as it emits it; tells the verb when the caller is cancelled."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[T | None] = asyncio.Queue()
        flag = threading.Event()

        def emit(item: T) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        future = loop.run_in_executor(self._thread, copy_context().run, verb, emit, flag.is_set)
        future.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                yield item
            await future
        finally:
            flag.set()
            future.cancel()  # one that has not begun never will
            # A verb that ends after its caller has gone has nobody to report to.
            future.add_done_callback(lambda f: f.cancelled() or f.exception())

    def close(self) -> None:
        """Waits for the running verb and ends the thread."""
        self._thread.shutdown()
