"""Results of collectives, which the new process of a rank receives when it repeats their calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from drawbar._process.serialization import Serialized

Payloads = tuple[Serialized | None, ...]
"""Result of a collective."""

NUM_FIRST = 500
NUM_LATEST = 500
MAX_BYTES = 64 * 1024 * 1024


class _Record(NamedTuple):
    """A collective, as `RecordedCollectives.record` receives it."""

    sequence: int
    calls: Mapping[int, str]
    payloads: Payloads


class RecordedCollectives:
    """Results of the first and of the latest collectives of an attempt.

    The first ones are from the setup of the training, the latest ones from the current step.
    """

    def __init__(self) -> None:
        self._first: list[_Record] = []
        self._latest = deque[_Record](maxlen=NUM_LATEST)
        self._num_bytes = 0

    def record(self, sequence: int, calls: Mapping[int, str], payloads: Payloads) -> None:
        """Record the result of a collective.

        Args:
            sequence: Number of the collective in the attempt.
            calls: Function and line of the call, by rank.
            payloads: The result.
        """
        record = _Record(sequence, calls, payloads)
        size = sum(payload.size for payload in payloads if payload)
        if sequence == len(self._first) < NUM_FIRST and self._num_bytes + size <= MAX_BYTES:
            self._first.append(record)
            self._num_bytes += size
        elif size <= MAX_BYTES // NUM_LATEST:
            self._latest.append(record)

    def find(self, sequence: int, rank: int, call: str) -> Payloads | None:
        """Return the result of a collective; None if it is unknown, or another line called it."""
        is_first = sequence < len(self._first)
        records = self._first[sequence : sequence + 1] if is_first else self._latest
        for record in records:
            if record.sequence == sequence and record.calls[rank] == call:
                return record.payloads
        return None
