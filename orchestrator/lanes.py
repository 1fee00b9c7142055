"""Ray's only home here: places, pins, starts and stops the three workers of each lane.

Ray reads its environment when it is imported, so `orchestrator/__main__.py` sets that first.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.phases import Worker
from h3stream.errors import StartupError
from orchestrator.config import Settings
from services.common.actor import WorkerActor
from services.common.config import WorkerConfig
from services.dit.config import DitConfig
from services.text_encoder.config import TextEncoderConfig
from services.vae.config import VaeConfig

log = logging.getLogger(__name__)

HOST_SLOT = "h3stream_host_slot"
"""Custom resource that stands for a GPU where there is none, so that placement is the same everywhere."""
SHARE = 0.3
"""Part of the GPU that each of the three actors asks for: all three fit on one; three times 0.34 would not."""
PLACEMENT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 600.0
"""Reading the weights of the full model from disk takes minutes."""
STOP_TIMEOUT_S = 10.0
"""How long workers may take to end by themselves."""
FINISH_TIMEOUT_S = 30.0
"""How long a call of Ray's may take that is done in a second."""
GONE_GRACE_S = 3.0
"""How long a call of Ray's goes on once Ray has ended: what ends Ray still tidies up, all others wait in vain."""
LOOK_S = 0.2
"""From one look at whether Ray is still there to the next."""

PACKAGES: dict[Worker, str] = {worker: f"services.{worker.value}" for worker in Worker}


class RayCluster:
    """The Ray instance on this machine that hosts all lanes."""

    def __init__(self, settings: Settings, runtime_directory: Path) -> None:
        """runtime_directory: Ray's sockets and logs go there; its path must be short."""
        self._settings = settings
        self._runtime_directory = runtime_directory
        self._is_starting = False
        self._address = ""

    def start(self) -> None:
        """Starts Ray. Raises StartupError if it does not come up.

        Blocks, and must come before any gRPC in this process: Ray forks, and a fork under gRPC's threads can hang.
        """
        os.register_at_fork(after_in_child=self._leave_group)
        self._is_starting = True
        try:
            ray.init(
                address="local",  # never a cluster that the environment names: its GPUs are not ours to take
                # Of its own: Ray lets everybody write where it lives, and who may write beside a socket may replace it.
                _temp_dir=str(self._runtime_directory / "ray"),
                num_cpus=1,
                resources={HOST_SLOT: self._settings.lanes},
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=True,
                # Nothing travels through the object store; Ray insists on having one.
                object_store_memory=80 * 1024 * 1024,
            )
        except Exception as error:
            raise StartupError(f"Ray did not start: {error}") from error
        finally:
            self._is_starting = False
        self._address = ray.get_runtime_context().gcs_address

    async def ended(self) -> None:
        """Returns once Ray has ended, by itself or by somebody's hand: one of its processes is enough."""
        gone = asyncio.create_task(_until_gone(self._address))
        while not gone.done() and not _dead_processes():
            await asyncio.wait([gone], timeout=LOOK_S)
        gone.cancel()

    def stop(self) -> None:
        """Stops Ray and every actor on it; what is left of one that has ended before ends with this process."""
        if not _finishes(ray.shutdown, self._address):
            # The part of Ray that is in this process would wait for a minute when it is taken apart, or crash.
            atexit.register(_exit, 0 if sys.exception() is None else 1)

    def _leave_group(self) -> None:
        """In a process that Ray begins with: a signal to the server's group is the server's to handle, which drains."""
        if self._is_starting:
            os.setpgrp()


