"""Comet: write offline archives, which `comet upload` sends."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from drawbar.trackers._config_values import flatten_config
from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._files import FileTracker, sync_path
from drawbar.trackers._points import Point, Ranks
from drawbar.train.backend import parse_duration

_CURSOR_FILE = "drawbar.json"
_PARTIAL_PREFIX = ".partial-"


class Comet(FileTracker):
    """Write the reports of a run to offline archives of Comet.

    `comet upload <directory>/*.zip` sends the archives. All of them have the same experiment key,
    the identifier of the run, so Comet shows one experiment. The step is the number of the report.
    Comet cannot delete values: if a restart repeats reports, their steps have an earlier and a
    later value.

    Args:
        project: Project of Comet.
        workspace: Workspace of Comet. Default: the default workspace of the account.
        log_dir: Directory for the archives of several runs. Each run has a directory in it with
            the name of the run. Default: `comet` in the run directory.
        archive_period: Time in seconds, or a timedelta, after which the new reports are put into
            an archive. The end of the run writes the last archive. Reports that are in no archive
            when the driver is killed are sent again.
        ranks: Reports to send: a rank, such as 0; the "mean", "min", or "max" over all
            ranks; or "all", which adds a prefix such as "rank_3/" to the metric names.
        finish_timeout: Maximum time in seconds, or a timedelta, for which the end of the run waits
            for the tracker.

    Raises:
        ImportError: comet_ml is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid.

    Example:
        ```python
        run_config = RunConfig(name="mnist", callbacks=[Comet("digits")])
        ```
    """

    kind = "comet"
    package = "comet_ml"
    directory_name = "comet"

    def __init__(
        self,
        project: str = "drawbar",
        workspace: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        archive_period: float | timedelta = timedelta(minutes=10),
        ranks: Ranks = 0,
        finish_timeout: float | timedelta = 30,
    ) -> None:
        super().__init__(log_dir, ranks=ranks, finish_timeout=finish_timeout)
        self.project = project
        self.workspace = workspace
        self.archive_period = parse_duration("archive_period", archive_period)

    def get_options(self) -> dict[str, str | None]:
        """Return the destination."""
        return {
            "project": self.project,
            "workspace": self.workspace,
            **super().get_options(),
        }

    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        """Connect to the run of the tracker."""
        archives = _Archives(self._get_directory(run), run.run_id, self.ranks)
        settings = {"project_name": self.project, "workspace": self.workspace}
        return _CometRun(settings, archives, run, cursor, self.archive_period)


class _Archives:
    """Archives of a run, each with the cursor after its last report.

    An archive gets its name when it is complete, so an archive and its cursor are stored together.

    Args:
        directory: Directory of the archives.
        run_id: Identifier of the run.
        ranks: Ranks whose reports are in the archives.
    """

    def __init__(self, directory: Path, run_id: str, ranks: Ranks) -> None:
        self._directory = directory
        self._run_id = run_id
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)  # of a killed process

    def make_partial_directory(self) -> Path:
        """Return a new directory for an archive that is not complete."""
        return Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=self._directory))

    def load_cursor(self) -> Cursor:
        """Return the cursor of the last archive. Without archives, it is the start."""
        for path in sorted(self._directory.glob(f"{self._run_id}-*.zip"), reverse=True):
            with zipfile.ZipFile(path) as archive:
                state = json.loads(archive.read(_CURSOR_FILE))
            if state.get("ranks") == self._ranks:
                return Cursor.from_json(state)
        return Cursor()

    def add(self, partial: Path, cursor: Cursor) -> None:
        """Store the archive in a partial directory under its name, together with a cursor."""
        (path,) = partial.glob("*.zip")
        state = {"ranks": self._ranks, **cursor.to_json()}
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(_CURSOR_FILE, json.dumps(state))
        sync_path(path)
        names = [path.stem for path in self._directory.glob(f"{self._run_id}-*.zip")]
        # Later archives are sorted after earlier ones, also if the clock was set back.
        last = max((int(name.rpartition("-")[2]) for name in names), default=0)
        number = max(last + 1, time.time_ns())
        path.rename(self._directory / f"{self._run_id}-{number:020d}.zip")
        sync_path(self._directory)
        shutil.rmtree(partial, ignore_errors=True)


class _CometRun(Connection):
    """One experiment, in several archives.

    Args:
        settings: Project and workspace.
        archives: Archives of the run.
        run: Run whose reports are sent.
        cursor: Stored position. The archives can have a later one.
        archive_period: Time in seconds after which an archive is written.
    """

    def __init__(
        self,
        settings: dict[str, str | None],
        archives: _Archives,
        run: TrackedRun,
        cursor: Cursor,
        archive_period: float,
    ) -> None:
        self._settings = settings
        self._archives = archives
        self._run = run
        self._archive_period = archive_period
        super().__init__(max(cursor, archives.load_cursor(), key=_get_progress))
        self._has_experiment = self.cursor != Cursor()
        self._experiment: Any = None
        self._partial: Path | None = None
        self._deadline = time.monotonic() + archive_period

    def _open_experiment(self) -> Any:
        import comet_ml

        self._partial = self._archives.make_partial_directory()
        options = {
            **self._settings,
            "offline_directory": str(self._partial),
            "auto_metric_logging": False,
            "auto_output_logging": False,
            "auto_param_logging": False,
            "display_summary_level": 0,
            "log_code": False,
            "log_env_details": False,
            "log_git_metadata": False,
            "log_git_patch": False,
            "log_graph": False,
            "parse_args": False,
        }
        if self._has_experiment:
            return comet_ml.ExistingOfflineExperiment(
                previous_experiment=self._run.run_id, **options
            )
        experiment = comet_ml.OfflineExperiment(experiment_key=self._run.run_id, **options)
        experiment.set_name(self._run.name)
        experiment.log_parameters(flatten_config(self._run.config))
        experiment.log_other("drawbar.path", self._run.path)
        return experiment

    def write(self, points: Sequence[Point]) -> None:
        if self._experiment is None:
            self._experiment = self._open_experiment()
        for point in points:
            self._experiment.log_metrics(point.values, step=point.index)

    def flush(self) -> bool:
        if self._experiment is None:
            return True
        if time.monotonic() < self._deadline:
            return False
        self._write_archive()
        return True

    def close(self, outcome: str) -> None:
        if self._experiment is not None:
            if outcome:
                self._experiment.log_other("drawbar.outcome", outcome)
            self._write_archive()

    def _write_archive(self) -> None:
        assert self._partial is not None
        self._experiment.end()
        self._archives.add(self._partial, self.cursor)
        self._experiment, self._has_experiment = None, True
        self._deadline = time.monotonic() + self._archive_period


def _get_progress(cursor: Cursor) -> tuple[int, int]:
    return cursor.attempt, sum(cursor.next_index.values())
