"""The secret that the processes of one server share: each call to a worker carries it as a bearer token."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence
from typing import Any

from grpc import aio

from h3stream.errors import ConfigError

TOKEN_VARIABLE = "H3STREAM_WORKER_TOKEN"
"""Where a worker that is started by itself finds it: in the environment, which other users of a machine cannot read, as
they can a command line."""
_HEADER = "authorization"
_ALPHABET = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")


def check_token(token: str) -> None:
    """Raises ConfigError, without the token, for one that cannot be sent or is guessed too easily."""
    if token and _ALPHABET.fullmatch(token) is None:
        raise ConfigError(
            "the workers' token cannot be used; it must be 16 to 256 letters, digits and signs of ._~+/=-, at random"
        )


def carries(metadata: Sequence[tuple[str, str | bytes]] | None, token: str) -> bool:
    """Whether a call's metadata holds the token; takes the same time for every wrong one of its length."""
    expected = f"Bearer {token}".encode()
    found = [value for key, value in metadata or () if key == _HEADER]
    return any(
        hmac.compare_digest(value if isinstance(value, bytes) else value.encode(errors="replace"), expected)
        for value in found
    )


class TokenChannel(aio.Channel):
    """A channel whose calls all carry a token.

    It adds to a call's metadata and leaves the call itself alone: an interceptor of grpc.aio would put another one
    around it, which ends otherwise.
    """

    def __init__(self, channel: aio.Channel, token: str) -> None:
        """channel: what the calls go through; closed with this one."""
        self._channel = channel
        self._metadata = ((_HEADER, f"Bearer {token}"),)

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends the connection; running calls may take `grace` seconds to end."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> Any:
        """Of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        """Returns once the connection has another state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns once there is a connection."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """A method that takes a message and answers with one."""
        return self._carrying(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """A method that takes a message and answers with a stream."""
        return self._carrying(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """A method that takes a stream and answers with a message."""
        return self._carrying(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """A method that takes a stream and answers with one."""
        return self._carrying(self._channel.stream_stream(*args, **options))

    def _carrying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = (), **options: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), *self._metadata), **options)

        return call
