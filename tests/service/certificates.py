"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """One that signs certificates; its own is at `cert`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self.cert, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl("req", "-x509", *_CURVE, "-keyout", self._key, "-out", self.cert, "-days", "2", "-subj", f"/CN={name}")

    def issue(self, name: str, *alternative_names: str) -> tuple[Path, Path]:
        """Files of a certificate and its key, which its owner alone may read.

        alternative_names: as openssl writes them, such as "DNS:localhost".
        """
        cert, key, request, extensions = (self._directory / f"{name}.{kind}" for kind in ("pem", "key", "csr", "ext"))
        extensions.write_text(f"subjectAltName={','.join(alternative_names)}" if alternative_names else "")
        _openssl("req", *_CURVE, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, "-out", cert, *signing)
        key.chmod(0o600)
        return cert, key


def encrypt(key: Path, password: str) -> None:
    """Puts a private key behind a password."""
    _openssl("ec", "-in", key, "-aes256", "-passout", f"pass:{password}", "-out", key.with_suffix(".enc"))
    key.with_suffix(".enc").replace(key)
    key.chmod(0o600)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
