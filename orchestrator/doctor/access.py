"""Who may call: the access file, the certificates and their keys, as far as files tell."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from h3stream.errors import ConfigError
from orchestrator.access.access_file import read_access_file
from orchestrator.doctor.certificates import validity_periods
from orchestrator.doctor.finding import Finding
from orchestrator.edge_settings import EdgeSettings
from services.common.listen import is_loopback

SOON = timedelta(days=30)
"""A certificate or key that expires within it is told of."""


def check_access(settings: EdgeSettings, listen: str, now: datetime) -> Iterator[Finding]:
    """Everything about who may call.

    listen: "HOST:PORT".  now: the time, with its zone.
    """
    yield _check_openness(settings, listen)
    if settings.keys is not None:
        yield check_keys(settings.keys, now)
    if settings.tls_cert is not None and settings.tls_key is not None:
        yield check_certificate("tls_cert", settings.tls_cert, now)
        yield check_private_key(settings.tls_cert, settings.tls_key)
    if settings.tls_client_ca is not None:
        yield check_certificate("tls_client_ca", settings.tls_client_ca, now)


def check_keys(path: Path, now: datetime) -> Finding:
    """The access file."""
    try:
        access = read_access_file(path)
        mode = stat.S_IMODE(path.stat().st_mode)
    except ConfigError as error:
        return Finding("keys", "fail", str(error), "mend the file (docs/access.md); `h3stream keys` writes valid ones")
    except OSError as error:
        return Finding("keys", "fail", f"{path}: {error.strerror}", "let the server's user read it")
    ending = [key for key in access.keys if key.expires is not None and key.expires - SOON < now]
    expired = [key.key_id for key in ending if key.expires is not None and key.expires <= now]
    told = f"{len(access.keys)} keys and {len(access.certificates)} certificates in {path}"
    if len(expired) == len(access.keys) and not access.certificates:
        return Finding("keys", "fail", f"{told}, none of them valid: nobody can call", "`h3stream keys add`")
    if ending:
        soon = [key.key_id for key in ending if key.key_id not in expired]
        groups = (("expired", expired), ("to expire within 30 days", soon))
        named = [f"{what}: {', '.join(ids)}" for what, ids in groups if ids]
        return Finding("keys", "warn", f"{told}; {'; '.join(named)}", "`h3stream keys rotate`, or revoke them")
    if mode & 0o007:
        return Finding("keys", "warn", f"{told}; every user may read it (mode {mode:04o})", f"`chmod o-rwx {path}`")
    return Finding("keys", "ok", told)


def check_certificate(name: str, path: Path, now: datetime) -> Finding:
    """The dates of all certificates in a PEM file.

    name: the setting.
    """
    try:
        periods = validity_periods(path.read_text(encoding="ascii"))
    except OSError as error:
        return Finding(name, "fail", f"{path}: {error.strerror}", "let the server's user read it")
    except ValueError as error:
        return Finding(name, "fail", f"{path}: {error}", "give a PEM file")
    if not periods:
        return Finding(name, "fail", f"{path} holds no certificate", "give a PEM file")
    first, last = max(period[0] for period in periods), min(period[1] for period in periods)
    told = f"{path} is valid from {first:%Y-%m-%d} until {last:%Y-%m-%d %H:%M} UTC"
    if now < first:
        return Finding(name, "fail", told, "wait until then, or set the clock if that is wrong")
    if now >= last:
        return Finding(name, "fail", f"{told}: it has expired", "renew it; a running server reads it again")
    if last - now < SOON:
        return Finding(name, "warn", told, "renew it; a running server reads it again")
    return Finding(name, "ok", told)


def check_private_key(certificate: Path, key: Path) -> Finding:
    """Whether a private key is the certificate's, and its owner's alone."""
    try:
        mode = stat.S_IMODE(key.stat().st_mode)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        return Finding(
            "tls_key", "fail", f"{key} does not go with {certificate}: {error.reason or error}",
            "give the key that the certificate was made for, without a password",
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return Finding("tls_key", "fail", f"{key}: {error}", "let the server's user read a key without a password")
    if mode & 0o007:
        return Finding("tls_key", "fail", f"every user may read {key} (mode {mode:04o})", f"`chmod 600 {key}`")
    return Finding("tls_key", "ok", f"{key} goes with the certificate")


def _check_openness(settings: EdgeSettings, listen: str) -> Finding:
    if is_loopback(listen.rpartition(":")[0]):
        told = "only this machine can call"
        return Finding("access", "ok", told if settings.authenticates else f"{told}, and everybody on it may")
    if not settings.authenticates:
        return Finding(
            "access", "warn", f"everybody who reaches {listen} may use the server and see all jobs",
            "give --keys or --tls-client-ca (docs/access.md), or listen on loopback behind something that asks",
        )  # fmt: skip
    if settings.tls_cert is None:
        return Finding(
            "access", "warn", f"keys travel to {listen} as they are: who sees the packets has them",
            "give --tls-cert and --tls-key, or let something in front end TLS on this machine",
        )  # fmt: skip
    return Finding("access", "ok", f"callers of {listen} are asked who they are, over TLS")


def _no_password() -> str:
    raise ValueError("it is locked with a password")
