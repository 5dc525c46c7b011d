"""A queue that is fair by class, and within a class by tenant: start-time fair queueing in two levels.

Pure: no clock, no I/O. Source: P. Goyal, H. Vin, H. Cheng, "Start-time Fair
Queueing" (SIGCOMM 1996), whose bound on unfairness holds for capacity that varies, as that of pods does.

    root ──┬── interactive (weight 4) ──┬── tenant A: r1 r4 r7      each node: start tag S
           │                            └── tenant B: r2            each level: virtual time V
           └── batch (weight 1) ─────────── tenant C: r3 r5 r6

Pop takes the child with the least S on each level; V becomes that S; the child's S moves on by cost ÷ weight.
A child that comes (back) into the queue starts at max(V, its old S): an absence earns no credit, and leaving
does not clear a debt. No request starves: each other tenant passes it a bounded number of times (for an
unlimited number of new tenants there would be no bound; ours are those of the keys file).

Every operation is O(log n). Nodes that emptied by `remove` stay in their heap until they surface.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from itertools import count
from typing import Generic, TypeVar

__all__ = ["DrainRate", "FairQueue"]


_SAMPLES = 64
_LONGEST = 60.0


class DrainRate:
    """Rate of requests let in, over the last 64 of them or `window` seconds, whichever is shorter."""

    __slots__ = ("_times", "_window")

    def __init__(self, window: float = 30.0) -> None:
        self._times: deque[float] = deque(maxlen=_SAMPLES)
        self._window = window

    def one(self, now: float) -> None:
        """A request was let in."""
        self._times.append(now)

    def per_second(self, now: float) -> float:
        """0 when nothing was let in lately."""
        times = self._times
        while times and now - times[0] > self._window:
            times.popleft()
        # The time since the last one counts as well: a queue that stands still gets slower by the second.
        return len(times) / max(now - times[0], 0.001) if len(times) > 1 else 0.0

    def retry_after(self, ahead: int, now: float) -> float:
        """Whole seconds until about `ahead` requests have been let in, from 1 to 60. With no rate to go by:
        1 for an empty queue, and more the longer it is."""
        rate = self.per_second(now)
        seconds = ahead / rate if rate else 1.0 + math.log2(1 + ahead)
        return float(min(_LONGEST, max(1.0, math.ceil(seconds))))


ItemT = TypeVar("ItemT")

_SWEEP_AT = 64
"""Tenants of a class, or entries of a heap, before the stale ones among them are looked for."""


class _Node:
    """A class or a tenant: something with a weight that waits as long as `size` is above 0."""

    __slots__ = ("in_heap", "size", "start", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.start = 0.0
        self.size = 0
        self.in_heap = False


class _Level(Generic[ItemT]):
    """Siblings and their virtual time."""

    __slots__ = ("_heap", "_order", "virtual_time")

    def __init__(self, order: "count[int]") -> None:
        self._heap: list[tuple[float, int, _Node]] = []
        self._order = order
        self.virtual_time = 0.0

    def wait(self, node: _Node) -> None:
        """The node has something to take."""
        if not node.in_heap:
            # One that is still in the heap has S ≥ V: V only passes S by taking it out.
            node.start = max(node.start, self.virtual_time)
            self._push(node)

    def first(self) -> _Node:
        """The waiting node with the least start tag; there must be one."""
        while True:
            node = self._heap[0][2]
            if node.size:
                return node
            heapq.heappop(self._heap)
            node.in_heap = False

    def took(self, node: _Node, cost: float) -> None:
        """`node`, which is `first()`, had something of this cost taken out (its size is lower already)."""
        heapq.heappop(self._heap)
        node.in_heap = False
        self.virtual_time = node.start
        node.start += cost / node.weight
        if node.size:
            self._push(node)

    def _push(self, node: _Node) -> None:
        node.in_heap = True
        heapq.heappush(self._heap, (node.start, next(self._order), node))


class _Tenant(_Node, Generic[ItemT]):
    __slots__ = ("items", "name", "owner", "recorded")

    def __init__(self, owner: "_Class[ItemT]", name: str, weight: float) -> None:
        super().__init__(weight)
        self.owner = owner
        self.name = name
        self.items: OrderedDict[ItemT, float] = OrderedDict()
        """In order of arrival → cost."""
        self.recorded = 0
        """Its size in the valid entry of the heap of long queues; 0: it has none."""

    def load(self, size: int) -> float:
        return size / (self.weight * self.owner.weight)


class _Class(_Node, Generic[ItemT]):
    __slots__ = ("level", "name", "sweep_at", "tenants")

    def __init__(self, name: str, weight: float, order: "count[int]") -> None:
        super().__init__(weight)
        self.name = name
        self.level: _Level[ItemT] = _Level(order)
        self.tenants: dict[str, _Tenant[ItemT]] = {}
        self.sweep_at = _SWEEP_AT


class FairQueue(Generic[ItemT]):
    """Items (hashable, each in the queue once at most) in fair order."""

    __slots__ = ("_class_weights", "_classes", "_long", "_order", "_owner", "_root", "_tenant_weights")

    def __init__(
        self,
        class_weights: Mapping[str, float] | None = None,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        """Weights are above 0; classes and tenants without one weigh 1."""
        self._class_weights = dict(class_weights or {})
        self._tenant_weights = dict(tenant_weights or {})
        self._order = count()
        self._root: _Level[ItemT] = _Level(self._order)
        self._classes: dict[str, _Class[ItemT]] = {}
        self._owner: dict[ItemT, _Tenant[ItemT]] = {}
        self._long: list[tuple[float, int, _Tenant[ItemT], int]] = []
        """(-load, order, tenant, size it had): a heap whose top, once corrected, is the longest queue."""

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._owner

    def waiting(self, class_name: str) -> int:
        """Items of one class."""
        node = self._classes.get(class_name)
        return node.size if node else 0

    def push(self, item: ItemT, class_name: str, tenant: str, cost: float) -> None:
        """Queue an item behind the others of its tenant. `cost` > 0: what taking it out is charged."""
        assert item not in self._owner, "an item can wait only once"
        node = self._tenant(class_name, tenant)
        owner = node.owner
        node.items[item] = cost
        self._owner[item] = node
        node.size += 1
        owner.size += 1
        owner.level.wait(node)
        self._root.wait(owner)
        self._record(node)

    def pop(self) -> ItemT | None:
        """Take out the item whose turn it is; None when nothing waits."""
        if not self._owner:
            return None
        owner = self._root.first()
        assert isinstance(owner, _Class)
        node = owner.level.first()
        assert isinstance(node, _Tenant)
        item, cost = node.items.popitem(last=False)
        del self._owner[item]
        node.size -= 1
        owner.size -= 1
        owner.level.took(node, cost)
        self._root.took(owner, cost)
        self._tidy(owner)
        return item  # type: ignore[no-any-return]

    def remove(self, item: ItemT) -> bool:
        """Take an item out without charging anybody; False if it does not wait."""
        node = self._owner.pop(item, None)
        if node is None:
            return False
        del node.items[item]
        node.size -= 1
        node.owner.size -= 1
        self._tidy(node.owner)
        return True

    def to_shed(self, class_name: str, tenant: str) -> ItemT | None:
        """Who has to go so that another item of this tenant can come: the newest item of the tenant with most
        waiting for its weight, if that is more than this tenant then would have. It is not taken out."""
        longest = self._longest()
        if longest is None:
            return None
        owner = self._classes.get(class_name)
        node = owner.tenants.get(tenant) if owner else None
        size = 1 + (node.size if node else 0)
        weight = self._class_weights.get(class_name, 1.0) * self._tenant_weights.get(tenant, 1.0)
        return next(reversed(longest.items)) if longest.load(longest.size) > size / weight else None

    # -- inside ----------------------------------------------------------------------------------------------

    def _tenant(self, class_name: str, tenant: str) -> _Tenant[ItemT]:
        owner = self._classes.get(class_name)
        if owner is None:
            owner = _Class(class_name, self._class_weights.get(class_name, 1.0), self._order)
            self._classes[class_name] = owner
        node = owner.tenants.get(tenant)
        if node is None:
            node = _Tenant(owner, tenant, self._tenant_weights.get(tenant, 1.0))
            owner.tenants[tenant] = node
        return node

    def _tidy(self, owner: _Class[ItemT]) -> None:
        if not self._owner:
            # The end of a busy period: V moves past all tags, so none of them says anything any more.
            self._classes.clear()
            self._long.clear()
            self._root = _Level(self._order)
            return
        tenants = owner.tenants
        if len(tenants) > owner.sweep_at:
            now = owner.level.virtual_time
            for name in [
                name
                for name, node in tenants.items()
                if not node.size and not node.in_heap and node.start <= now
            ]:
                del tenants[name]
            owner.sweep_at = 2 * len(tenants) + _SWEEP_AT

    def _record(self, node: _Tenant[ItemT]) -> None:
        node.recorded = node.size
        heapq.heappush(self._long, (-node.load(node.size), next(self._order), node, node.size))
        if len(self._long) > 2 * len(self._owner) + _SWEEP_AT:
            nodes = {id(entry[2]): entry[2] for entry in self._long if entry[2].size}
            self._long = []
            for node in nodes.values():
                node.recorded = node.size
                self._long.append((-node.load(node.size), next(self._order), node, node.size))
            heapq.heapify(self._long)

    def _longest(self) -> _Tenant[ItemT] | None:
        while self._long:
            _, _, node, size = self._long[0]
            if size == node.recorded and size == node.size:
                return node
            heapq.heappop(self._long)
            if size == node.recorded and node.size:  # it was the valid entry, and the queue is shorter now
                self._record(node)
        return None
