from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.fair_queue import FairQueue

LOW, NORMAL, HIGH = 1, 2, 3
TENANTS = "abc"
COSTS = st.sampled_from([22, 39, 362])
PUSHES = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(LOW, HIGH), COSTS), max_size=40)


def filled(pushes: list[tuple[str, int, int]], weights: dict[str, float] | None = None) -> FairQueue[int]:
    """A queue of the items 0, 1, 2, ..."""
    queue: FairQueue[int] = FairQueue()
    for item, (tenant, priority, cost) in enumerate(pushes):
        queue.push(item, tenant=tenant, priority=priority, cost=cost, weight=(weights or {}).get(tenant, 1.0))
    return queue


def popped(queue: FairQueue[int]) -> list[int]:
    items = []
    while (item := queue.pop()) is not None:
        items.append(item)
    return items


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    assert popped(filled([("a", NORMAL, 22)] * 5)) == [0, 1, 2, 3, 4]


def test_an_empty_queue_has_nothing_to_pop() -> None:
    queue = filled([])
    assert queue.pop() is None
    assert len(queue) == 0
    assert not queue.remove(7)


def test_priority_goes_before_arrival_inside_a_tenant() -> None:
    pushes = [("a", priority, 22) for priority in (LOW, NORMAL, HIGH, NORMAL, HIGH, LOW)]
    assert popped(filled(pushes)) == [2, 4, 1, 3, 0, 5]


def test_a_priority_is_nothing_to_another_tenant() -> None:
    assert popped(filled([("a", LOW, 22), ("b", HIGH, 22), ("b", HIGH, 22), ("a", LOW, 22)])) == [0, 1, 3, 2]


def test_one_who_comes_late_does_not_wait_behind_all_that_another_has_queued() -> None:
    queue = filled([("a", HIGH, 39)] * 100)
    first = queue.pop()
    queue.push(100, tenant="b", priority=LOW, cost=39)
    assert first == 0
    assert queue.pop() == 100


def test_the_larger_weight_gets_the_larger_share() -> None:
    queue = filled([("a", NORMAL, 22), ("b", NORMAL, 22)] * 40, {"a": 3.0, "b": 1.0})
    first = popped(queue)[:40]
    assert sum(item % 2 == 0 for item in first) == pytest.approx(30, abs=1)


def test_an_idle_tenant_saves_up_nothing() -> None:
    queue = filled([("a", NORMAL, 22)] * 30)
    for _ in range(20):
        queue.pop()
    for item in range(100, 110):
        queue.push(item, tenant="b", priority=NORMAL, cost=22)
    order = popped(queue)[:10]
    assert sum(item >= 100 for item in order) == 5


def test_a_tenant_that_may_not_run_waits_without_saving_up() -> None:
    queue = filled([("a", NORMAL, 22), ("b", NORMAL, 22)] * 20)
    assert [queue.pop(lambda tenant: tenant == "b") for _ in range(10)] == list(range(1, 20, 2))
    order = popped(queue)[:10]
    assert sum(item % 2 == 0 for item in order) == pytest.approx(5, abs=1)


def test_nothing_is_popped_where_nobody_may_run_and_nothing_changes() -> None:
    queue = filled([("a", NORMAL, 22), ("b", NORMAL, 22), ("a", HIGH, 22)])
    before = list(queue.positions())
    assert queue.pop(lambda tenant: False) is None
    assert list(queue.positions()) == before


def test_nothing_changes_where_it_cannot_be_told_who_may_run() -> None:
    queue = filled([("a", NORMAL, 22), ("b", NORMAL, 22), ("a", HIGH, 22)])
    before = list(queue.positions())

    def only_a_can_be_told(tenant: str) -> bool:
        if tenant == "b":
            raise OSError("no")
        return False

    with pytest.raises(OSError, match="no"):
        queue.pop(only_a_can_be_told)
    assert list(queue.positions()) == before
    assert popped(queue) == [item for item, _ in before]


def test_an_item_waits_once() -> None:
    queue = filled([("a", NORMAL, 22)])
    with pytest.raises(AssertionError, match="waits already"):
        queue.push(0, tenant="b", priority=LOW, cost=1)


def test_what_is_removed_neither_runs_nor_counts() -> None:
    queue = filled([("a", NORMAL, 22), ("b", NORMAL, 22), ("a", NORMAL, 22)])
    assert queue.remove(0)
    assert not queue.remove(0)
    assert (len(queue), queue.num_of("a"), queue.num_of("b"), queue.num_of("c")) == (2, 1, 1, 0)
    assert 0 not in queue
    assert popped(queue) == [2, 1]


