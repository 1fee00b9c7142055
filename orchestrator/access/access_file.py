"""The access file: keys, client certificates and tenants, read from JSON or TOML and written as JSON.

Everything in it is checked: a misspelt field or scope would open or close a door that nobody meant.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import re
import stat
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from h3stream.errors import ConfigError
from h3stream.job import TenantLimits
from orchestrator.access.keys import ID_PATTERN
from orchestrator.caller import SCOPES, Scope

TENANT_PATTERN = "[A-Za-z0-9._-]{1,64}"
_LIMITS = tuple(limit.name for limit in fields(TenantLimits))
_MOST = {"max_running_jobs": 2**31 - 1, "max_queued_jobs": 2**31 - 1}
"""Largest limits, as the wire has room for them; of the others 2**63 - 1."""


@dataclass(frozen=True)
class Key:
    """An API key without its secret."""

    key_id: str
    """Its name."""
    tenant: str
    """The tenant that its jobs belong to."""
    scopes: tuple[Scope, ...]
    """What it allows."""
    sha256: str
    """SHA-256 of its secret in hexadecimal."""
    created: datetime
    """When it was made."""
    expires: datetime | None = None
    """From when it is no longer valid; None: never."""
    note: str = ""
    """What it is for."""


@dataclass(frozen=True)
class Certificate:
    """A client certificate that stands for a key."""

    name: str
    """Its common name, or one of its alternative names."""
    tenant: str
    """The tenant that its jobs belong to."""
    scopes: tuple[Scope, ...]
    """What it allows."""


@dataclass(frozen=True)
class Tenant:
    """What a tenant may have."""

    weight: float = 1.0
    """Its share of the lanes, against those of others."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    """What it may have at a time."""


@dataclass(frozen=True)
class AccessFile:
    """All that an access file says."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """Tenants that have limits or a weight, by name; others have none."""
    keys: tuple[Key, ...] = ()
    """The keys."""
    certificates: tuple[Certificate, ...] = ()
    """The client certificates."""


def read_access_file(path: Path) -> AccessFile:
    """What an access file says. Raises ConfigError, saying where it is wrong, and if others may write to it."""
    try:
        with path.open("rb") as file:
            _check_writers(path, os.fstat(file.fileno()))
            text = file.read().decode()
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once_each)
    except OSError as error:
        raise ConfigError(f"access file {path}: {error.strerror}") from error
    except ValueError as error:  # no JSON, no TOML, or no UTF-8; the file holds no secrets that the words could tell
        raise ConfigError(f"access file {path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"access file {path}: it is nested deeper than any such file") from error
    try:
        return _parse(content)
    except ConfigError as error:
        raise ConfigError(f"access file {path}: {error}") from None


@contextmanager
def access_file_lock(path: Path) -> Iterator[None]:
    """Keeps others who hold it from changing the file. Raises ConfigError."""
    try:
        directory = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"access file {path}: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def write_access_file(path: Path, access: AccessFile) -> None:
    """Replaces the file at once, keeping its owner and permissions; a new one is its owner's alone.

    Raises ConfigError for TOML, whose comments would be lost, and if it cannot be written.
    """
    if path.suffix == ".toml":
        raise ConfigError(f"access file {path}: TOML is changed by hand, so that its comments stay; JSON is by command")
    path = path.resolve()  # what a link leads to is replaced, not the link
    content = json.dumps(_to_json(access), indent=2, ensure_ascii=False) + "\n"
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # its owner's alone
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                if path.exists():
                    before = path.stat()
                    os.fchown(fd, before.st_uid, before.st_gid)
                    os.fchmod(fd, stat.S_IMODE(before.st_mode))
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"access file {path} cannot be written: {error.strerror}") from error


def check_tenant(name: str) -> str:
    """The name of a tenant, which calls carry in their metadata. Raises ConfigError for what can be none."""
    if not re.fullmatch(TENANT_PATTERN, name):
        raise ConfigError(f"tenant {name!r}: a tenant's name is 1 to 64 letters, digits, dots, hyphens and underscores")
    return name


def check_key_id(key_id: str) -> str:
    """The name of a key. Raises ConfigError for what can be none."""
    if not re.fullmatch(ID_PATTERN, key_id):
        raise ConfigError(f"id {key_id!r}: a key's id is 1 to 32 lower-case letters, digits and hyphens")
    return key_id


def _check_writers(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"access file {path} can be written by others than its owner (mode {stat.S_IMODE(status.st_mode):04o}), "
            "who could give themselves a key; run `chmod go-w` on it"
        )


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a JSON object, none of which may be there twice, as in TOML."""
    (name, count), *_ = Counter(name for name, _ in pairs).most_common(1) or [("", 0)]
    if count > 1:
        raise ValueError(f"the field {name!r} is there twice in one place")
    return dict(pairs)


