"""Trackio: store reports in Trackio's local database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from drawbar.trackers._config_values import flatten_config
from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._points import Point, Ranks
from drawbar.trackers._tracker import Tracker


class Trackio(Tracker):
    """Store the reports of a run in Trackio's local database.

    `trackio show` displays them, and `trackio sync` uploads them to a Hugging Face Space. The step
    is the number of the report. Trackio cannot delete values: if a restart repeats reports, their
    steps have an earlier and a later value.

    Args:
        project: Project of Trackio.
        ranks: Reports to send: a rank, such as 0; the "mean", "min", or "max" over all
            ranks; or "all", which adds a prefix such as "rank_3/" to the metric names.
        finish_timeout: Maximum time in seconds, or a timedelta, for which the end of the run waits
            for the tracker.

    Raises:
        ImportError: trackio is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid.

    Example:
        ```python
        run_config = RunConfig(name="mnist", callbacks=[Trackio("digits")])
        ```
    """

    kind = "trackio"
    package = "trackio"

    def __init__(
        self,
        project: str = "drawbar",
        *,
        ranks: Ranks = 0,
        finish_timeout: float | timedelta = 30,
    ) -> None:
        super().__init__(ranks=ranks, finish_timeout=finish_timeout)
        self.project = project

    def get_options(self) -> dict[str, str | None]:
        """Return the destination."""
        return {"project": self.project}

    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        """Connect to the run of the tracker."""
        return _TrackioRun(self.project, run, cursor)


class _TrackioRun(Connection):
    """One run in the database.

    Args:
        project: Project of Trackio.
        run: Run whose reports are sent.
        cursor: Stored position.
    """

    def __init__(self, project: str, run: TrackedRun, cursor: Cursor) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        self._project = project
        self._run = run
        has_rows = bool(SQLiteStorage.get_log_count(project, run_id=run.run_id))
        super().__init__(cursor if has_rows else Cursor())

    def write(self, points: Sequence[Point]) -> None:
        # One transaction. The database ignores rows whose log_id it has.
        self._storage.bulk_log(
            self._project,
            self._run.name,
            metrics_list=[point.values for point in points],
            steps=[point.index for point in points],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in points],
            config=flatten_config(self._run.config),
            log_ids=[
                f"{self._run.run_id}-{point.attempt}-{point.key}-{point.index}" for point in points
            ],
            run_id=self._run.run_id,
        )

    def flush(self) -> bool:
        return True  # the transaction is committed

    def close(self, outcome: str) -> None:
        pass
