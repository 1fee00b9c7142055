"""TLS for callers: a certificate that is read again when its files change, and the authorities of callers' own."""

from __future__ import annotations

import logging
import os
import ssl
import stat
from pathlib import Path

import grpc

from h3stream.errors import ConfigError
from orchestrator.access.versions import FileVersion, file_version
from orchestrator.edge_settings import EdgeSettings

log = logging.getLogger(__name__)


def server_credentials(settings: EdgeSettings) -> grpc.ServerCredentials | None:
    """What the edge listens with; None: without TLS.

    Every handshake looks whether the files have changed. Raises ConfigError if they cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    certificates = _Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return grpc.dynamic_ssl_server_credentials(
        certificates.read(),
        certificates.read_if_changed,  # type: ignore[arg-type] # None is allowed: nothing has changed
        require_client_authentication=settings.tls_client_ca is not None,
    )


_Versions = tuple[FileVersion | None, ...]


class _Certificates:
    """The files of one certificate."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._versions: _Versions = ()
        """Of the files as they were last looked at."""

    def read(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold, checked by the library that would else fail every handshake. Raises ConfigError."""
        self._versions = self._versions_now()
        try:
            key = self._read_key()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # An encrypted key would have its password asked for on the terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
            authorities = None if self._client_ca is None else self._client_ca.read_bytes()
            configuration = grpc.ssl_server_certificate_configuration([(key, self._cert.read_bytes())], authorities)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            paths = ", ".join(str(path) for path in self._paths())
            raise ConfigError(f"tls_cert: the certificate cannot be used: {error} ({paths})") from error
        return configuration

    def read_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold, or None to go on with what there was: nothing has changed, or not to the better."""
        if self._versions_now() == self._versions:
            return None
        try:
            configuration = self.read()
        except ConfigError as error:
            # Certificate and key are replaced one after the other: they are tried again when the other one has changed.
            log.error("%s; the one before stays in use", error)
            return None
        log.info("certificate read again: %s", self._cert)
        return configuration

    def _read_key(self) -> bytes:
        with self._key.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & stat.S_IROTH:
                raise ValueError(f"every user may read the private key (mode {mode:04o}); run `chmod o-rwx` on it")
            return file.read()

    def _paths(self) -> list[Path]:
        return [path for path in (self._cert, self._key, self._client_ca) if path is not None]

    def _versions_now(self) -> _Versions:
        return tuple(file_version(path) for path in self._paths())