def _parse(content: Any) -> AccessFile:
    top = _known_fields("it", content, (), ("tenants", "keys", "certificates"))
    tenants = top.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ConfigError("tenants is no table of names")
    keys = tuple(_key(f"keys[{i}]", entry) for i, entry in enumerate(_entries(top, "keys")))
    certificates = tuple(
        _certificate(f"certificates[{i}]", entry) for i, entry in enumerate(_entries(top, "certificates"))
    )
    for kind, names in (("id", [key.key_id for key in keys]), ("name", [entry.name for entry in certificates])):
        (name, count), *_ = Counter(names).most_common(1) or [("", 0)]
        if count > 1:
            raise ConfigError(f"the {kind} {name!r} is there twice")
    return AccessFile({check_tenant(name): _tenant(name, entry) for name, entry in tenants.items()}, keys, certificates)


def _entries(top: dict[str, Any], name: str) -> Sequence[Any]:
    entries = top.get(name, [])
    if not isinstance(entries, list):
        raise ConfigError(f"{name} is no list")
    return entries


def _tenant(name: str, entry: Any) -> Tenant:
    where = f"tenant {name!r}"
    values = _known_fields(where, entry, (), ("weight", *_LIMITS))
    weight = values.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= sys.float_info.max:
        raise ConfigError(f"{where}: weight is {weight!r}; it must be a number above 0")
    limits = {limit: values[limit] for limit in _LIMITS if limit in values}
    for limit, value in limits.items():
        most = _MOST.get(limit, 2**63 - 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ConfigError(f"{where}: {limit} is {value!r}; it must be a whole number from 0 (no limit) to {most}")
    return Tenant(float(weight), TenantLimits(**limits))


def _key(where: str, entry: Any) -> Key:
    values = _known_fields(where, entry, ("id", "tenant", "scopes", "sha256", "created"), ("expires", "note"))
    sha256 = _text(where, "sha256", values["sha256"])
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits in lower case: the hash of the key's secret")
    expires = values.get("expires")
    return Key(
        key_id=check_key_id(_text(where, "id", values["id"])),
        tenant=check_tenant(_text(where, "tenant", values["tenant"])),
        scopes=_scopes(where, values["scopes"]),
        sha256=sha256,
        created=_time(where, "created", values["created"]),
        expires=None if expires is None else _time(where, "expires", expires),
        note=_text(where, "note", values.get("note", "")),
    )


def _certificate(where: str, entry: Any) -> Certificate:
    values = _known_fields(where, entry, ("name", "tenant", "scopes"), ())
    name = _text(where, "name", values["name"])
    if not name:
        raise ConfigError(f"{where}: name is empty")
    tenant = check_tenant(_text(where, "tenant", values["tenant"]))
    return Certificate(name, tenant, _scopes(where, values["scopes"]))


def _known_fields(where: str, entry: Any, required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no table of fields")
    known = (*required, *optional)
    for name in entry:
        if name not in known:
            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ConfigError(f"{where}: there is no field {name!r}; the nearest is {nearest!r}")
    if missing := [name for name in required if name not in entry]:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    return entry


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a text")
    return value


def _scopes(where: str, value: Any) -> tuple[Scope, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: scopes is {value!r}; it must be a list of at least one of {list(SCOPES)}")
    for scope in value:
        if scope not in SCOPES:
            raise ConfigError(f"{where}: there is no scope {scope!r}; there are {list(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in value)


def _time(where: str, name: str, value: Any) -> datetime:
    try:
        time = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (TypeError, ValueError):
        pass
    except OverflowError:
        raise ConfigError(
            f"{where}: {name} is {str(value)!r}, which is beyond the years 1 to 9999 in UTC; "
            "a key without expires never expires"
        ) from None
    raise ConfigError(f"{where}: {name} is {str(value)!r}; it must be a time with its zone: 2027-01-31T00:00:00Z")


def _to_json(access: AccessFile) -> dict[str, Any]:
    return {
        "tenants": {name: _tenant_json(tenant) for name, tenant in access.tenants.items()},
        "keys": [_key_json(key) for key in access.keys],
        "certificates": [
            {"name": entry.name, "tenant": entry.tenant, "scopes": list(entry.scopes)} for entry in access.certificates
        ],
    }


def _tenant_json(tenant: Tenant) -> dict[str, Any]:
    limits = {limit: getattr(tenant.limits, limit) for limit in _LIMITS}
    return {"weight": tenant.weight, **{limit: value for limit, value in limits.items() if value}}


def _key_json(key: Key) -> dict[str, Any]:
    values = {
        "id": key.key_id,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "sha256": key.sha256,
        "created": _time_text(key.created),
        "expires": None if key.expires is None else _time_text(key.expires),
        "note": key.note,
    }
    return {name: value for name, value in values.items() if value not in (None, "")}


def _time_text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
