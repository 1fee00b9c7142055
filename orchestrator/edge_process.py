"""The edge as a child of the orchestrator: started, started again if it dies, stopped.

It never outlives its parent: it ends when its standard input closes, however the parent does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process

from h3stream.errors import StartupError
from orchestrator.edge import GRACE_S, STOP
from orchestrator.edge_settings import EdgeSettings
from services.common.options import texts_of

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = GRACE_S + 5.0
"""After that it is killed."""
RETRY_S = 1.0
"""How long after a failed start it is tried again."""

_ANNOUNCEMENT = "listening on "


class EdgeProcess:
    """One edge, on one address."""

    def __init__(self, core: str, settings: EdgeSettings | None = None) -> None:
        """core: address that the edge asks.  settings: None: the defaults."""
        self._arguments = ["--core", core]
        for name, text in texts_of(settings or EdgeSettings()).items():
            self._arguments += [f"--{name.replace('_', '-')}", text]
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Serves on "HOST:PORT" (port 0: any free one); returns the address to dial.

        Raises StartupError if the address cannot be bound or a file of the settings cannot be used.
        """
        address = await self._spawn(listen)
        self._watching = asyncio.create_task(self._watch(address))
        return address

    async def stop(self) -> None:
        """Lets streams send what there still is, then ends the process, by force if it does not end by itself."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.communicate(STOP), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("the edge did not stop in time")
            self._process.kill()
            await self._process.wait()

    async def _watch(self, address: str) -> None:
        assert self._process is not None
        while True:
            log.warning("the edge ended with status %d: it is started again", await self._process.wait())
            while True:
                try:
                    await self._spawn(address)
                    break
                except StartupError as error:
                    log.warning("%s; trying again in %.0f s", error, RETRY_S)
                    await asyncio.sleep(RETRY_S)

    async def _spawn(self, listen: str) -> str:
        # As this interpreter finds modules: a folder of the user's that happens to be called `orchestrator` is none.
        python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
        self._process = await asyncio.create_subprocess_exec(
            *python,
            *("-m", "orchestrator.edge", "--listen", listen, *self._arguments),
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(),
        )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        if line.startswith(_ANNOUNCEMENT):
            return line.removeprefix(_ANNOUNCEMENT)
        raise StartupError(line or f"the edge ended with status {await self._process.wait()} before it served")


def _environment() -> dict[str, str]:
    """This process's without what is Ray's: who has its token may run anything, and strangers talk to the edge."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
