"""The settings of the edge: what two deployments may set differently of the process that callers reach."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from h3stream.errors import ConfigError
from services.common.logs import LOG_FORMATS


@dataclass(frozen=True)
class EdgeSettings:
    """Paths and names alone: they travel as arguments, which everybody on the machine can read."""

    keys: Path | None = None
    """File of the API keys, client certificates and tenants (docs/access.md), read again when it changes; every caller
    must then be one of them. None: callers are not authenticated."""
    tls_cert: Path | None = None
    """PEM file of the certificate to show callers, followed by those that lead to its root. None: no TLS."""
    tls_key: Path | None = None
    """PEM file of its private key."""
    tls_client_ca: Path | None = None
    """PEM file of the authorities whose certificates callers must show. None: callers need no certificate."""
    audit: Path | None = None
    """File that says who called what. None: nothing is written down."""
    log_format: str = "text"
    """How the log is written: "text", or "json", an object on each line."""

    def __post_init__(self) -> None:
        for name in ("keys", "tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}: {path} is no file")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_key", "tls_cert") if self.tls_key is None else ("tls_cert", "tls_key")
            raise ConfigError(f"{given} is set without {missing}; TLS needs both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca is set without tls_cert and tls_key; callers show certificates over TLS")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format is {self.log_format!r}; it must be one of {LOG_FORMATS}")

    @property
    def authenticates(self) -> bool:
        """Whether callers must show who they are."""
        return self.keys is not None or self.tls_client_ca is not None
