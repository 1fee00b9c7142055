"""Certificates for tests of TLS, made anew by the `openssl` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in PEM form."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority of its own, in a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self.certificate = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
        self._run("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", *self._files(self.certificate))

    @property
    def cert(self) -> Path:
        """What vouches for all that it has issued."""
        return self.certificate.cert

    def issue(self, name: str) -> Certificate:
        """A certificate of that name, for a server of this machine or for a client."""
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        request, names = self._directory / f"{name}.csr", self._directory / f"{name}.names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        self._run("req", *_KEY, "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request))
        self._run(
            *("x509", "-req", "-days", "2", "-in", str(request), "-out", str(made.cert), "-extfile", str(names)),
            *("-CA", str(self.certificate.cert), "-CAkey", str(self.certificate.key), "-CAcreateserial"),
        )
        return made

    def _files(self, made: Certificate) -> tuple[str, ...]:
        return ("-keyout", str(made.key), "-out", str(made.cert))

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self._directory)
