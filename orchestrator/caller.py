"""Who calls: decided by the edge, which alone hears callers, and carried to the core in the metadata of every call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from h3stream.errors import PermissionDeniedError

Scope = Literal["generate", "read_own", "read_all", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""What a key may allow: make, cancel and delete its tenant's jobs; see them; see those of all tenants; all of that, and
cancel and delete those of all tenants."""
_IMPLIED: dict[Scope, tuple[Scope, ...]] = {
    "generate": ("generate", "read_own"),
    "read_own": ("read_own",),
    "read_all": ("read_own", "read_all"),
    "admin": SCOPES,
}

METADATA_PREFIX = "x-h3stream-"
"""Of metadata that the edge writes: of what callers send it hands on nothing."""
TENANT_KEY, SCOPES_KEY, KEY_ID_KEY, REQUEST_ID_KEY = (
    METADATA_PREFIX + name for name in ("tenant", "scopes", "key-id", "request-id")
)

DEFAULT_TENANT = "default"
"""Of all callers where they are not authenticated."""


@dataclass(frozen=True)
class Caller:
    """Who calls, and what it may do."""

    tenant: str = DEFAULT_TENANT
    """The tenant whose jobs it makes."""
    scopes: frozenset[Scope] = frozenset(SCOPES)
    """What it may do, what is implied included."""
    key_id: str = ""
    """Name of its key; empty where callers are not authenticated."""
    request_id: str = ""
    """Name of the call, for logs."""

    def require(self, scope: Scope) -> None:
        """Raises PermissionDeniedError unless the caller may do that."""
        if scope not in self.scopes:
            held = ", ".join(sorted(self.scopes)) or "nothing"
            raise PermissionDeniedError(f"that needs a key with the scope {scope}; this one allows {held}")

    def may_see(self, tenant: str) -> bool:
        """Whether it may know of a tenant's jobs."""
        return "read_all" in self.scopes or ("read_own" in self.scopes and tenant == self.tenant)

    def may_change(self, tenant: str) -> bool:
        """Whether it may cancel and delete a tenant's jobs."""
        return "admin" in self.scopes or ("generate" in self.scopes and tenant == self.tenant)

    def metadata(self) -> list[tuple[str, str]]:
        """What tells the core."""
        return [
            (TENANT_KEY, self.tenant),
            (SCOPES_KEY, ",".join(sorted(self.scopes))),
            (KEY_ID_KEY, self.key_id),
            (REQUEST_ID_KEY, self.request_id),
        ]


def with_implied(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Scopes with those that they imply."""
    return frozenset(implied for scope in scopes for implied in _IMPLIED[scope])


def caller_of(context: Any) -> Caller:
    """Who makes a call to the core, as the edge tells it; without its word, one who may do all."""
    told = {key: value for key, value in context.invocation_metadata() or () if key.startswith(METADATA_PREFIX)}
    if TENANT_KEY not in told:
        return Caller(request_id=told.get(REQUEST_ID_KEY, ""))
    return Caller(
        tenant=told[TENANT_KEY],
        scopes=frozenset(scope for scope in SCOPES if scope in told.get(SCOPES_KEY, "").split(",")),
        key_id=told.get(KEY_ID_KEY, ""),
        request_id=told.get(REQUEST_ID_KEY, ""),
    )
