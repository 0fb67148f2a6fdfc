"""MLflow: log reports to a tracking server or store."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from drawbar.trackers._config_values import flatten_config
from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._points import Point, Ranks
from drawbar.trackers._tracker import Tracker

RUN_ID_TAG = "drawbar.run_id"

# The limits of MLflow's REST API.
_MAX_METRICS_PER_CALL = 1000
_MAX_PARAMS_PER_CALL = 100
_MAX_PARAM_BYTES = 500
_MAX_NAME_LENGTH = 250
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_VALID_NAME = re.compile(r"[\w.\- :]+(/[\w.\- :]+)*", re.ASCII)


class MLflow(Tracker):
    """Log the reports of a run to MLflow.

    All starts of a Drawbar run are one MLflow run, which has the tag `drawbar.run_id`. The step is
    the number of the report. MLflow cannot delete values: if a restart repeats reports, their steps
    have an earlier and a later value. MLflow does not allow all characters in names of metrics: "_"
    replaces the others, and a hash is appended.

    Args:
        tracking_uri: Tracking server or store, such as "http://host:5000" or
            "sqlite:////shared/mlflow.db". Default: the environment variable `MLFLOW_TRACKING_URI`,
            or `mlflow.db` in the working directory.
        experiment: Name of the experiment, which is created if it does not exist. Default: the
            environment variable `MLFLOW_EXPERIMENT_NAME`, or "Default".
        ranks: Reports to send: a rank, such as 0; the "mean", "min", or "max" over all
            ranks; or "all", which adds a prefix such as "rank_3/" to the metric names.
        finish_timeout: Maximum time in seconds, or a timedelta, for which the end of the run waits
            for the tracker.

    Raises:
        ImportError: mlflow is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid.

    Example:
        ```python
        run_config = RunConfig(name="mnist", callbacks=[MLflow("http://host:5000")])
        ```
    """

    kind = "mlflow"
    package = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        *,
        ranks: Ranks = 0,
        finish_timeout: float | timedelta = 30,
    ) -> None:
        super().__init__(ranks=ranks, finish_timeout=finish_timeout)
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self.tracking_uri = _make_absolute(uri)
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"

    def get_options(self) -> dict[str, str | None]:
        """Return the destination."""
        return {"tracking_uri": self.tracking_uri, "experiment": self.experiment}

    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        """Connect to the run of the tracker."""
        return _MLflowRun(self.tracking_uri, self.experiment, run, cursor)


def _make_absolute(uri: str) -> str:
    """Return a URI that does not depend on the working directory, which detached runs change."""
    prefix, separator, path = uri.partition("sqlite:///")
    if separator and not prefix and path and not path.startswith(("/", ":memory:")):
        return f"sqlite:///{Path(path).absolute()}"
    return uri if "://" in uri or uri == "databricks" else str(Path(uri).expanduser().absolute())


class _MLflowRun(Connection):
    """One run of MLflow.

    Args:
        tracking_uri: Tracking server or store.
        experiment: Name of the experiment.
        run: Run whose reports are sent.
        cursor: Stored position.
    """

    def __init__(self, tracking_uri: str, experiment: str, run: TrackedRun, cursor: Cursor) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        experiment_id = self._get_experiment(experiment)
        found = self._client.search_runs(
            [experiment_id], f"tags.`{RUN_ID_TAG}` = '{run.run_id}'", max_results=1
        )
        # A deleted run has no points, so everything is sent again.
        super().__init__(cursor if found else Cursor())
        self._resend_index = self.cursor.resend_index
        # By metric: points that MLflow has, although the cursor is before them.
        self._sent: dict[str, set[tuple[int, int]]] | None = {} if found else None
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._create_run(experiment_id, run)

    def _get_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has created it at the same time
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _create_run(self, experiment_id: str, run: TrackedRun) -> str:
        from mlflow.entities import Param

        tags = {RUN_ID_TAG: run.run_id, "drawbar.path": run.path}
        created = self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        run_id = str(created.info.run_id)
        params = [
            Param(make_metric_name(name), str(value)[:_MAX_PARAM_BYTES])
            for name, value in flatten_config(run.config).items()
        ]
        for start in range(0, len(params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS_PER_CALL])
        return run_id

    def write(self, points: Sequence[Point]) -> None:
        metrics = list(self._make_metrics(points))
        for start in range(0, len(metrics), _MAX_METRICS_PER_CALL):
            batch = metrics[start : start + _MAX_METRICS_PER_CALL]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def _make_metrics(self, points: Sequence[Point]) -> Iterator[Any]:
        from mlflow.entities import Metric

        for point in points:
            timestamp = int(point.time * 1000)
            for name, value in point.values.items():
                key = make_metric_name(name)
                if (point.index, timestamp) not in self._get_sent(key):
                    yield Metric(key, value, timestamp, point.index)

    def _get_sent(self, key: str) -> set[tuple[int, int]]:
        """Return the points of a metric that an earlier connection sent after its last cursor."""
        if self._sent is None:
            return set()
        if key not in self._sent:
            history = self._client.get_metric_history(self._run_id, key)
            self._sent[key] = {
                (metric.step, metric.timestamp)
                for metric in history
                if metric.step >= self._resend_index
            }
        return self._sent[key]

    def flush(self) -> bool:
        return True  # log_batch has returned, so the store has the points

    def close(self, outcome: str) -> None:
        if outcome:
            self._client.set_terminated(self._run_id, _STATUS.get(outcome))


def make_metric_name(name: str) -> str:
    """Return a name that MLflow accepts. Different names remain different."""
    parts = name.split("/")
    is_valid = _VALID_NAME.fullmatch(name) and not {".", ".."} & set(parts)
    if is_valid and len(name) <= _MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    safe = re.sub(r"[^\w.\- :]|^\.+$", "_", name.replace("/", "_"), flags=re.ASCII)
    return f"{safe[: _MAX_NAME_LENGTH - len(digest) - 1]}-{digest}"
