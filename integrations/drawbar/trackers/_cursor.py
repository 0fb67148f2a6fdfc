"""Position of a tracker in the reports of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drawbar.trackers._points import REDUCTIONS, Point, Ranks
from drawbar.train.runs import AttemptRow, FeedPosition


@dataclass(frozen=True)
class Cursor:
    """Position of a tracker in the reports of a run: the points that it has stored.

    `Cursor()` is the start of the run.

    Attributes:
        attempt: Number of the attempt; -1 before the first one.
        first_index: Number of the first report of the attempt.
        num_keys: Number of keys that the attempt has: ranks, or 1.
        next_index: For each key, the number of its next report in the attempt.
        end: All stored points have lower numbers than this one.

    Example:
        Start again if the tracker has lost the run:

            super().__init__(cursor if has_run else Cursor())
    """

    attempt: int = -1
    first_index: int = 0
    num_keys: int = 1
    next_index: Mapping[int, int] = field(default_factory=dict)
    end: int = 0

    def start_attempt(self, row: AttemptRow, ranks: Ranks) -> Cursor:
        """Return the cursor at the start of an attempt."""
        num_keys = row.num_workers if ranks == "all" else 1
        return Cursor(row.attempt, row.first_index, num_keys, {}, min(self.end, row.first_index))

    def add(self, points: list[Point]) -> Cursor:
        """Return the cursor after points of the attempt."""
        next_index = {**self.next_index, **{point.key: point.index + 1 for point in points}}
        end = max(self.end, *(point.index + 1 for point in points)) if points else self.end
        return replace(self, next_index=next_index, end=end)

    @property
    def resend_index(self) -> int:
        """Number of the first report that can be missing on any rank."""
        if len(self.next_index) < self.num_keys:
            return self.first_index
        return min(self.next_index.values(), default=self.first_index)

    def go_back(self) -> Cursor:
        """Return the cursor at the last position that all ranks have reached."""
        first = self.resend_index
        keys = self.next_index if len(self.next_index) >= self.num_keys else ()
        return replace(self, next_index=dict.fromkeys(keys, first), end=min(self.end, first))

    def to_feed_position(self, ranks: Ranks) -> FeedPosition:
        """Return the position from which on the feed must be read."""
        if ranks in REDUCTIONS:
            return FeedPosition(self.attempt, default_index=self.resend_index)
        return FeedPosition(self.attempt, self.next_index)

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as JSON values."""
        return {
            "attempt": self.attempt,
            "first_index": self.first_index,
            "num_keys": self.num_keys,
            "next_index": {str(key): index for key, index in self.next_index.items()},
            "end": self.end,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that `to_json` has returned. Unreadable values are the start."""
        try:
            return cls(
                attempt=int(state["attempt"]),
                first_index=int(state["first_index"]),
                num_keys=int(state["num_keys"]),
                next_index={int(key): int(index) for key, index in state["next_index"].items()},
                end=int(state["end"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return cls()
