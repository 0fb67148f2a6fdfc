"""`Result`: outcome, metrics, and checkpoints of a run."""

from __future__ import annotations

import logging
import os
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drawbar._base.api import set_public_module
from drawbar._base.metrics import Metrics, describe_available
from drawbar._base.packages import make_import_error
from drawbar._data.data_ledger import DataLedger
from drawbar._history.run_history import RunHistory
from drawbar._observe.goodput import Goodput
from drawbar._process.errors import TrainingFailedError
from drawbar._records.checkpoint_config import parse_checkpoint_config
from drawbar._records.ranking import describe_missing_scores, get_score, rank_checkpoints
from drawbar._records.report_ranges import list_rollbacks
from drawbar._records.rollback import remove_discarded
from drawbar._records.timeline import Timeline
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_store import CheckpointStore
from drawbar._storage.filesystem import AnyFileSystem
from drawbar._storage.journal_file import is_locked
from drawbar._storage.manifest import Manifest
from drawbar._storage.run_directory import RunDirectory, open_run_directory
from drawbar._storage.storage_path import make_local_filesystem

if TYPE_CHECKING:
    import pandas
    from pyarrow.fs import FileSystem

_logger = logging.getLogger("drawbar.train")


@dataclass(repr=False)
class Result:
    """Outcome, metrics, and checkpoints of a run.

    Returned by `fit()`. `Result.from_path` reads the result of any run again from its directory.

    Attributes:
        metrics: Metrics of the last report of the lowest rank that reported, usually rank 0. They
            include the validation metrics of this report's checkpoint. None without reports.
        checkpoint: Latest committed checkpoint; None if there is none.
        best_checkpoints: Committed checkpoints that were not deleted, with their metrics, from
            worst to best, as `CheckpointConfig` ranks them. If none has the metric that
            determines the order, they are sorted by age, and a warning is logged.
        error: Error of a failed run, else None. `fit()` raises it; `from_path` returns it here.
        path: Directory of the run on its filesystem.
        return_values: Return value of the training function on each rank, by rank. Empty for
            `from_path`.

    Example:
        Load the best checkpoint after training:

            result = trainer.fit()
            print(result.metrics["loss"])
            checkpoint = result.get_best_checkpoint("loss", mode="min")
            with checkpoint.as_directory() as path:
                model.load_state_dict(torch.load(os.path.join(path, "model.pt")))
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
    _history: RunHistory | None = field(default=None, compare=False)

    @classmethod
    def from_path(
        cls, path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
    ) -> Result:
        """Read the result of a run from its directory, also if it failed or is in progress.

        Args:
            path: Directory or URI of the run.
            storage_filesystem: Filesystem of `path`, as for `RunConfig`.

        Returns:
            The result.

        Raises:
            FileNotFoundError: There is no run at `path`.
            DamagedRunError: The journal of the run cannot be read.

        Example:
            Read the last metrics of a run:

                result = Result.from_path("/shared/runs/experiment")
                print(result.metrics)
        """
        directory = open_run_directory(path, storage_filesystem)
        return cls.from_run_directory(directory, RunHistory.read(directory))

    @classmethod
    def from_run_directory(
        cls, directory: RunDirectory, history: RunHistory | None = None
    ) -> Result:
        """Read the result of a run. If `history` is passed, the journal is not read."""
        current = RunHistory.read_local_or_remote(directory) if history is None else history
        state = current.state
        config = parse_checkpoint_config(state.config)
        has_failed = state.status == "failed"
        # Read the checkpoints from their directories. The journal may list checkpoints that a user
        # has deleted, or whose deletion by retention was interrupted by a kill.
        manifests = remove_discarded(
            _list_intact_checkpoints(directory.checkpoints), list_rollbacks(current.events)
        )
        if missing_scores := describe_missing_scores(manifests, config):
            _logger.warning(
                "%s: %s best_checkpoints are sorted by age.", directory.uri, missing_scores
            )
        pairs = {
            manifest.name: (directory.checkpoints.get_checkpoint(manifest.name), manifest.metrics)
            for manifest in manifests
        }
        return cls(
            path=directory.root.fs_path,
            _storage_filesystem=directory.filesystem,
            _directory=directory,
            _history=history,
            metrics=current.last_metrics,
            checkpoint=pairs[manifests[-1].name][0] if manifests else None,
            best_checkpoints=[
                pairs[manifest.name] for manifest in rank_checkpoints(manifests, config)
            ],
            error=TrainingFailedError(state.error, path=directory.uri) if has_failed else None,
        )

    @property
    def filesystem(self) -> FileSystem:
        """`pyarrow.fs.FileSystem` of the run."""
        return self._storage_filesystem or make_local_filesystem()

    @property
    def uri(self) -> str:
        """Path or URI of the run, as passed by the user."""
        return self._directory.uri if self._directory else self.path

    @property
    def return_value(self) -> Any:
        """Return value of the training function on rank 0; None if there is none."""
        return self.return_values[0] if self.return_values else None

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """Table of all reports, with one row for each report and rank.

        After the checkpoint from which a restart resumed, the table contains only the reports of
        the new attempt. So restarts cause neither gaps nor duplicates.

        The columns are `rank`, `index` (number of the report), `attempt`, `time` (seconds since the
        epoch), and the metrics, with nested keys joined by "/". A metric with the name of one of
        these columns is in `metric/<name>`. Validation metrics are in the row of the checkpoint's
        report on the lowest rank, where they replace metrics of the same name.

        Raises:
            ImportError: pandas is not installed.
        """
        from drawbar._runs.report_columns import make_frame

        try:
            return make_frame(self._read_history())
        except ImportError as error:
            raise make_import_error("pandas", extra="data") from error

    @property
    def data_ledger(self) -> DataLedger:
        """Rows of the trainer's datasets that were read in each epoch, across restarts.

        It has no entries for the shards of a `DataSource` of the user.

        Example:
            Check that every row was read exactly once in each epoch:

                for epoch in result.data_ledger:
                    assert epoch.repeated_rows == epoch.unread_rows == ()
        """
        return DataLedger.from_events(self._read_history().events)

    @property
    def timeline(self) -> Timeline:
        """Durations and outcomes of all attempts."""
        return self._read_history().state.timeline

    @property
    def goodput(self) -> Goodput:
        """Productive share of the time of the run, and where the rest of the time went.

        Example:
            Print where the time of the run went:

                print(result.goodput)
        """
        from drawbar._observe.run_goodput import compute_goodput

        is_active = self._directory is not None and is_locked(self._directory.journal_path)
        return compute_goodput(self._read_history(), is_active=is_active)

    def _read_history(self) -> RunHistory:
        if self._history is not None:
            return self._history
        return RunHistory.read_local_or_remote(
            self._directory or open_run_directory(self.path, self._storage_filesystem)
        )

    def get_best_checkpoint(self, metric: str, mode: Literal["min", "max"]) -> Checkpoint | None:
        """Return the checkpoint with the lowest or highest value of a metric.

        Only checkpoints that retention has not deleted are compared.

        Args:
            metric: Name of a reported metric; nested keys are joined with "/".
            mode: "min" or "max".

        Returns:
            The checkpoint, the newest one of several with the same value; None if the run has no
            checkpoints.

        Raises:
            ValueError: `mode` is neither "min" nor "max".
            KeyError: No checkpoint has this metric. The message lists the available metrics.

        Example:
            Get the checkpoint with the lowest validation loss:

                checkpoint = result.get_best_checkpoint("val/loss", mode="min")
        """
        if mode not in ("min", "max"):
            raise ValueError(f'mode={mode!r} must be "min" or "max".')
        if not self.best_checkpoints:
            return None
        scored = [(get_score(metrics, metric), c) for c, metrics in self.best_checkpoints]
        usable = [(value, checkpoint) for value, checkpoint in scored if value is not None]
        if not usable:
            reported = [metrics for _, metrics in self.best_checkpoints]
            available = describe_available(reported, missing_name=metric)
            raise KeyError(f"No checkpoint has the metric {metric!r}. {available}")
        sign = 1 if mode == "max" else -1
        return max(usable, key=lambda pair: (sign * pair[0], _get_report_index(pair[1])))[1]

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
        """Return the card that a notebook shows: status, metrics, curves, and checkpoints.

        If the run can no longer be read, or the result was created by hand, the card shows only the
        attributes of the result.
        """
        from drawbar._observe import html

        status, curves = "", {}
        try:
            history = self._read_history()
            status = history.state.status if history.events else ""
            curves = html.extract_curves(history, is_sampled=True)
        except (OSError, ValueError):
            pass
        return html.RunCard(
            title=os.path.basename(self.path.rstrip("/")),
            status="failed" if self.error else status,
            path=self.uri,
            error=str(self.error or ""),
            metrics=self.metrics or {},
            curves=curves,
            checkpoints=[
                (os.path.basename(checkpoint.path), metrics)
                for checkpoint, metrics in self.best_checkpoints
            ],
        ).render()


def _get_report_index(checkpoint: Checkpoint) -> int:
    return -1 if checkpoint.manifest is None else checkpoint.manifest.index


def _list_intact_checkpoints(checkpoints: CheckpointStore) -> list[Manifest]:
    """Return the intact checkpoints, and log a warning about each damaged one."""
    committed = checkpoints.list_committed()
    damage = {manifest.name: checkpoints.find_damage(manifest) for manifest in committed}
    if any(damage.values()):
        # List them again: retention may have deleted some of them while they were checked.
        for manifest in checkpoints.list_committed():
            if reason := damage.get(manifest.name):
                _logger.warning(
                    "%s is damaged and not part of the result: %s", manifest.name, reason
                )
    return [manifest for manifest in committed if not damage[manifest.name]]


set_public_module(globals(), module="drawbar.train", names=["Result"])
