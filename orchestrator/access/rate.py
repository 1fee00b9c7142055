"""How often somebody may do something: a bucket of tokens each, for a bounded number of them."""

from __future__ import annotations

import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network

MAX_NAMES = 4096
"""Of those that are remembered; whoever was there longest ago is forgotten first, and begins with a full bucket."""


class RateLimiter:
    """Buckets by name."""

    def __init__(
        self, *, burst: int, per_s: float, max_names: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """burst: tokens in a full bucket.  per_s: tokens that come back in a second."""
        self._burst = burst
        self._per_s = per_s
        self._max_names = max_names
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens and when there were so many

    def take(self, name: str) -> float:
        """Takes a token; returns 0, or the seconds after which there is one if there is none now."""
        now_s = self._clock()
        tokens, since_s = self._buckets.pop(name, (float(self._burst), now_s))
        tokens = min(self._burst, tokens + (now_s - since_s) * self._per_s)
        wait_s = 0.0 if tokens >= 1 else (1 - tokens) / self._per_s
        self._buckets[name] = (tokens if wait_s else tokens - 1, now_s)
        if len(self._buckets) > self._max_names:
            self._buckets.popitem(last=False)
        return wait_s


def host_of(peer: str) -> str:
    """Who is limited for a peer as gRPC names it: an IPv4 address, or the /64 network of an IPv6 one, of which a host
    may choose addresses as it likes."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv6":
        with suppress(ValueError):
            address = IPv6Address(host)
            return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))
    return host or kind
