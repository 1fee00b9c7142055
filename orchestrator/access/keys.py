"""What API keys look like: `h3s_ID_SECRET`. Of the secret only its hash is ever kept.

A secret is 256 random bits, so that a plain hash of it tells nothing and needs neither salt nor stretching.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

PREFIX = "h3s_"
"""What every key begins with, so that scanners for leaked secrets know one."""
ID_PATTERN = "[a-z0-9-]{1,32}"
_SECRET_BYTES = 32
_KEY = re.compile(f"{PREFIX}({ID_PATTERN})_([A-Za-z0-9_-]{{43}})")


class KeyParts(NamedTuple):
    """What a key says."""

    key_id: str
    """Its name, which is no secret."""
    sha256: str
    """SHA-256 of its secret in hexadecimal."""


def new_key_id() -> str:
    """A name for a key that has none."""
    return secrets.token_hex(4)


def make_key(key_id: str) -> str:
    """A new key of that name."""
    return f"{PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def read_key(text: str) -> KeyParts | None:
    """What a key says; None for what is no key."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    key_id, secret = found.groups()
    return KeyParts(key_id, hashlib.sha256(secret.encode()).hexdigest())
