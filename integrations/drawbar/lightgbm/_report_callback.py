"""Report boosting rounds, save the booster, and load it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

from lightgbm import Booster
from lightgbm.callback import CallbackEnv

from drawbar._boosting.checkpoint import BoosterCheckpoint, load_model
from drawbar._boosting.progress import BoostingProgress, EvaluationHistory
from drawbar._boosting.report_callback import MetricSelection, RoundReporter
from drawbar.lightgbm._backend import on_success
from drawbar.lightgbm._evaluation import GlobalEvaluation
from drawbar.train import Checkpoint, ValidationTaskConfig, set_progress


class RayTrainReportCallback:
    """Report the metrics of every round, and save the booster every n rounds and at the end.

    Pass it to `lightgbm.train(..., callbacks=[...])`, or to the `fit` of LightGBM's estimators, on
    all ranks. The metrics are global, also for later callbacks, so that `lightgbm.early_stopping`
    ends all ranks at the same round; see `GlobalEvaluation`. The driver receives a report within a
    quarter of a second.

    Args:
        metrics: Metrics to report: one name or several as `<dataset>-<metric>`, or a dict from
            reported name to this name. Names from `lightgbm.cv` end in "-mean" and "-stdv".
            Default: all.
        filename: Filename of the booster in a checkpoint, in LightGBM's text format.
        frequency: Save a checkpoint every n rounds; 0 to save only at the end.
        checkpoint_at_end: Whether to save a checkpoint when the training function returns, unless
            the last round was saved.
        results_postprocessing_fn: Called with the evaluations so far, as
            `{"<dataset>-<metric>": [value of each round]}`. Returns the metrics to report in place
            of the latest values.
        validation: Whether to validate each checkpoint. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.

    Example:
        ```python
        callback = RayTrainReportCallback(metrics="valid-auc", frequency=10)
        drawbar.lightgbm.train(params, train_set, callbacks=[callback])
        ```
    """

    CHECKPOINT_NAME = "model.txt"
    order = GlobalEvaluation.order
    before_iteration = False

    def __init__(
        self,
        metrics: MetricSelection | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, list[float]]], Mapping[str, object]]
        | None = None,
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        self.filename = filename
        self._reports = RoundReporter(
            metrics, frequency, checkpoint_at_end, results_postprocessing_fn, validation
        )
        self._global_evaluation = GlobalEvaluation()
        self._maximized: set[str] = set()
        self._history: EvaluationHistory = {}
        self._rounds = 0
        self._first_round: int = 0
        self._model: Booster | None = None
        self._best_iteration: int | None = None

    @property
    def runs_user_code(self) -> bool:
        """True if a subclass or a `results_postprocessing_fn` adds user code."""
        return type(self) is not RayTrainReportCallback or self._reports.runs_user_code

    def restore(self, progress: BoostingProgress) -> int:
        """Continue after the rounds of an earlier attempt. Return the first recorded round."""
        self._rounds, self._history = progress.rounds, copy.deepcopy(progress.history)
        self._maximized = set(progress.details.get("maximized", ()))
        self._first_round = progress.details.get("begin", 0)
        self._model = None  # of an earlier attempt, if this object is reused
        self._best_iteration = None
        self._reports.on_resume(progress.rounds)
        return self._first_round

    def end_without_rounds(self, model: Booster) -> None:
        """Save a restored model that has no remaining rounds, if only another run saved it."""
        self._model = model
        on_success(self._finish)

    def __call__(self, env: CallbackEnv) -> None:
        """Report the round that has ended."""
        self._global_evaluation(env)
        self._record(env)
        if self._model is None:
            on_success(self._finish)
        # lightgbm.cv passes several boosters, which are not saved.
        self._model = env.model if isinstance(env.model, Booster) else None
        self._best_iteration = None if self._model is None else self._model.best_iteration
        set_progress(self._rounds, env.end_iteration, unit="rounds")
        save = None if self._model is None else self._save
        self._reports.on_round_end(self._rounds, self._history, save)

    def _record(self, env: CallbackEnv) -> None:
        self._rounds = env.iteration + 1
        for data, metric, value, maximize, *stdv in env.evaluation_result_list or ():
            if maximize:
                self._maximized.add(metric)
            values = {"": value} if not stdv else {"-mean": value, "-stdv": stdv[0]}
            for suffix, suffix_value in values.items():
                by_metric = self._history.setdefault(data, {})
                by_metric.setdefault(metric + suffix, []).append(suffix_value)

    def _finish(self) -> None:
        if self._model is not None:
            # LightGBM sets the best iteration after the callbacks of the last round.
            has_changed = self._best_iteration not in (None, self._model.best_iteration)
            self._reports.on_training_end(
                self._rounds, self._history, self._save, has_changed=has_changed
            )

    def _save(self, directory: Path) -> None:
        assert self._model is not None
        self._model.save_model(directory / self.filename, num_iteration=-1)
        state = {
            "best_iteration": self._model.best_iteration,
            "maximized": sorted(self._maximized),
            "begin": self._first_round,
        }
        BoostingProgress(self._rounds, self._history, state).save(directory)

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Load the booster of a checkpoint, with its best round if early stopping determined one.

        Args:
            checkpoint: Checkpoint that this callback saved.
            filename: Filename that was passed to the callback.

        Raises:
            FileNotFoundError: The checkpoint has no model file.
        """
        booster = load_model(checkpoint, filename, lambda path: Booster(model_file=path))
        progress = BoostingProgress.load(checkpoint)
        if progress is not None:
            booster.best_iteration = progress.details.get("best_iteration", -1)
        return booster


class LightGBMCheckpoint(BoosterCheckpoint[Booster]):
    """Checkpoint with one booster, as saved by `RayTrainReportCallback`.

    Args:
        path: Directory or URI of the checkpoint.
        filesystem: Filesystem of `path`. Default: derived from the path.

    Example:
        ```python
        checkpoint = LightGBMCheckpoint.from_model(booster)
        drawbar.train.report({"error": error}, checkpoint=checkpoint)
        booster = LightGBMCheckpoint(result.checkpoint.path).get_model()
        ```
    """

    MODEL_FILENAME = RayTrainReportCallback.CHECKPOINT_NAME
    CALLBACK = RayTrainReportCallback
