"""What came of a run: built from its directory, so that it can be had again at any time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drawbar.train._errors import TrainingFailedError
from drawbar.train._history.events import JournaledEvent, ReportReceived, RunEnded, RunStarted
from drawbar.train._history.html import Card, curves_of
from drawbar.train._history.journal import events_of, history, replay
from drawbar.train._history.ledger import DataLedger
from drawbar.train._history.ranking import checkpoint_config_of, ranked, score, why_unranked
from drawbar.train._history.record import COLUMNS, row_of
from drawbar.train._history.timeline import Snapshot, Timeline
from drawbar.train._metrics import Metrics, metrics_there_are
from drawbar.train._settings.run_config import CheckpointConfig
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import CheckpointStore
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.remote_folder import AnyFileSystem, Folder, local_filesystem
from drawbar.train._storage.run_directory import RunDirectory, open_directory

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
    _read: list[JournaledEvent] | None = field(default=None, compare=False)

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
        directory = open_directory(path, storage_filesystem)
        return cls.of(directory, events_of(directory))

    @classmethod
    def of(cls, directory: RunDirectory, read: list[JournaledEvent] | None = None) -> Result:
        """Read the result of a run, whose journal may have been `read` already."""
        events = list(_events_of(directory)) if read is None else read
        config, error = CheckpointConfig(), None
        for event in events:
            if isinstance(event, RunStarted):
                config, error = checkpoint_config_of(event), None
            elif isinstance(event, RunEnded) and event.outcome == "failed":
                error = TrainingFailedError(event.error, path=directory.location)
        # Not what the journal says: a user may have deleted some, or retention was cut off by a
        # kill.
        manifests = _intact(directory.checkpoints)
        if unranked := why_unranked(manifests, config):
            _logger.warning("%s: %s best_checkpoints are by age", directory.location, unranked)
        pairs = {m.name: (directory.checkpoints.checkpoint(m.name), m.metrics) for m in manifests}
        return cls(
            path=directory.home.path if isinstance(directory.home, Folder) else directory.location,
            _storage_filesystem=directory.filesystem,
            _directory=directory,
            _read=read,
            metrics=_last_metrics(history(events)),
            checkpoint=pairs[manifests[-1].name][0] if manifests else None,
            best_checkpoints=[pairs[m.name] for m in ranked(manifests, config)],
            error=error,
        )

    @property
    def filesystem(self) -> FileSystem:
        """The `pyarrow.fs.FileSystem` that the run lies on."""
        return self._storage_filesystem or local_filesystem()

    @property
    def uri(self) -> str:
        """The address of the run: its path, or its URI if it was given as one."""
        return self._directory.location if self._directory else self.path

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
        reports = history(self._events())
        rows = [row_of(r) for r in sorted(reports, key=lambda r: (r.index, r.rank))]
        return pandas.DataFrame(rows, columns=None if rows else list(COLUMNS))

    @property
    def data_ledger(self) -> DataLedger:
        """Which rows of the trainer's datasets were read in each epoch, over all restarts.

        Such as `all(not each.repeated and not each.left_out for each in result.data_ledger)`.
        """
        return DataLedger.of(self._events())

    @property
    def timeline(self) -> Timeline:
        """Where the time went: start-up, checkpoints and outcome of every attempt."""
        return Timeline.of(self._events())

    def _events(self) -> Iterable[JournaledEvent]:
        if self._read is not None:
            return self._read
        return _events_of(self._directory or open_directory(self.path, self._storage_filesystem))

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
        scored = [(score(metrics, metric), c) for c, metrics in self.best_checkpoints]
        usable = [(value, checkpoint) for value, checkpoint in scored if value is not None]
        if not usable:
            reported = [metrics for _, metrics in self.best_checkpoints]
            there_are = metrics_there_are(reported, instead_of=metric)
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
        status = Snapshot.of(events).status if events else ""
        return Card(
            title=os.path.basename(self.path.rstrip("/")),
            status="failed" if self.error else status,
            path=self.uri,
            error=str(self.error or ""),
            metrics=self.metrics or {},
            curves=curves_of(history(events)),
            checkpoints=[
                (os.path.basename(c.path), metrics) for c, metrics in self.best_checkpoints
            ],
        ).html()


def _events_of(directory: RunDirectory) -> Iterable[JournaledEvent]:
    """Read the journal here if it is; a remote run that is over has its own in the storage only."""
    return replay(directory.journal) if directory.journal.exists() else events_of(directory)


def _intact(checkpoints: CheckpointStore) -> list[Manifest]:
    """List the checkpoints that are whole, and say of the others why they are left out."""
    committed = checkpoints.committed()
    damage = {each.name: checkpoints.damage(each) for each in committed}
    if any(damage.values()):
        for each in checkpoints.committed():  # without what retention has deleted meanwhile
            if wrong := damage.get(each.name):
                _logger.warning("%s is damaged, and left out of the result: %s", each.name, wrong)
    return [each for each in committed if not damage[each.name]]


def _last_metrics(reports: list[ReportReceived]) -> Metrics | None:
    if not reports:
        return None
    lowest = min(report.rank for report in reports)
    return next(report.metrics for report in reversed(reports) if report.rank == lowest)
