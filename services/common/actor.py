"""The Ray actor shell of a worker: start its gRPC server, report the address, answer pings, stop.

Nothing else crosses Ray.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from services.common import logs
from services.common.config import WorkerConfig

if TYPE_CHECKING:
    from services.common.process import WorkerProcess


class WorkerActor:
    """Made a Ray actor by `orchestrator/lanes.py`; async, so it answers `ping` while a verb computes on its thread."""

    def __init__(self, package: str, config: WorkerConfig) -> None:
        # Ray passes what its workers print on to the server's log.
        logs.setup(config.log_format, has_time=False)
        self._package = package
        self._config = config
        self._process: WorkerProcess | None = None

    async def start(self, address: str) -> tuple[str, int]:
        """Builds the worker and serves on `address`; returns the address to dial and the process's id.

        Raises StartupError.

        Not built when the actor is made: of what that raises, Ray prints the traceback on the server's log.
        """
        # Imported in the actor's process: the orchestrator names this class and must not load torch.
        from services.common.process import WorkerProcess

        self._process = WorkerProcess(self._package, self._config)
        return await self._process.start(address), os.getpid()

    async def ping(self) -> bool:
        """Answers as long as the process and its event loop live."""
        return True

    async def stop(self) -> None:
        """Ends running calls and frees the device."""
        if self._process is not None:
            await self._process.stop()
