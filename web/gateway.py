"""`python -m web.gateway --server HOST:PORT`: serves the page and the HTTP API in front of a running server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from h3stream.endpoint import Endpoint, add_server_option, endpoint_of
from h3stream.errors import ConfigError
from services.common.listen import check_tcp_address

try:
    import uvicorn

    from web.app import make_app
    from web.upstream import Upstream
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    sys.exit(f"h3stream: the gateway needs {package}, of the extra `web`: pip install '.[web]' -c constraints.txt")

CUT_SHORT = "ASGI callable returned without completing response."
"""What uvicorn calls an error where a body is cut on purpose; `web.app` has told why by then."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop; ends with one clear line if it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != CUT_SHORT)
    parser = argparse.ArgumentParser(prog="python -m web.gateway", description=__doc__, allow_abbrev=False)
    add_server_option(parser, os.environ)
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="where to serve [%(default)s]")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond loopback: callers' keys go there unencrypted, and callers without one are let in as the "
        "gateway itself, if it has a key, or its server asks for none",
    )
    arguments = parser.parse_args(argv)
    # uvicorn raises the signal that stopped it once more when it is done: to be told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        check_tcp_address(arguments.listen, insecure=arguments.insecure)
        asyncio.run(serve(endpoint_of(arguments, os.environ), arguments.listen, insecure=arguments.insecure))
    except ConfigError as error:
        sys.exit(f"h3stream: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


async def serve(server: Endpoint, listen: str, *, insecure: bool = False) -> None:
    """Serves at `listen`, "HOST:PORT" (port 0: a free one), until SIGTERM, SIGINT or cancellation.

    insecure: callers may use any name for this machine.  Raises ConfigError if nothing can listen there, or the server
    cannot be called as `server` says.
    """
    async with Upstream(server.address, api_key=server.api_key, tls=server.tls) as upstream:
        config = uvicorn.Config(
            make_app(upstream, any_host=insecure),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # streams last as long as jobs do; their readers resume
        )
        sock = _listening(listen)  # whoever reads the line below may call
        bound_host, bound_port = sock.getsockname()[:2]
        print(f"listening on http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}", flush=True)
        with sock:
            await uvicorn.Server(config).serve(sockets=[sock])


def _listening(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise ConfigError(f"nothing can listen at {listen}: {error.strerror}") from None


if __name__ == "__main__":
    main()
