"""Who a caller is, by the access file, which is read again when it changes."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from h3stream.errors import ConfigError, UnauthenticatedError
from h3stream.job import TenantLimits
from orchestrator.access.access_file import AccessFile, Key, Tenant, read_access_file
from orchestrator.access.keys import KeyParts, read_key
from orchestrator.access.versions import file_version
from orchestrator.caller import Caller, with_implied

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""How often it is looked whether the file has changed, at most."""
_NO_HASH = "0" * 64


class AccessStore:
    """The callers and tenants of one access file, or of none."""

    def __init__(
        self,
        path: Path | None,
        *,
        needs_certificate: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file.

        path: None: everybody is the default tenant and may do all.  needs_certificate: TLS lets nobody in without a
        certificate, so without a file its name is told of such a caller.  Raises ConfigError.
        """
        self._path = path
        self._needs_certificate = needs_certificate
        self._clock = clock
        self._wall_clock = wall_clock
        self._checked_s = clock()
        self._version = None if path is None else file_version(path)
        self._take(AccessFile() if path is None else read_access_file(path))

    @property
    def authenticates(self) -> bool:
        """Whether callers must show who they are."""
        return self._path is not None or self._needs_certificate

    def identify(self, authorization: Sequence[str], certificate_names: Sequence[str] = ()) -> Caller:
        """Who shows this.

        authorization: every value of that metadata.  certificate_names: of the client certificate that TLS has checked,
        its common and alternative names.  A key counts before a certificate.  Raises UnauthenticatedError.
        """
        if self._path is None:
            return Caller(key_id=_certificate_id(certificate_names[0]) if certificate_names else "")
        self._reload()
        if authorization:
            return self._key_caller(_bearer(authorization))
        for name in certificate_names:
            if name in self._certificates:
                entry = self._certificates[name]
                return Caller(entry.tenant, with_implied(entry.scopes), _certificate_id(name))
        if certificate_names:
            raise UnauthenticatedError(
                f"the certificate of {certificate_names[0]!r} is no caller of this server, and there is no key"
            )
        raise UnauthenticatedError("this server needs a key: send the metadata `authorization: Bearer KEY`")

    def limits(self, tenant: str) -> TenantLimits:
        """What a tenant may have at a time."""
        return self._tenant(tenant).limits

    def weight(self, tenant: str) -> float:
        """A tenant's share of the lanes, against those of others."""
        return self._tenant(tenant).weight

    def num_tenants(self) -> int:
        """Tenants that the file names; 1 without a file."""
        self._reload()
        return max(1, self._num_tenants)

    def _tenant(self, name: str) -> Tenant:
        self._reload()
        return self._tenants.get(name, Tenant())

    def _key_caller(self, parts: KeyParts) -> Caller:
        key = self._keys.get(parts.key_id)
        # Compared in any case, so that the time tells nothing of which ids there are.
        if not hmac.compare_digest(parts.sha256, _NO_HASH if key is None else key.sha256) or key is None:
            raise UnauthenticatedError(
                "the key is not valid: there is none of that id and secret, or it has been revoked"
            )
        if key.expires is not None and key.expires.timestamp() <= self._wall_clock():
            raise UnauthenticatedError(f"the key {key.key_id} has expired: {key.expires:%Y-%m-%d %H:%M:%S} UTC")
        return Caller(key.tenant, with_implied(key.scopes), key.key_id)

    def _reload(self) -> None:
        """Takes the file as it is now, if it has changed; one that is broken changes nothing, which is logged."""
        now_s = self._clock()
        if self._path is None or now_s - self._checked_s < CHECK_S:
            return
        self._checked_s = now_s
        version = file_version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._take(read_access_file(self._path))
        except ConfigError as error:
            log.error("%s; what it said before stays in force", error)
            return
        except Exception:  # a mistake of ours: callers must not find the door shut by it, nor it stay unseen
            log.exception("access file %s cannot be taken; what it said before stays in force", self._path)
            return
        log.info("access file read again: %d keys, %d certificates", len(self._keys), len(self._certificates))

    def _take(self, access: AccessFile) -> None:
        self._keys: dict[str, Key] = {key.key_id: key for key in access.keys}
        self._certificates = {entry.name: entry for entry in access.certificates}
        self._tenants = access.tenants
        named = {key.tenant for key in access.keys} | {entry.tenant for entry in access.certificates}
        self._num_tenants = len(named | access.tenants.keys())


def _certificate_id(name: str) -> str:
    """What calls under a certificate are called in place of a key's name; what metadata cannot carry is left out."""
    return "cert:" + "".join(sign if sign.isascii() and sign.isprintable() else "?" for sign in name)


def _bearer(authorization: Sequence[str]) -> KeyParts:
    scheme, _, credentials = authorization[0].partition(" ")
    parts = read_key(credentials.strip()) if scheme.lower() == "bearer" and len(authorization) == 1 else None
    if parts is None:
        raise UnauthenticatedError("the metadata `authorization` must be `Bearer KEY` once, with a key h3s_ID_SECRET")
    return parts
