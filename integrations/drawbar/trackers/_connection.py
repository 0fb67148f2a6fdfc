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

    Example:
        The name of a run for a tracker without directories in names:

            run.name.replace("/", "-")
    """

    run_id: str
    name: str
    path: str
    local_path: Path | None
    config: dict[str, object]


class Connection(ABC):
    """Open run of a tracker: receives the points of one run of Drawbar.

    All methods are called on one thread, and may raise any exception. Drawbar then logs the
    error and connects again, without a call of `close`. Returned by `Tracker.connect`.

    Args:
        cursor: Position from which the connection receives points.

    Attributes:
        cursor: Position up to which the connection has received points. Drawbar updates it.

    Example:
        A connection that prints the points:

            class PrinterConnection(Connection):
                def write(self, points):
                    for point in points:
                        print(point.index, point.values)

                def flush(self):
                    return True

                def close(self, outcome):
                    print(outcome)
    """

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Send points. They are in order for each rank.

        After a failure, the same points can be sent again. A tracker that should not show them
        twice must recognize them by attempt, key, and index.

        Args:
            points: New points.
        """

    def rewind(self, first_index: int) -> None:  # noqa: B027  # optional
        """Handle that a new attempt replaces the points from a number on.

        The default does nothing. Trackers that cannot delete points show both, the later ones with
        a later time.

        Args:
            first_index: Number of the first report of the new attempt.
        """

    @abstractmethod
    def flush(self) -> bool:
        """Make the points durable. Called after new points.

        Returns:
            Whether the points are durable, so that the position may be stored. If it is False,
            Drawbar sends them again after a crash.
        """

    @abstractmethod
    def close(self, outcome: str) -> None:
        """Make the points durable and disconnect.

        Args:
            outcome: "finished", "failed", or "stopped"; "" if the run has not ended.
        """
