"""A worker as a process of its own: build it, serve it, stop it.

Used by the Ray actor and by `python -m services.NAME`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import signal
import sys

import torch

from h3stream.errors import StartupError
from h3stream.v1 import workers_pb2_grpc
from services.common import logs
from services.common.authentication import TokenInterceptor
from services.common.config import WorkerConfig
from services.common.listen import check_tcp_address
from services.common.options import add_flags, parse_values, told
from services.common.rpc import RpcServer
from services.common.token import TOKEN_VARIABLE
from services.common.worker import ServedWorker, WorkerServicer

_WORKER_SERVICE = "h3stream.v1.WorkerService"


class WorkerProcess:
    """One worker and its gRPC server."""

    def __init__(self, package: str, config: WorkerConfig) -> None:
        """package: one of the packages below `services`; its `servicer.build(config)` makes the worker.

        Raises StartupError if the worker cannot be built.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.set_grad_enabled(False)
        self._served: ServedWorker = importlib.import_module(f"{package}.servicer").build(config)
        self._server = RpcServer(
            (_WORKER_SERVICE, self._served.service_name), [TokenInterceptor(config.token)] if config.token else []
        )

    async def start(self, address: str) -> str:
        """Serves on "HOST:PORT" or "unix:PATH"; returns the address to dial."""
        workers_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self._served), self._server.server)
        self._served.register(self._server.server)
        return await self._server.start(address)

    async def stop(self) -> None:
        """Ends running calls, waits for the running verb and frees the device."""
        await self._server.stop(grace_s=0)
        await self._served.runner.run(lambda _: self._served.worker.weights.leave())
        await self._served.runner.run(lambda _: self._served.close())
        self._served.runner.close()

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait()


def main(package: str, config_class: type[WorkerConfig], token: str) -> None:
    """`python -m services.NAME --model DIR --listen ADDRESS`: one worker without Ray, until SIGTERM or SIGINT.

    token: what callers must send; empty: nothing.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=f"Serves {package} over gRPC.")
    parser.add_argument("--listen", default="127.0.0.1:0", help='"HOST:PORT" (0: any free port) or "unix:PATH"')
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="Allow listening beyond loopback although callers are not authenticated. They are where the environment "
        f"has {TOKEN_VARIABLE}, which they must then send.",
    )
    add_flags(parser, config_class)
    arguments = vars(parser.parse_args())
    listen, insecure = arguments.pop("listen"), arguments.pop("insecure")
    given = {name: value for name, value in arguments.items() if value is not None}
    logs.setup(arguments["log_format"] or "text")
    try:
        if not listen.startswith("unix:"):
            check_tcp_address(listen, insecure=insecure or bool(token))
        asyncio.run(_serve(package, config_class(**parse_values(config_class, given), token=token), listen))
    except StartupError as error:
        sys.exit(f"{package}: {error}")


async def _serve(package: str, config: WorkerConfig, listen: str) -> None:
    logging.getLogger(package).info("settings: %s", told(config))
    process = WorkerProcess(package, config)
    address = await process.start(listen)
    print(f"listening on {address}", flush=True)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await stopping.wait()
    await process.stop()
