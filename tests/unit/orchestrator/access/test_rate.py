from __future__ import annotations

import pytest

from orchestrator.access.rate import RateLimiter, host_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_is_free_and_then_one_comes_back_at_a_time() -> None:
    clock = Clock()
    limiter = RateLimiter(burst=3, per_s=0.5, clock=clock)
    assert [limiter.take("a") for _ in range(5)] == [0, 0, 0, 2, 2]
    clock.now_s = 1.5
    assert limiter.take("a") == 0.5, "who is refused pays nothing"
    clock.now_s = 2.0
    assert [limiter.take("a") for _ in range(2)] == [0, 2]
    clock.now_s = 1000.0
    assert [limiter.take("a") for _ in range(4)] == [0, 0, 0, 2], "no more than a full bucket comes back"


def test_names_have_buckets_of_their_own_and_only_the_last_ones_are_remembered() -> None:
    limiter = RateLimiter(burst=1, per_s=1, max_names=2, clock=Clock())
    assert [limiter.take(name) for name in ("a", "b", "a", "b")] == [0, 0, 1, 1]
    assert limiter.take("c") == 0
    assert (limiter.take("b"), limiter.take("a")) == (1, 0), "a was there longest ago"


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:51234", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:443", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:443", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:443", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:443", "10.0.0.7"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_a_host_is_an_address_or_the_network_that_it_may_choose_from(peer: str, host: str) -> None:
    assert host_of(peer) == host
