"""Who a client is to a server, and how it knows the server: an API key and TLS."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from h3stream.errors import ConfigError

log = logging.getLogger(__name__)

FilePath = str | os.PathLike[str]
SYSTEM_BUNDLE = "ca-certificates.crt"
"""Name under which distributions keep the certificates that they trust in one file."""


@dataclass(frozen=True)
class TlsOptions:
    """How a connection is encrypted; all files are in PEM form.

    Raises ConfigError for a certificate without its key, and the other way round.
    """

    ca: FilePath | None = None
    """Certificates that are trusted to vouch for the server; None: those that the system trusts."""
    cert: FilePath | None = None
    """The client's own certificate with its chain, for a server that asks for one."""
    key: FilePath | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise ConfigError(f"TLS {given} is given and TLS {missing} is not: give both, or neither")


Tls = TlsOptions | Literal[True] | None
"""How a server is connected to: with these options, with the system's certificates, or without TLS."""


def call_metadata(api_key: str | None, address: str, tls: Tls) -> tuple[tuple[str, str], ...]:
    """What every call carries; warns once where a key would go unencrypted beyond this machine.

    Raises ConfigError, which does not hold the key, for one that no call can carry.
    """
    if api_key is None:
        return ()
    if not api_key or not all("!" <= character <= "~" for character in api_key):
        raise ConfigError("the API key is empty or holds a space, a line break or a character beyond ASCII")
    if tls is None and not is_local(address):
        _warn_of_plain_key(address)
    return (("authorization", f"Bearer {api_key}"),)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """What a channel is made with; None for one without TLS. Raises ConfigError for a file that cannot be read."""
    if tls is None:
        return None
    options = TlsOptions() if tls is True else tls
    ca = system_certificates() if options.ca is None else options.ca
    return grpc.ssl_channel_credentials(
        root_certificates=_read("ca", ca),
        private_key=_read("key", options.key),
        certificate_chain=_read("cert", options.cert),
    )


def system_certificates() -> Path | None:
    """The file of certificates that the system trusts; None where it has none, and gRPC's own are used."""
    paths = ssl.get_default_verify_paths()
    candidates = [paths.cafile, paths.capath and os.path.join(paths.capath, SYSTEM_BUNDLE)]
    return next((Path(path) for path in candidates if path and os.path.isfile(path)), None)


def is_local(address: str) -> bool:
    """Whether what is sent to an address stays on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.cache
def _warn_of_plain_key(address: str) -> None:
    log.warning("the API key goes to %s unencrypted: anybody on the way can read it; use TLS", address)


def _read(what: str, path: FilePath | None) -> bytes | None:
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS {what} {os.fspath(path)} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"TLS {what} {os.fspath(path)} is no PEM file: nothing in it begins with -----BEGIN")
    return data
