"""Interface between the thread that reads reports and a tracker's library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar.trackers._cursor import Cursor
from drawbar.trackers._points import Point


@dataclass(frozen=True)
class TrackedRun:
    """Run whose reports a tracker receives.

    Attributes:
        run_id: Identifier of the run, the same for all its starts.
        name: Name of the run.
        path: Path or URI of the run directory.
        local_path: Run directory on this machine; None if the run is in remote storage.
        config: Configuration as JSON values.
    """

    run_id: str
    name: str
    path: str
    local_path: Path | None
    config: dict[str, object]


class Connection(ABC):
    """Open tracker run. All methods are called on one thread, and may raise any exception.

    Attributes:
        cursor: Position up to which the tracker has points.
    """

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Send points in the order of their numbers."""

    def rewind(self, first_index: int) -> None:  # noqa: B027  # optional
        """Handle that a new attempt replaces the points from `first_index` on.

        Trackers that cannot delete points show both, the later ones with a later time.
        """

    @abstractmethod
    def flush(self) -> bool:
        """Make the points durable. Return whether the cursor may be stored."""

    @abstractmethod
    def close(self, outcome: str) -> None:
        """Make the points durable and disconnect.

        Args:
            outcome: "finished", "failed", or "stopped"; "" if the run has not ended.
        """
