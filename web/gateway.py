"""`python -m web.gateway --server HOST:PORT`: serves the page and the HTTP API in front of a running server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvicorn

from h3stream.errors import ConfigError
from services.common.listen import check_tcp_address
from web.app import make_app


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop; ends with one clear line if it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(prog="python -m web.gateway", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--server", default="127.0.0.1:50051", metavar="HOST:PORT", help="the gRPC server [%(default)s]"
    )
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="where to serve [%(default)s]")
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback: callers are not authenticated")
    arguments = parser.parse_args(argv)
    # uvicorn raises the signal that stopped it once more when it is done: to be told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        check_tcp_address(arguments.listen, insecure=arguments.insecure)
        asyncio.run(serve(arguments.server, arguments.listen, insecure=arguments.insecure))
    except ConfigError as error:
        sys.exit(f"h3stream: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


async def serve(server: str, listen: str, *, insecure: bool = False) -> None:
    """Serves at `listen`, "HOST:PORT" (port 0: a free one), until SIGTERM, SIGINT or cancellation.

    insecure: callers may use any name for this machine.  Raises ConfigError if nothing can listen there.
    """
    host, _, port = listen.rpartition(":")
    config = uvicorn.Config(
        make_app(server, any_host=insecure),
        host=host.strip("[]"),
        port=int(port),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # streams last as long as jobs do; their readers resume
    )
    try:
        sock = config.bind_socket()
        sock.listen()  # whoever reads the line below may call
    except SystemExit:  # what uvicorn ends with where it cannot bind
        raise ConfigError(f"nothing can listen at {listen}; it may be in use") from None
    bound_host, bound_port = sock.getsockname()[:2]
    print(f"listening on http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}", flush=True)
    with sock:
        await uvicorn.Server(config).serve(sockets=[sock])


if __name__ == "__main__":
    main()
