"""Results of collectives, which the new process of a rank receives when it repeats their calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from drawbar._process.serialization import Serialized

NUM_FIRST = 500
NUM_LATEST = 500
MAX_BYTES = 64 * 1024 * 1024


class RecordedCollectives:
    """Results of the first and of the latest collectives of an attempt.

    The first ones are from the setup of the training, the latest ones from the current step.
    """

    def __init__(self) -> None:
        self._first: list[tuple[Serialized | None, ...]] = []
        self._latest = deque[tuple[int, tuple[Serialized | None, ...]]](maxlen=NUM_LATEST)
        self._num_bytes = 0
        self._calls: list[Mapping[int, str]] = []

    def record(
        self, sequence: int, calls: Mapping[int, str], payloads: tuple[Serialized | None, ...]
    ) -> None:
        """Record the result of a collective.

        Args:
            sequence: Number of the collective in the attempt.
            calls: Function and line of the call, by rank.
            payloads: The result.
        """
        size = sum(payload.size for payload in payloads if payload)
        if sequence == len(self._first) < NUM_FIRST and self._num_bytes + size <= MAX_BYTES:
            self._first.append(payloads)
            self._calls.append(calls)
            self._num_bytes += size
        elif size <= MAX_BYTES // NUM_LATEST:
            self._latest.append((sequence, payloads))

    def find(self, sequence: int, rank: int, call: str) -> tuple[Serialized | None, ...] | None:
        """Return the result of a collective; None if it is unknown, or another line called it."""
        if sequence < len(self._first):
            return self._first[sequence] if self._calls[sequence][rank] == call else None
        return next((found for number, found in self._latest if number == sequence), None)
