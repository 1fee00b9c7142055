"""Who is next: tenants take turns by the cost of what they ran, and a tenant's own items by priority, then arrival.

Start-time fair queueing. Every tenant has a start tag: the virtual time at which its next item begins. The smallest is
next; what an item costs, over its tenant's weight, moves its tenant's tag on. The queue's own time is the tag of what
was taken last, and no waiting tenant's tag is behind it: who was away, or may run nothing now, saves up nothing. So of
two tenants that wait all the time, neither gets ahead of its share by more than one item of each.

Source: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", IEEE/ACM Transactions on Networking 5(5), 1997.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass
class _Tenant(Generic[T]):
    """A tenant that waits, or whose last item still counts against it."""

    name: str
    start: float
    """Virtual time at which its next item begins."""
    turn: int
    """Of those with equal tags, who got it first is next."""
    waiting: dict[int, OrderedDict[T, float]] = field(default_factory=dict)
    """By priority: its items in order of arrival, each with the virtual time that it takes."""

    def __lt__(self, other: _Tenant[T]) -> bool:
        return (self.start, self.turn) < (other.start, other.turn)

    def __len__(self) -> int:
        return sum(len(items) for items in self.waiting.values())

    def in_order(self) -> Iterator[tuple[T, float]]:
        """Its items in the order in which they are next."""
        for priority in sorted(self.waiting, reverse=True):
            yield from self.waiting[priority].items()

    def take(self) -> tuple[T, float]:
        """Its next item, which no longer waits."""
        priority = max(self.waiting)
        item, duration = self.waiting[priority].popitem(last=False)
        if not self.waiting[priority]:
            del self.waiting[priority]
        return item, duration


class FairQueue(Generic[T]):
    """Items that wait, each of a tenant. Push, pop and removal take O(log n), a look at all positions O(n log n)."""

    def __init__(self) -> None:
        self._now = 0.0  # virtual time
        self._tenants: dict[str, _Tenant[T]] = {}
        self._heap: list[_Tenant[T]] = []  # the same; none has a tag before now
        self._places: dict[T, tuple[str, int]] = {}  # tenant and priority of each item
        self._turns = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def num_of(self, tenant: str) -> int:
        """Items of a tenant that wait."""
        return len(self._tenants[tenant]) if tenant in self._tenants else 0

    def push(self, item: T, *, tenant: str, priority: int, cost: float, weight: float = 1.0) -> None:
        """Lets an item wait, which does not wait already.

        priority: the largest of a tenant is next.  cost: what it will use, in any unit that all items share; above 0.
        weight: of its tenant, twice as much of which gives twice the share; above 0.
        """
        assert item not in self._places, f"{item!r} waits already"
        assert 0 < cost < math.inf, f"cost {cost}"
        assert 0 < weight < math.inf, f"weight {weight}"
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant(tenant, self._now, next(self._turns))
            heapq.heappush(self._heap, self._tenants[tenant])
        self._tenants[tenant].waiting.setdefault(priority, OrderedDict())[item] = cost / weight
        self._places[item] = tenant, priority

    def pop(self, may_run: Callable[[str], bool] = lambda tenant: True) -> T | None:
        """Takes the next item of a tenant that may run one; None if there is none."""
        passed: list[_Tenant[T]] = []
        found = None
        try:
            while self._heap and len(self):
                passed.append(heapq.heappop(self._heap))
                if passed[-1].waiting and may_run(passed[-1].name):
                    found = passed.pop()
                    break
        finally:
            if found is None:  # also where `may_run` raises
                for tenant in passed:
                    heapq.heappush(self._heap, tenant)
        if found is None:
            return None
        self._now = found.start
        for tenant in passed:
            self._pass(tenant)
        item, duration = found.take()
        del self._places[item]
        self._move(found, found.start + duration)
        return item

    def remove(self, item: T) -> bool:
        """Lets an item wait no longer; False if it does not wait."""
        if item not in self._places:
            return False
        name, priority = self._places.pop(item)
        waiting = self._tenants[name].waiting
        del waiting[priority][item]
        if not waiting[priority]:
            del waiting[priority]
        return True

    def positions(self) -> Iterator[tuple[T, int]]:
        """Every item with the number of those before it, in the order in which they would be popped if all tenants may
        run. The queue must not change meanwhile."""
        turns = itertools.count(next(self._turns))
        heap = [(tenant.start, tenant.turn, tenant.in_order()) for tenant in self._heap]
        heapq.heapify(heap)
        num_ahead = 0
        while heap:
            start, _, items = heapq.heappop(heap)
            for item, duration in items:
                yield item, num_ahead
                num_ahead += 1
                heapq.heappush(heap, (start + duration, next(turns), items))
                break

    def _pass(self, tenant: _Tenant[T]) -> None:
        """Brings up a tenant that time has passed: who may not run now saves up nothing, who waits for nothing owes
        nothing."""
        if tenant.waiting:
            self._move(tenant, self._now)
        else:
            del self._tenants[tenant.name]

    def _move(self, tenant: _Tenant[T], start: float) -> None:
        tenant.start, tenant.turn = start, next(self._turns)
        heapq.heappush(self._heap, tenant)
