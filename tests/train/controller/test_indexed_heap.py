"""IndexedHeap: smallest value, changes, and removal by key."""

from __future__ import annotations

import math
from random import Random

from drawbar.train._controller.indexed_heap import IndexedHeap


def test_indexed_heap_agrees_with_dictionary() -> None:
    random = Random(0)
    heap, expected = IndexedHeap[int](), dict[int, int]()
    for _ in range(5000):
        key, value = random.randrange(20), random.randrange(50)
        if random.random() < 0.6:
            heap.set(key, value)
            expected[key] = value
        elif random.random() < 0.9:
            heap.discard(key)
            expected.pop(key, None)
        else:
            limit = random.randrange(10)
            keys = heap.pop_up_to(limit)
            assert keys == sorted(keys, key=lambda key: (expected[key], key))
            assert set(keys) == {key for key, value in expected.items() if value <= limit}
            for key in keys:
                del expected[key]
        assert heap.smallest == min(expected.values(), default=math.inf)
        assert sorted(heap.values()) == sorted(expected.values())
        assert len(heap) == len(expected)


def test_indexed_heap_drops_outdated_entries() -> None:
    heap = IndexedHeap[int]()
    heap.set(0, 0)
    for value in range(1, 10_000):
        heap.set(1, value)
    assert heap.smallest == 0
    assert len(heap._entries) < 20