def test_one_who_only_removes_pays_nothing() -> None:
    queue = filled([("a", NORMAL, 22)] * 4)
    for item in range(100, 120):
        queue.push(item, tenant="b", priority=NORMAL, cost=362)
        queue.remove(item)
    queue.push(120, tenant="b", priority=NORMAL, cost=362)
    assert [queue.pop(), queue.pop()] == [0, 120]


@given(PUSHES, st.data())
def test_positions_are_the_order_of_pops(pushes: list[tuple[str, int, int]], data: st.DataObject) -> None:
    queue = filled(pushes, {"b": 2.5})
    for _ in range(data.draw(st.integers(0, len(pushes)))):
        queue.pop()
    for item in data.draw(st.sets(st.integers(0, 40))):
        queue.remove(item)
    positions = list(queue.positions())
    assert [num_ahead for _, num_ahead in positions] == list(range(len(queue)))
    assert [item for item, _ in positions] == popped(queue)


@given(PUSHES)
def test_everything_is_popped_once(pushes: list[tuple[str, int, int]]) -> None:
    queue = filled(pushes)
    assert sum(queue.num_of(tenant) for tenant in TENANTS) == len(queue) == len(pushes)
    assert sorted(popped(queue)) == list(range(len(pushes)))
    assert len(queue) == 0


@given(PUSHES)
def test_priority_then_arrival_inside_every_tenant(pushes: list[tuple[str, int, int]]) -> None:
    order = popped(filled(pushes))
    for tenant in TENANTS:
        own = [item for item in order if pushes[item][0] == tenant]
        assert own == sorted(own, key=lambda item: (-pushes[item][1], item))


@given(
    st.lists(st.tuples(st.integers(LOW, HIGH), COSTS), min_size=30, max_size=30),
    st.lists(st.tuples(st.integers(LOW, HIGH), COSTS), min_size=30, max_size=30),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.integers(0, 20),
)
def test_neither_of_two_that_wait_gets_ahead_by_more_than_one_item_of_each(
    of_a: list[tuple[int, int]], of_b: list[tuple[int, int]], weight: float, num_alone: int
) -> None:
    """The bound of start-time fair queueing, over every stretch in which both wait; b comes while a is being served."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for index, (priority, cost) in enumerate(of_a):
        queue.push(("a", index), tenant="a", priority=priority, cost=cost, weight=weight)
    for _ in range(num_alone):
        queue.pop()
    for index, (priority, cost) in enumerate(of_b):
        queue.push(("b", index), tenant="b", priority=priority, cost=cost)
    lead, leads = 0.0, [0.0]
    while queue.num_of("a") and queue.num_of("b"):
        item = queue.pop()
        assert item is not None
        tenant, index = item
        lead += of_a[index][1] / weight if tenant == "a" else -of_b[index][1]
        leads.append(lead)
    largest = max(cost for _, cost in of_a) / weight + max(cost for _, cost in of_b)
    assert max(leads) - min(leads) <= largest * (1 + 1e-9)


@given(st.integers(2, 8), COSTS, st.integers(1, 30))
def test_nobody_starves_however_many_keep_pushing(num_others: int, cost: int, num_before: int) -> None:
    """A tenant that waits is served before any other has had two more turns of equal cost than it."""
    queue: FairQueue[int] = FairQueue()
    items = itertools.count()
    for _ in range(num_before):
        for other in range(num_others):
            queue.push(next(items), tenant=f"other {other}", priority=HIGH, cost=cost)
    queue.push(-1, tenant="late", priority=LOW, cost=cost)
    for _ in range(num_others + 1):
        if queue.pop() == -1:
            return
        queue.push(next(items), tenant="other 0", priority=HIGH, cost=cost)
    pytest.fail("the tenant has not had its turn")


def test_pushing_and_popping_look_at_few_tenants_however_many_items_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons, counted: a queue that is 100 times as long costs about as many."""
    from core.fair_queue import _Tenant

    counts = {}
    compare = _Tenant.__lt__
    for num_tenants in (10, 1000):
        queue = filled([(f"tenant {item}", NORMAL, 22) for item in range(num_tenants)])
        num = itertools.count()

        def counted(self: _Tenant[int], other: _Tenant[int], num: itertools.count[int] = num) -> bool:
            next(num)
            return compare(self, other)

        monkeypatch.setattr(_Tenant, "__lt__", counted)
        for item in range(100):
            queue.push(10_000 + item, tenant=f"tenant {item % 10}", priority=HIGH, cost=22)
            queue.pop()
        counts[num_tenants] = next(num)
    assert counts[1000] < 4 * counts[10]
