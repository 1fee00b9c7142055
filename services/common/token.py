"""The secret that the processes of one server share: each call to a worker carries it as a bearer token.

How it travels is `authentication.py`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence

from h3stream.errors import ConfigError

TOKEN_VARIABLE = "H3STREAM_WORKER_TOKEN"
"""Where a worker that is started by itself finds it: in the environment, which other users of a machine cannot read, as
they can a command line."""
HEADER = "authorization"
"""Key of a call's metadata that holds it."""
_ALPHABET = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")


def check_token(token: str) -> None:
    """Raises ConfigError, without the token, for one that cannot be sent or is guessed too easily."""
    if token and _ALPHABET.fullmatch(token) is None:
        raise ConfigError(
            "the workers' token cannot be used; it must be 16 to 256 letters, digits and signs of ._~+/=-, at random"
        )


def bearer(token: str) -> str:
    """What the metadata holds."""
    return f"Bearer {token}"


def carries(metadata: Sequence[tuple[str, str | bytes]] | None, token: str) -> bool:
    """Whether a call's metadata holds the token; takes the same time for every wrong one of its length."""
    expected = bearer(token).encode()
    found = [value for key, value in metadata or () if key == HEADER]
    return any(
        hmac.compare_digest(value if isinstance(value, bytes) else value.encode(errors="replace"), expected)
        for value in found
    )
