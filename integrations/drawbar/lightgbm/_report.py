"""LightGBM's callback that reports: metrics after every round, a checkpoint now and then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightgbm import Booster
from lightgbm.callback import CallbackEnv

from drawbar.lightgbm._backend import at_end
from drawbar.lightgbm._evaluation import GlobalEvaluation
from drawbar.train import Checkpoint, checkpoint_dir, get_context, report

Metrics = Mapping[str, Any]


class RayTrainReportCallback:
    """Reports the metrics of every round, and saves the booster every so often.

    Pass it to `lightgbm.train(..., callbacks=[...])`, or to the `fit` of LightGBM's estimators. All
    ranks must have it. The metrics are global, also for the callbacks that come after it, so that
    `lightgbm.early_stopping` ends all ranks on one round; see `GlobalEvaluation`.

    Args:
        metrics: What to report: names of metrics, or a dict from the reported name to the metric's.
            A metric is named `<data>-<metric>`, such as "valid_0-binary_logloss"; those of
            `lightgbm.cv` end in "-mean" and "-stdv". Default: all.
        filename: Name of the booster's file in a checkpoint; LightGBM's own text format.
        frequency: Save every so many rounds; 0 for never.
        checkpoint_at_end: Save after the last round. If training stopped early, that is when the
            training function returns, with one report more.
        results_postprocessing_fn: Called with the metrics before they are reported; gives what is
            to be reported instead.
    """

    CHECKPOINT_NAME = "model.txt"
    order = GlobalEvaluation.order
    before_iteration = False

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, Any]], Metrics] | None = None,
    ) -> None:
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 0:
            raise ValueError(
                f"frequency must be a number of rounds, 0 or more, found {frequency!r}"
            )
        if not isinstance(metrics, str | Sequence | Mapping | None):
            raise TypeError(f"metrics must be names of metrics, a dict or None, found {metrics!r}")
        self._metrics = [metrics] if isinstance(metrics, str) else metrics
        self._filename = filename
        self._frequency = frequency
        self._at_end = checkpoint_at_end
        self._postprocess = results_postprocessing_fn
        self._evaluate = GlobalEvaluation()
        self._unsaved: tuple[Booster, Metrics] | None = None

    def __call__(self, env: CallbackEnv) -> None:
        """Report the round that has ended."""
        self._evaluate(env)
        metrics = self._chosen(_named(env))
        rounds = env.iteration + 1 - env.begin_iteration
        due = self._frequency > 0 and rounds % self._frequency == 0
        last = self._at_end and env.iteration + 1 == env.end_iteration
        if not isinstance(env.model, Booster):  # of lightgbm.cv, which has many
            report(metrics)
        elif due or last:
            self._unsaved = None
            self._save(env.model, metrics)
        else:
            if self._at_end and self._unsaved is None:
                at_end(self._save_unsaved)
            self._unsaved = (env.model, metrics)
            report(metrics)

    def _chosen(self, metrics: dict[str, Any]) -> Metrics:
        if isinstance(self._metrics, Mapping):
            chosen = {name: metrics[metric] for name, metric in self._metrics.items()}
        elif self._metrics is not None:
            chosen = {name: metrics[name] for name in self._metrics}
        else:
            chosen = metrics
        return self._postprocess(chosen) if self._postprocess else chosen

    def _save(self, booster: Booster, metrics: Metrics) -> None:
        if get_context().get_world_rank() > 0:
            report(metrics)
            return
        with checkpoint_dir() as path:
            save(booster, path / self._filename)
            report(metrics, checkpoint=path)

    def _save_unsaved(self) -> None:
        if self._unsaved is not None:
            self._save(*self._unsaved)
            self._unsaved = None

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Load the booster of a checkpoint.

        Args:
            checkpoint: Of a run whose callback saved it.
            filename: As the callback had it.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
        """
        with checkpoint.as_directory() as directory:
            path = Path(directory, filename)
            if not path.exists():
                files = ", ".join(sorted(each.name for each in Path(directory).iterdir())) or "none"
                raise FileNotFoundError(
                    f"{checkpoint.path} has no {filename!r}; its files: {files}. Pass the "
                    "filename that the callback was made with"
                )
            return load(path)


def save(booster: Booster, path: Path) -> None:
    """Save all trees, and beside them which round was best, which LightGBM's own file has not."""
    booster.save_model(path, num_iteration=-1)
    _best(path).write_text(json.dumps({"best_iteration": booster.best_iteration}))


def load(path: Path) -> Booster:
    """Load a booster, which predicts by its best round if one was found."""
    booster = Booster(model_file=path)
    if _best(path).exists():
        booster.best_iteration = json.loads(_best(path).read_text())["best_iteration"]
    return booster


def _best(path: Path) -> Path:
    return path.with_suffix(".best.json")


def _named(env: CallbackEnv) -> dict[str, Any]:
    """Give the round's metrics as `<data>-<metric>`; those of `lightgbm.cv` with their spread."""
    metrics: dict[str, Any] = {}
    for data, metric, value, _, *spread in env.evaluation_result_list or ():
        name = f"{data}-{metric}"
        if spread:
            metrics[f"{name}-mean"], metrics[f"{name}-stdv"] = value, spread[0]
        else:
            metrics[name] = value
    return metrics
