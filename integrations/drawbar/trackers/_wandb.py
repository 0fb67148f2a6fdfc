"""W&B: log reports to Weights & Biases, or to files for `wandb sync`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._files import FileTracker, sync_path
from drawbar.trackers._points import Point, Ranks
from drawbar.trackers._wandb_archive import (
    ATTEMPT,
    REPORT,
    SOURCE,
    PointId,
    WandbFile,
    find_later_points,
    list_files,
)

_FLUSH_PERIOD_S = 1.0
_MAX_FLUSH_WAIT_S = 10.0
_POLL_PERIOD_S = 0.05


class WandB(FileTracker):
    """Log the reports of a run to Weights & Biases.

    All starts of a Drawbar run are one W&B run with the id `drawbar-<run id>`. The x axis is
    `drawbar/report`, the number of the report. W&B cannot delete values: if a restart repeats
    reports, their earlier and later values have different values of `drawbar/attempt`.

    W&B first writes the reports to `.wandb` files. Drawbar reads them to know which reports W&B
    has. In offline mode, `wandb sync --append` sends the files. It also sends those that W&B has
    not uploaded before the machine failed.

    Args:
        project: Project of W&B.
        entity: Team or user of W&B. Default: the default entity of the account.
        mode: "online" or "offline". Default: the environment variable `WANDB_MODE`, or "online".
        log_dir: Directory in which W&B creates its directory `wandb`. Default: the run directory.
        ranks: Reports to send: a rank, such as 0; the "mean", "min", or "max" over all
            ranks; or "all", which adds a prefix such as "rank_3/" to the metric names.
        finish_timeout: Maximum time in seconds, or a timedelta, for which the end of the run waits
            for the tracker.

    Raises:
        ImportError: wandb is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid.

    Example:
        ```python
        run_config = RunConfig(name="mnist", callbacks=[WandB("digits")])
        ```
    """

    kind = "wandb"
    package = "wandb"
    directory_name = "wandb"

    def __init__(
        self,
        project: str = "drawbar",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        ranks: Ranks = 0,
        finish_timeout: float | timedelta = 30,
    ) -> None:
        super().__init__(log_dir, ranks=ranks, finish_timeout=finish_timeout)
        self.project = project
        self.entity = entity
        self.mode = mode or os.environ.get("WANDB_MODE") or "online"
        if self.mode not in ("online", "offline"):
            raise ValueError(
                f'mode={self.mode!r} must be "online" or "offline". Set it in WandB(mode=...) or '
                "in the environment variable WANDB_MODE."
            )

    def get_options(self) -> dict[str, str | None]:
        """Return the destination."""
        return {
            "project": self.project,
            "entity": self.entity,
            "mode": self.mode,
            **super().get_options(),
        }

    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        """Connect to the run of the tracker."""
        directory = self.log_dir or self._get_directory(run).parent
        options = {"project": self.project, "entity": self.entity, "mode": self.mode}
        return _WandbRun(options, directory, run, cursor, self.ranks, self.finish_timeout)


class _WandbRun(Connection):
    """One start of a W&B run, which has its own file.

    Args:
        options: Project, entity, and mode.
        directory: Directory in which W&B creates its directory.
        run: Run whose reports are sent.
        cursor: Stored position. The files can have later points.
        ranks: Ranks whose reports are sent.
        finish_timeout: Maximum time in seconds for which W&B uploads at the end.
    """

    def __init__(
        self,
        options: dict[str, str | None],
        directory: Path,
        run: TrackedRun,
        cursor: Cursor,
        ranks: Ranks,
        finish_timeout: float,
    ) -> None:
        run_id = f"drawbar-{run.run_id}"
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)
        paths = list_files(directory, run_id)
        # If the files were deleted in offline mode, everything is sent again.
        super().__init__(cursor if paths or options["mode"] == "online" else Cursor())
        self._run = _start(options, directory, run_id, run, finish_timeout)
        self._path = Path(self._run.settings.sync_file)
        sources = {key: self._make_source(key) for key in cursor.next_index}
        # After the start, which takes seconds: W&B's process of a killed driver has ended.
        self._sent, next_step = find_later_points(paths, self.cursor, sources)
        self._next_step = max(next_step, self._run.step)
        self._file = WandbFile(self._path)
        self._num_waiting = 0

    def _make_source(self, key: int) -> str:
        return f"rank_{key}" if self._ranks == "all" else str(self._ranks)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            source = self._make_source(point.key)
            if PointId(point.attempt, source, point.index) in self._sent:
                continue
            position = {REPORT: point.index, ATTEMPT: point.attempt, SOURCE: source}
            values = {**point.values, **position, "_timestamp": point.time}
            self._run.log(values, step=self._next_step, commit=True)
            self._next_step += 1
            self._num_waiting += 1

    def flush(self) -> bool:
        deadline = time.monotonic() + _MAX_FLUSH_WAIT_S
        while True:
            if self._path.exists():
                self._num_waiting -= len(self._file.read_points())
            if not self._num_waiting:
                sync_path(self._path)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_PERIOD_S)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome in ("finished", "") else 1)
        if not self.flush():
            raise OSError(f"W&B has not written {self._num_waiting} reports to {self._path}.")


def _start(
    options: dict[str, str | None],
    directory: Path,
    run_id: str,
    run: TrackedRun,
    finish_timeout: float,
) -> Any:
    import wandb

    settings: Any = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=finish_timeout,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_transaction_log_flush_interval=_FLUSH_PERIOD_S,
    )
    started: Any = wandb.init(
        **options,
        id=run_id,
        name=run.name,
        resume="allow",
        reinit="create_new",  # the training function can have its own W&B run
        dir=str(directory),
        config={**run.config, "drawbar_path": run.path},
        settings=settings,
    )
    started.define_metric(REPORT, hidden=True)
    started.define_metric(ATTEMPT, hidden=True)
    started.define_metric("*", step_metric=REPORT)
    return started
