"""What came of a run: built from its directory, so that it can be had again at any time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._errors import TrainingFailedError
from drawbar.train._history.events import JournaledEvent, ReportReceived, RunEnded, RunStarted
from drawbar.train._history.html import RunCard, extract_curves
from drawbar.train._history.journal import read_events, replay, select_effective_reports
from drawbar.train._history.ledger import DataLedger
from drawbar.train._history.ranking import (
    describe_missing_scores,
    get_score,
    parse_checkpoint_config,
    rank_checkpoints,
)
from drawbar.train._history.run_record import REPORT_COLUMNS, make_report_row
from drawbar.train._history.timeline import RunState, Timeline
from drawbar.train._metrics import Metrics, describe_available
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import CheckpointStore
from drawbar.train._storage.filesystem import AnyFileSystem, RemotePath, make_local_filesystem
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.run_directory import RunDirectory, open_run_directory

if TYPE_CHECKING:
    import pandas
    from pyarrow.fs import FileSystem

_logger = logging.getLogger("drawbar.train")


@dataclass(repr=False)
class Result:
    """The result of a run.

    Attributes:
        metrics: The last metrics of the lowest rank that reported, usually rank 0, with those of
            the checkpoint's validation; None without reports.
        checkpoint: The newest committed checkpoint, None if there is none.
        best_checkpoints: The checkpoints that are kept, with their metrics, worst first and best
            last, as `CheckpointConfig` ranks them. If none has the score, by age; a warning is
            logged then.
        error: Why the run failed, None if it did not. `fit()` raises it; `from_path` gives it here.
        path: The run's directory, on its filesystem.
        return_values: What the training function returned on each rank, in rank order. Empty after
            `from_path`.
    """

    metrics: Metrics | None = None
    checkpoint: Checkpoint | None = None
    error: TrainingFailedError | None = None
    path: str = ""
    _: KW_ONLY
    best_checkpoints: list[tuple[Checkpoint, Metrics]] = field(default_factory=list)
    return_values: list[Any] = field(default_factory=list)
    _storage_filesystem: object = None
    _directory: RunDirectory | None = field(default=None, compare=False)
    _journal_events: list[JournaledEvent] | None = field(default=None, compare=False)

    @classmethod
    def from_path(
        cls, path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
    ) -> Result:
        """Read the result of a run from its directory, also of one that failed or still goes on.

        Args:
            path: The run's directory, or its URI.
            storage_filesystem: The filesystem that `path` lies on, as for `RunConfig`.

        Raises:
            FileNotFoundError: There is no run at `path`.
            DamagedRunError: Its journal cannot be read.
        """
        directory = open_run_directory(path, storage_filesystem)
        return cls.from_run_directory(directory, read_events(directory))

    @classmethod
    def from_run_directory(
        cls, directory: RunDirectory, read: list[JournaledEvent] | None = None
    ) -> Result:
        """Read the result of a run, whose journal may have been `read` already."""
        events = list(_read_local_or_remote_events(directory)) if read is None else read
        config, error = CheckpointConfig(), None
        for event in events:
            if isinstance(event, RunStarted):
                config, error = parse_checkpoint_config(event), None
            elif isinstance(event, RunEnded) and event.outcome == "failed":
                error = TrainingFailedError(event.error, path=directory.uri)
        # Not what the journal says: a user may have deleted some, or retention was cut off by a
        # kill.
        manifests = _list_intact_checkpoints(directory.checkpoints)
        if unranked := describe_missing_scores(manifests, config):
            _logger.warning("%s: %s best_checkpoints are by age", directory.uri, unranked)
        pairs = {
            m.name: (directory.checkpoints.get_checkpoint(m.name), m.metrics) for m in manifests
        }
        return cls(
            path=directory.root.fs_path
            if isinstance(directory.root, RemotePath)
            else directory.uri,
            _storage_filesystem=directory.filesystem,
            _directory=directory,
            _journal_events=read,
            metrics=_get_last_metrics(select_effective_reports(events)),
            checkpoint=pairs[manifests[-1].name][0] if manifests else None,
            best_checkpoints=[pairs[m.name] for m in rank_checkpoints(manifests, config)],
            error=error,
        )

    @property
    def filesystem(self) -> FileSystem:
        """The `pyarrow.fs.FileSystem` that the run lies on."""
        return self._storage_filesystem or make_local_filesystem()

    @property
    def uri(self) -> str:
        """The address of the run: its path, or its URI if it was given as one."""
        return self._directory.uri if self._directory else self.path

    @property
    def return_value(self) -> Any:
        """What the training function returned on rank 0."""
        return self.return_values[0] if self.return_values else None

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """All reports that count: a row per rank and report.

        The columns are `rank`, `index` (number of the report), `attempt`, `time` (seconds since the
        epoch), and the metrics, nested keys joined with "/"; a metric of the same name as one of
        the four is found as `metric/<name>`. A validation's metrics are in the row of its
        checkpoint's report on the lowest rank, in place of what has the same name there. A restart
        leaves neither gap nor duplicate.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                'Result.metrics_dataframe needs pandas: pip install "drawbar[data]"'
            ) from error
        reports = select_effective_reports(self._events())
        rows = [make_report_row(r) for r in sorted(reports, key=lambda r: (r.index, r.rank))]
        return pandas.DataFrame(rows, columns=None if rows else list(REPORT_COLUMNS))

    @property
    def data_ledger(self) -> DataLedger:
        """Which rows of the trainer's datasets were read in each epoch, over all restarts.

        For example, no epoch lost or repeated rows if `not epoch.repeated_rows` and
        `not epoch.unread_rows` hold for each epoch in `result.data_ledger`.
        """
        return DataLedger.from_events(self._events())

    @property
    def timeline(self) -> Timeline:
        """Where the time went: start-up, checkpoints and outcome of every attempt."""
        return Timeline.of(self._events())

    def _events(self) -> Iterable[JournaledEvent]:
        if self._journal_events is not None:
            return self._journal_events
        return _read_local_or_remote_events(
            self._directory or open_run_directory(self.path, self._storage_filesystem)
        )

    def get_best_checkpoint(self, metric: str, mode: Literal["min", "max"]) -> Checkpoint | None:
        """Give the kept checkpoint with the lowest or highest value of a metric.

        Args:
            metric: Name of a reported metric; nested keys are joined with "/".
            mode: "min" or "max".

        Raises:
            ValueError: `mode` is neither.
            KeyError: No kept checkpoint has that metric; the message lists those there are.
        """
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", found {mode!r}')
        if not self.best_checkpoints:
            return None
        scored = [(get_score(metrics, metric), c) for c, metrics in self.best_checkpoints]
        usable = [(value, checkpoint) for value, checkpoint in scored if value is not None]
        if not usable:
            reported = [metrics for _, metrics in self.best_checkpoints]
            there_are = describe_available(reported, missing_name=metric)
            raise KeyError(f"no checkpoint has the metric {metric!r}. {there_are}")
        choose = max if mode == "max" else min
        return choose(reversed(usable), key=lambda pair: pair[0])[1]  # of equals the newest

    def __repr__(self) -> str:
        lines = [
            f"path={self.uri!r}",
            f"metrics={self.metrics!r}",
            f"checkpoint={self.checkpoint!r}",
        ]
        if self.error is not None:
            lines.append(f"error={self.error!r}")
        return "Result(\n  " + ",\n  ".join(lines) + ",\n)"

    def _repr_html_(self) -> str:
        """Give what a notebook shows: state, metrics, curves and checkpoints.

        A result whose run cannot be read any more, or that was made by hand, has what it holds.
        """
        try:
            events = list(self._events())
        except (OSError, ValueError):
            events = []
        status = RunState.from_events(events).status if events else ""
        return RunCard(
            title=os.path.basename(self.path.rstrip("/")),
            status="failed" if self.error else status,
            path=self.uri,
            error=str(self.error or ""),
            metrics=self.metrics or {},
            curves=extract_curves(select_effective_reports(events)),
            checkpoints=[
                (os.path.basename(c.path), metrics) for c, metrics in self.best_checkpoints
            ],
        ).render()


def _read_local_or_remote_events(directory: RunDirectory) -> Iterable[JournaledEvent]:
    """Read the journal here if it is; a remote run that is over has its own in the storage only."""
    return (
        replay(directory.journal_path)
        if directory.journal_path.exists()
        else read_events(directory)
    )


def _list_intact_checkpoints(checkpoints: CheckpointStore) -> list[Manifest]:
    """List the checkpoints that are whole, and say of the others why they are left out."""
    committed = checkpoints.list_committed()
    damage = {each.name: checkpoints.find_damage(each) for each in committed}
    if any(damage.values()):
        for each in checkpoints.list_committed():  # without what retention has deleted meanwhile
            if wrong := damage.get(each.name):
                _logger.warning("%s is damaged, and left out of the result: %s", each.name, wrong)
    return [each for each in committed if not damage[each.name]]


def _get_last_metrics(reports: list[ReportReceived]) -> Metrics | None:
    if not reports:
        return None
    lowest = min(report.rank for report in reports)
    return next(report.metrics for report in reversed(reports) if report.rank == lowest)
