from __future__ import annotations

from orchestrator.access.rate import RateLimiter


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
