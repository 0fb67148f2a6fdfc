"""Priority queue whose entries can be changed and removed by key."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, TypeVar

K = TypeVar("K")


class IndexedHeap(Generic[K]):
    """Smallest of one integer per key. Each change takes amortized O(log n).

    Outdated entries stay in the heap until they are its smallest, or are the majority.
    """

    def __init__(self) -> None:
        self._values: dict[K, int] = {}
        self._entries: list[tuple[int, K]] = []

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: K, value: int) -> None:
        """Add a key, or change its value."""
        if self._values.get(key) == value:
            return
        self._values[key] = value
        heapq.heappush(self._entries, (value, key))
        # Otherwise the heap grows forever if one key keeps a small value and others change.
        if len(self._entries) > 2 * len(self._values) + 8:
            self._entries = [(value, key) for key, value in self._values.items()]
            heapq.heapify(self._entries)

    def discard(self, key: K) -> None:
        """Remove a key if it is present."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Remove all keys."""
        self._values.clear()
        self._entries.clear()

    def values(self) -> Iterable[int]:
        """Return all values, in no particular order."""
        return self._values.values()

    @property
    def smallest(self) -> float:
        """Smallest value; infinity if there are no keys."""
        while self._entries:
            value, key = self._entries[0]
            if self._values.get(key) == value:
                return value
            heapq.heappop(self._entries)
        return math.inf

    def pop_up_to(self, limit: float) -> list[K]:
        """Remove and return the keys whose values are at most `limit`, in ascending order."""
        keys: list[K] = []
        while self.smallest <= limit and self._entries:
            _, key = heapq.heappop(self._entries)
            del self._values[key]
            keys.append(key)
        return keys
