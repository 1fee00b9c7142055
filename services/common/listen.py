"""Which addresses a process may listen on while its callers are not authenticated."""

from __future__ import annotations

import ipaddress

from h3stream.errors import ConfigError


def check_tcp_address(listen: str, *, insecure: bool, remedy: str = "") -> None:
    """Raises ConfigError unless `listen` is HOST:PORT on loopback, or anywhere if `insecure`.

    remedy: how callers could be authenticated, for the message.
    """
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"listen is {listen!r}; it must be HOST:PORT, e.g. 127.0.0.1:50051")
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"listen is {listen!r}: callers are not authenticated, so only loopback addresses are served; "
            f"{remedy and remedy + ', or '}set insecure to listen beyond loopback all the same"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
