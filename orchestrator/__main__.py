"""`python -m orchestrator --model DIR`: reads the settings, builds the objects, serves; on SIGTERM lets running jobs
end and leaves the others to the next server."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2

from h3stream.errors import ConfigError, StartupError
from orchestrator.access.store import AccessStore
from orchestrator.admission import AdapterFacts
from orchestrator.config import Settings, load_settings
from orchestrator.data_directory import take_data_directory
from orchestrator.edge_process import EdgeProcess
from orchestrator.lane import Lane, LaneHost
from orchestrator.model_info import ModelInfo, read_model_info
from orchestrator.scheduler import Scheduler
from orchestrator.servicer import SERVICE_NAME, add_services
from services.checkpoints.adapter_registry import read_registry
from services.checkpoints.model_files import check_model
from services.common.logs import setup
from services.common.rpc import RpcServer

if TYPE_CHECKING:
    from orchestrator.lanes import RayCluster

log = logging.getLogger("orchestrator")

LAST_WORD_S = 1.0
"""How long after Ray's end a request to stop may still come, which then is what ended both."""


def main() -> None:
    """Runs the server until it is told to stop; ends with one clear line if it cannot start."""
    setup()
    try:
        settings, flags = load_settings(sys.argv[1:], os.environ)
        setup(settings.log_format)
        asyncio.run(serve(settings, exit_with_parent=flags.exit_with_parent))
    except StartupError as error:
        sys.exit(f"h3stream: {error}")


async def serve(settings: Settings, *, exit_with_parent: bool = False) -> None:
    """Serves until SIGTERM or SIGINT (drains; a second one does not wait), or until standard input closes."""
    stop = StopSignal(exit_with_parent)
    log.info("settings: %s", settings)
    model = read_model_info(settings.model, settings.parts)
    with take_data_directory(settings.data) as data, data.runtime_directory() as runtime:
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

        cluster = RayCluster(settings, runtime)
        cluster.start()
        try:
            stop.listen()  # again: Ray has put handlers of its own in place
            scheduler = make_scheduler(settings, [RayLane(settings, runtime, i) for i in range(settings.lanes)])
            scheduler.open()
            data.set_current()
            watching = asyncio.create_task(_end_with_ray(cluster, stop))
            try:
                await serve_jobs(settings, model, adapters, stop, scheduler, runtime)
            finally:
                watching.cancel()
            if stop.failure:
                raise StartupError(stop.failure)
        finally:
            cluster.stop()


async def _end_with_ray(cluster: RayCluster, stop: StopSignal) -> None:
    """Stops the server once Ray has ended: its workers cannot come back in this process, its jobs can in the next."""
    await cluster.ended()
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORD_S):  # a signal may have ended both
            await stop.first.wait()
    if not stop.first.is_set():
        stop.failure = "Ray has ended, and the workers with it; jobs go on when the server is started again"
    stop.first.set()
    stop.second.set()  # there is nothing that running jobs could go on with


def _prepare_ray(environment: MutableMapping[str, str]) -> None:
    """What Ray must find in the environment when it is imported."""
    # Ray listens beyond loopback whatever it is told: a secret of this process's own keeps strangers out.
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    if not sys.stderr.isatty():
        environment["RAY_COLOR_PREFIX"] = "0"  # a log is no terminal
    environment.setdefault("RAY_DEDUP_LOGS", "0")  # lines of several workers that are alike are all records
    # Ray would start workers at niceness 15, so that on a host without a GPU viewers came before the job.
    environment.setdefault("RAY_worker_niceness", "0")


def make_scheduler(settings: Settings, hosts: Sequence[LaneHost]) -> Scheduler:
    """The jobs of the data directory on the lanes of these hosts. Raises ConfigError for a broken file of keys."""
    return Scheduler(
        [Lane(host) for host in hosts],
        settings.data,
        max_queued_jobs=settings.max_queued_jobs,
        kept_jobs=settings.kept_jobs,
        kept_age_s=settings.kept_age_s,
        kept_bytes=settings.kept_bytes,
        tenants=AccessStore(settings.keys),
    )


async def serve_jobs(
    settings: Settings,
    model: ModelInfo,
    adapters: Sequence[AdapterFacts],
    stop: StopSignal,
    scheduler: Scheduler,
    runtime: Path,
) -> None:
    """Serves until told to stop: what is known of jobs at once, new ones as soon as the lanes have started.

    scheduler: opened.  runtime: private to this process; the socket that the edge asks goes there.
    Raises StartupError.
    """
    core = RpcServer((SERVICE_NAME,))
    add_services(core.server, scheduler, model, adapters, settings)
    socket = f"unix:{runtime}/core.sock"
    edge = EdgeProcess(socket, settings.edge)
    try:
        await core.start(socket, serving=False)
        await _tell_health(core, "", serves=True)
        # Bound before the weights are read: a taken port is told at once, and callers learn that the model is loading.
        address = await edge.start(settings.listen)
        if await stop.comes_before(scheduler.start()):
            log.info("stopping before the model has been loaded")
            return
        await _tell_health(core, SERVICE_NAME, serves=True)
        print(f"listening on {address}", flush=True)
        await stop.first.wait()
        log.info("stopping: running jobs have %.0f s", 0 if stop.second.is_set() else settings.drain_s)
        await _tell_health(core, SERVICE_NAME, serves=False)
    finally:
        try:
            await scheduler.stop(settings.drain_s, stop.second)
        finally:
            await edge.stop()
            await core.stop(grace_s=0)


async def _tell_health(core: RpcServer, name: str, *, serves: bool) -> None:
    """Sets what the health service answers.

    name: of a service, which serves while it takes jobs; empty: the server, which serves as long as it lives.
    """
    status = health_pb2.HealthCheckResponse
    await core.health.set(name, status.SERVING if serves else status.NOT_SERVING)


class StopSignal:
    """Counts the requests to stop: SIGTERM, SIGINT, and the end of standard input if that is asked for."""

    def __init__(self, exit_with_parent: bool) -> None:
        """Raises ConfigError if standard input is nothing whose end can be awaited."""
        self.first = asyncio.Event()
        """Set by the first request."""
        self.second = asyncio.Event()
        """Set by the second one, or by one that will not wait: running jobs are left to the next server."""
        self.failure = ""
        """Why the server has to stop although nobody asked for it; empty: it has not."""
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
