"""`python -m orchestrator --model DIR`: reads the settings, builds the objects, serves, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Coroutine, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from h3stream.errors import ConfigError, StartupError
from orchestrator.admission import AdapterFacts
from orchestrator.config import Settings, load_settings
from orchestrator.edge_process import EdgeProcess
from orchestrator.lane import Lane, LaneHost
from orchestrator.model_info import ModelInfo, read_model_info
from orchestrator.scheduler import Scheduler
from orchestrator.servicer import SERVICE_NAME, add_services
from services.checkpoints.adapter_registry import read_registry
from services.checkpoints.model_files import check_model
from services.common.rpc import RpcServer

log = logging.getLogger("orchestrator")


def main() -> None:
    """Runs the server until it is told to stop; ends with one clear line if it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings, flags = load_settings(sys.argv[1:], os.environ)
        asyncio.run(serve(settings, exit_with_parent=flags.exit_with_parent))
    except StartupError as error:
        sys.exit(f"h3stream: {error}")


async def serve(settings: Settings, *, exit_with_parent: bool = False) -> None:
    """Serves until SIGTERM or SIGINT (drains; a second one does not wait), or until standard input closes."""
    stop = StopSignal(exit_with_parent)
    log.info("settings: %s", settings)
    model = read_model_info(settings.model, settings.parts)
    with (
        _take_data_directory(settings.data),
        # Sockets and Ray's own files, in a directory that only this user can enter. Ray's last processes may still be
        # writing there when it is removed.
        tempfile.TemporaryDirectory(prefix="h3stream-", ignore_cleanup_errors=True) as runtime,
    ):
        adapters = read_registry(settings.adapter, settings.model)
        check_model(
            settings.model,
            settings.parts,
            settings.dit_layout,
            adapters,
            allow_partial_adapters=settings.allow_partial_adapters,
        )
        if not any(adapter.is_streaming for adapter in adapters):
            log.warning("there is no streaming adapter: only dense clips can be made (--adapter raven=PATH)")
        _prepare_ray(os.environ)
        from orchestrator.lanes import RayCluster, RayLane

        cluster = RayCluster(settings, Path(runtime))
        cluster.start()
        try:
            stop.listen()  # again: Ray has put handlers of its own in place
            hosts = [RayLane(settings, Path(runtime), index) for index in range(settings.lanes)]
            await serve_lanes(settings, model, adapters, stop, hosts, Path(runtime))
        finally:
            cluster.stop()


def _take_data_directory(directory: Path) -> TextIO:
    """Makes the directory for jobs and keeps other servers out for as long as the returned file is open.

    Two servers would share the residency ledger, whose lock would fail the jobs of one of them.
    Raises ConfigError if nothing can be written there or another server has it.
    """
    try:
        (directory / "jobs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory / "jobs"):
            pass
        lock = (directory / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        raise ConfigError(f"data: another server uses {directory}; give this one another directory") from None
    except OSError as error:
        raise ConfigError(f"data: nothing can be written in {directory}: {error.strerror}") from error


def _prepare_ray(environment: MutableMapping[str, str]) -> None:
    """What Ray must find in the environment when it is imported."""
    # Ray listens beyond loopback whatever it is told: a secret of this process's own keeps strangers out.
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    if not sys.stderr.isatty():
        environment["RAY_COLOR_PREFIX"] = "0"  # a log is no terminal
    # Ray would start workers at niceness 15, so that on a host without a GPU viewers came before the job.
    environment.setdefault("RAY_worker_niceness", "0")


async def serve_lanes(
    settings: Settings,
    model: ModelInfo,
    adapters: Sequence[AdapterFacts],
    stop: StopSignal,
    hosts: Sequence[LaneHost],
    runtime: Path,
) -> None:
    """Serves on the lanes of these hosts until told to stop, also while they start.

    runtime: private to this process; the socket that the edge asks goes there.  Raises StartupError.
    """
    scheduler = Scheduler(
        [Lane(host) for host in hosts],
        settings.data,
        max_queued_jobs=settings.max_queued_jobs,
        kept_jobs=settings.kept_jobs,
        kept_age_s=settings.kept_age_s,
        kept_bytes=settings.kept_bytes,
    )
    core = RpcServer((SERVICE_NAME,))
    add_services(core.server, scheduler, model, adapters, settings)
    edge = EdgeProcess(await core.start(f"unix:{runtime}/core.sock", serving=False))
    try:
        # Bound before the weights are read: a taken port is told at once, and callers learn that the model is loading.
        address = await edge.start(settings.listen)
        if await stop.comes_before(scheduler.start()):
            log.info("stopping before the model has been loaded")
            return
        await core.set_serving(True)
        print(f"listening on {address}", flush=True)
        await stop.first.wait()
        log.info("stopping: running jobs have %.0f s", 0 if stop.second.is_set() else settings.drain_s)
        await core.set_serving(False)
    finally:
        await scheduler.stop(settings.drain_s, stop.second)
        await edge.stop()
        await core.stop(grace_s=0)


class StopSignal:
    """Counts the requests to stop: SIGTERM, SIGINT, and the end of standard input if that is asked for."""

    def __init__(self, exit_with_parent: bool) -> None:
        """Raises ConfigError if standard input is nothing whose end can be awaited."""
        self.first = asyncio.Event()
        """Set by the first request."""
        self.second = asyncio.Event()
        """Set by the second one, or by one that will not wait: running jobs are cancelled."""
        self.listen()
        if exit_with_parent:
            try:
                asyncio.get_running_loop().add_reader(0, self._on_stdin)
            except OSError as error:
                raise ConfigError("exit_with_parent needs a standard input that closes, such as a pipe") from error

    def listen(self) -> None:
        """Puts the signal handlers in place."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._count)

    async def comes_before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Awaits work and raises what it raises; cancels it and returns True if a request to stop comes first."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self.first.wait())
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            await working
            return False
        working.cancel()
        await asyncio.wait([working])
        return True

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def _on_stdin(self) -> None:
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            self.first.set()
            self.second.set()  # the parent is gone: nobody waits for the running jobs


if __name__ == "__main__":
    main()