class RayLane:
    """The workers of one lane: three actors in one placement group on one GPU."""

    def __init__(self, settings: Settings, runtime_directory: Path, index: int) -> None:
        """runtime_directory: private to this process; sockets go there."""
        self._settings = settings
        self._index = index
        self._sockets = runtime_directory
        self._ledger = settings.data / f"residency.{index}.jsonl"
        self._starts = 0
        self._group: PlacementGroup | None = None
        self._actors: dict[Worker, Any] = {}
        self._pids: dict[Worker, int] = {}
        """Of the workers, once they are up."""
        self.token = secrets.token_hex(32)
        """What callers of the workers prove themselves with."""
        self._ray_address = ""
        self._resource = HOST_SLOT
        """What the workers take their share of."""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> Mapping[Worker, str]:
        """Starts the three actors and their servers; returns the address of each.

        Raises StartupError with the worker's own message if one cannot be built, or if there is no free GPU.
        """
        self._starts += 1
        self._ray_address = ray.get_runtime_context().gcs_address
        if _is_gone(self._ray_address):
            raise StartupError(f"lane {self._index}: Ray has ended")
        gpus = (await asyncio.to_thread(ray.cluster_resources)).get("GPU")
        self._resource = resource = "GPU" if gpus else HOST_SLOT
        # One bundle with a whole GPU, shared by the three, pins them to the same one.
        self._group = placement_group([{resource: 1}])
        try:
            await asyncio.wait_for(self._group.ready(), PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            raise StartupError(f"lane {self._index}: no free {resource} within {PLACEMENT_TIMEOUT_S:.0f} s") from None
        log.info("lane %d: loading the model", self._index)
        addresses = await self._up({worker: self._begin(worker) for worker in Worker})
        self._watching = asyncio.create_task(self._end_with_ray(self._pids))
        log.info("lane %d is up on one %s: %s", self._index, resource, ", ".join(addresses.values()))
        return addresses

    async def restart(self, worker: Worker) -> str:
        """Ends what is left of one worker, by force, and starts it anew in its place; returns its address.

        Raises StartupError as `start` does.
        """
        if self._group is None or _is_gone(self._ray_address):
            raise StartupError(f"lane {self._index}: Ray has ended")
        self._starts += 1
        log.info("lane %d: starting the %s worker anew", self._index, worker.value)
        pid = self._pids.pop(worker, None)
        if pid is not None:
            _kill([pid])  # one that is stopped would not hear what Ray tells it
            await self._until_dead(pid)  # its memory on the device is free then, and its lock on the ledger
        if (actor := self._actors.pop(worker, None)) is not None:
            await asyncio.to_thread(_finishes, lambda: ray.kill(actor), self._ray_address)
        return (await self._up({worker: self._begin(worker)}))[worker]

    def _begin(self, worker: Worker) -> Any:
        """Makes a worker's actor and has its server started; returns Ray's reference to its address and process id."""
        share: dict[str, Any] = {"num_gpus": SHARE} if self._resource == "GPU" else {"resources": {HOST_SLOT: SHARE}}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        actor_class = ray.remote(WorkerActor).options(num_cpus=0, scheduling_strategy=strategy, **share)
        # Known before it is up: who is cancelled in the middle of a start stops what there is.
        self._actors[worker] = actor = actor_class.remote(PACKAGES[worker], self._configs()[worker])
        return actor.start.remote(self._address(worker))

    async def _up(self, begun: Mapping[Worker, Any]) -> dict[Worker, str]:
        """The addresses of workers once they have started. Raises StartupError with a worker's own message."""
        try:
            # Not wait_for, which leaves the exception of a cancelled gather to nobody, who then logs it.
            async with asyncio.timeout(START_TIMEOUT_S):
                started = await asyncio.gather(*begun.values())
        except ray.exceptions.RayError as error:
            raise StartupError(f"lane {self._index}: {_cause(error)}") from error
        except TimeoutError:
            raise StartupError(f"lane {self._index}: not started within {START_TIMEOUT_S:.0f} s") from None
        addresses = {}
        for worker, (addresses[worker], pid) in zip(begun, started, strict=True):
            self._pids[worker] = pid
        return addresses

    async def _until_dead(self, pid: int) -> None:
        """Returns once a process has been taken away. Raises StartupError if it stays."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while _exists(pid):
                    await asyncio.sleep(LOOK_S / 10)
        except TimeoutError:
            raise StartupError(f"lane {self._index}: process {pid} cannot be ended") from None

    async def stop(self) -> None:
        """Ends the actors, by force if they do not end by themselves, and gives the GPU back."""
        actors, self._actors = list(self._actors.values()), {}
        pids, self._pids = self._pids, {}
        group, self._group = self._group, None
        if self._watching is not None:  # one that is still reading its weights answers only when it has them
            watching, self._watching = self._watching, None
            stopping = asyncio.gather(*(actor.stop.remote() for actor in actors), return_exceptions=True)
            await asyncio.wait((stopping, watching), timeout=STOP_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if watching.cancel() and not stopping.done():
                log.warning("lane %d: workers did not stop in time", self._index)

        def kill() -> None:
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)

        # Before there is a group there is nothing to end, and there may be no address yet.
        if group is not None and not await asyncio.to_thread(_finishes, kill, self._ray_address):
            _kill(pids.values())

    async def _end_with_ray(self, pids: Mapping[Worker, int]) -> None:
        """Ends the workers once Ray has ended: those that it leaves may take calls that they will never answer."""
        await _until_gone(self._ray_address)
        log.warning("lane %d: Ray has ended, and its workers with it", self._index)
        _kill(pids.values())

    def _configs(self) -> dict[Worker, WorkerConfig]:
        settings = self._settings
        common: dict[str, Any] = {
            "model_directory": settings.model,
            "device": settings.device,
            # Ray sets OMP_NUM_THREADS=1 for actors that ask for no CPU; the workers take turns, so each gets all.
            "threads": settings.threads or os.cpu_count() or 1,
            "ledger": self._ledger,
            "log_format": settings.log_format,
            "token": self.token,
        }
        return {
            Worker.TEXT_ENCODER: TextEncoderConfig(
                text_encoder=settings.text_encoder, tokenizer=settings.tokenizer, **common
            ),
            Worker.DIT: DitConfig(
                dit=settings.dit,
                dit_layout=settings.dit_layout,
                adapters=settings.adapter,
                allow_partial_adapters=settings.allow_partial_adapters,
                frozen_caches=settings.data / "frozen_caches",
                shared_cache_bytes=settings.shared_cache_bytes,
                no_pinned_caches=settings.no_pinned_caches,
                **common,
            ),
            Worker.VAE: VaeConfig(
                video_vae=settings.video_vae,
                audio_vae=settings.audio_vae,
                video_bit_rate=settings.video_bit_rate,
                preview_map_cache=settings.data / "preview_maps",
                artifact_root=settings.data / "jobs",
                **common,
            ),
        }

    def _address(self, worker: Worker) -> str:
        if self._settings.worker_transport == "tcp":
            return "127.0.0.1:0"
        # A fresh name per start: the socket file of a killed worker may still be there.
        return f"unix:{self._sockets}/{self._index}-{worker.value}-{self._starts}.sock"


def _exit(status: int) -> None:
    """Ends this process as it is."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _is_gone(address: str) -> bool:
    """Whether Ray, which listens there, has ended: a signal to all processes of a service ends it with the server."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return True
    return False


def _dead_processes() -> list[Any]:
    """Those of the processes that Ray began with in this one that have ended."""
    node = ray._private.worker._global_node
    return [] if node is None else list(node.dead_processes())


async def _until_gone(address: str) -> None:
    """Returns once Ray has ended: a connection to it ends then, and no other can be made."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        with suppress(OSError):
            await reader.read()
        writer.close()
        await asyncio.sleep(LOOK_S)  # Ray also ends connections on which nobody speaks


def _finishes(work: Callable[[], None], address: str) -> bool:
    """Runs a call of Ray's and raises what it raises; False if it does not return, for Ray has ended or stands still.

    Such a call waits for Ray to come back, and after a minute ends this process. Blocks.
    """
    if _is_gone(address):
        return False
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    give_up_s = time.monotonic() + FINISH_TIMEOUT_S
    while thread.is_alive() and not _is_gone(address) and time.monotonic() < give_up_s:
        thread.join(LOOK_S)
    thread.join(GONE_GRACE_S)
    if outcome.done():
        outcome.result()
    return outcome.done()


def _cause(error: BaseException) -> str:
    """The worker's own message, without Ray's traceback around it."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return str(cause)
    # Of an actor that could not be made only the text of its traceback is left, which ends with class and message.
    return re.sub(r"^h3stream\.errors\.\w+: ", "", str(error).strip().splitlines()[-1])
