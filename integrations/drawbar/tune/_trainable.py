"""as_trainable: run a trainer as a Ray Tune trial."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem
from ray import tune
from ray.tune.result import RESULT_DUPLICATE, SHOULD_CHECKPOINT
from ray.tune.trainable import FunctionTrainable

from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    Result,
    RunContext,
    RunHandle,
    TrainingFailedError,
    UserCallback,
)
from drawbar.train.backend import DriverContext, set_tune_trial
from drawbar.tune._compat import TrainingResult, get_last_result, get_trial_storage
from drawbar.tune._report_callback import tune_metrics
from drawbar.tune._resources import as_placement_group_factory
from drawbar.tune._result_files import keep_result_files
from drawbar.tune._trial import (
    apply_parameters,
    choose_run_name,
    merge_parameters,
    sorted_run_names,
    validate_param_space,
)

STOP_TIMEOUT_S = 10.0


def as_trainable(trainer: DataParallelTrainer) -> type[tune.Trainable]:
    """Return a Ray Tune trainable that runs a trainer in every trial.

    `trainer.as_trainable()` does the same.

    The names in `param_space` are arguments of the trainer. A dict replaces the given keys of a
    dict, or the given fields of a config, for example `{"scaling_config": {"num_workers": 2}}`.

    Each trial is a run in the trial's directory. Its workers are in the trial's placement group;
    nothing else uses resources. Each round becomes one report to Tune with the metrics of rank 0
    and the checkpoint, from which Tune can start this or another trial. Checkpoints are not copied.
    The trainer's `FailureConfig` restarts workers within the trial; Tune's restarts the trial.

    Args:
        trainer: Trainer to tune.

    Returns:
        A class for `ray.tune.Tuner`.

    Raises:
        ValueError: The trainer's `RunConfig` has `detached=True` or a `num_to_keep`.

    Example:
        ```python
        tuner = tune.Tuner(
            as_trainable(trainer),
            param_space={"train_loop_config": {"lr": tune.loguniform(1e-4, 1e-1)}},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=8),
        )
        ```
    """
    config = trainer.run_config
    if config.detached:
        raise ValueError(
            "as_trainable() does not support RunConfig(detached=True), because Tune must be able "
            "to stop the trial. Set detached=False."
        )
    if config.checkpoint_config.num_to_keep is not None:
        raise ValueError(
            f"CheckpointConfig(num_to_keep={config.checkpoint_config.num_to_keep}) would delete "
            "checkpoints from which Tune starts trials. Set it in the Tuner's "
            "ray.tune.RunConfig(checkpoint_config=ray.tune.CheckpointConfig(num_to_keep=...))."
        )
    kind, scaling, validation = type(trainer), trainer.scaling_config, trainer.validation_config

    class TrainerTrainable(RunTrainable):
        _name = kind.__name__

        @classmethod
        def default_resource_request(cls, config: dict[str, object]) -> tune.PlacementGroupFactory:
            validate_param_space(kind, config)
            trial_scaling = merge_parameters(scaling, config.get("scaling_config", scaling))
            return as_placement_group_factory(trial_scaling, validation)

    keep_result_files(RunTrainable)
    driver = DriverContext.capture(config.forward_env)
    trainable: type[tune.Trainable] = tune.with_parameters(
        TrainerTrainable, trainer=trainer, driver=driver
    )
    return trainable


class RunTrainable(FunctionTrainable):
    """Tune trainable whose steps are the rounds of a run.

    Ray Tune supports classes, whose checkpoints it copies, and functions, whose checkpoints are
    already in the storage. This class behaves like a function, without its thread and session.
    """

    def setup(  # type: ignore[override]  # tune.with_parameters gives the trainer
        self, config: dict[str, object], trainer: DataParallelTrainer, driver: DriverContext
    ) -> None:
        """Store the trainer. The first step starts the run: Tune sets the checkpoint before it."""
        self._trainer = trainer
        self._driver = driver
        self._reset()

    def _reset(self) -> None:
        self._run: RunHandle | None = None
        self._rounds = ReportQueue()
        self._start_from: str | None = None
        self._saved = TuneCheckpoint(None, {})

    def step(self) -> dict[str, object]:
        """Wait for the next round of reports, or for the end of the run."""
        if self._run is None:
            self._run = self._start_run()
            threading.Thread(
                target=self._rounds.wait_for_end, args=[self._run], daemon=True
            ).start()
        metrics, checkpoint = self._rounds.get()
        if metrics is None:
            return {RESULT_DUPLICATE: True}  # the run has ended with the previous round
        if checkpoint is not None:
            tune_checkpoint = tune.Checkpoint(
                self._checkpoint_path(self._run.name, checkpoint), self._filesystem
            )
            self._saved = TuneCheckpoint(tune_checkpoint, {})
        return tune_metrics(metrics, checkpoint) | {SHOULD_CHECKPOINT: checkpoint is not None}

    def save(self, checkpoint_dir: str | None = None) -> TrainingResult:
        """Return the latest checkpoint with its result."""
        if not self._saved.metrics:
            self._saved.metrics = get_last_result(self)
        return self._saved

    def load_checkpoint(self, checkpoint_result: Any) -> None:
        """Set the checkpoint from which the run starts."""
        self._start_from = checkpoint_result.checkpoint.path

    def reset_config(self, new_config: dict[str, object]) -> bool:
        """Switch to another trial in the same process."""
        self.cleanup()
        self._reset()
        return True

    def cleanup(self) -> None:
        """Stop the run gracefully. None of its processes is alive afterwards."""
        if self._run is not None:
            self._run.stop(save=False)
            with contextlib.suppress(TimeoutError, TrainingFailedError):
                self._run.wait(STOP_TIMEOUT_S)

    @property
    def _trial_directory(self) -> str:
        return get_trial_storage(self)[0]

    @property
    def _filesystem(self) -> FileSystem:
        return get_trial_storage(self)[1]

    @property
    def _remote_filesystem(self) -> FileSystem | None:
        """Filesystem for Drawbar's arguments: None for local paths."""
        return None if isinstance(self._filesystem, LocalFileSystem) else self._filesystem

    def _start_run(self) -> RunHandle:
        set_tune_trial(
            name=self.trial_name,
            id=self.trial_id,
            directory=self._trial_directory,
            resources=self.trial_resources,
        )
        name, start_from = self._choose_run()
        run_config, overrides = self._trainer.run_config, {}
        if start_from is not None:
            overrides["resume_from_checkpoint"] = start_from
        run_config = dataclasses.replace(
            run_config,
            name=name,
            storage_path=self._trial_directory,
            storage_filesystem=self._remote_filesystem,
            callbacks=[*run_config.callbacks, self._rounds],
            resume="auto",
        )
        trainer = apply_parameters(self._trainer, self.config, run_config=run_config, **overrides)
        with self._driver.apply():  # this process may be on another node than the Tuner
            return trainer.start()

    def _choose_run(self) -> tuple[str, Checkpoint | None]:
        """Return the name of the run to start or resume, and its start checkpoint, if any."""
        selector = FileSelector(self._trial_directory, allow_not_found=True)
        infos = self._filesystem.get_file_info(selector)
        runs = sorted_run_names(info.base_name for info in infos if info.type is FileType.Directory)
        latest = self._latest_checkpoint_path(runs[-1]) if runs else None
        name = choose_run_name(runs, self._start_from, latest_checkpoint=latest)
        if name in runs or self._start_from is None:
            return name, None
        return name, Checkpoint(self._start_from, self._remote_filesystem)

    def _latest_checkpoint_path(self, name: str) -> str | None:
        """Return the path of a run's latest checkpoint, or None."""
        try:
            result = Result.from_path(f"{self._trial_directory}/{name}", self._remote_filesystem)
        except FileNotFoundError:
            return None
        return self._checkpoint_path(name, result.checkpoint) if result.checkpoint else None

    def _checkpoint_path(self, run: str, checkpoint: Checkpoint) -> str:
        """Return the path of a run's checkpoint in the trial's directory, in Tune's notation."""
        return f"{self._trial_directory}/{run}/{checkpoint.path.rpartition('/')[2]}"


class TuneCheckpoint(TrainingResult):
    """Checkpoint for Tune that is equal to any other with the same path.

    When Tune pauses a trial, it requests and registers the latest checkpoint again. Objects of
    Tune's own class would be unequal, so `num_to_keep` would delete one because of the other.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TuneCheckpoint) and self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    @property
    def _path(self) -> str | None:
        return self.checkpoint.path if self.checkpoint else None


class ReportQueue(UserCallback):
    """Queue of the rounds of a run in order, followed by its end."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, object]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Add a round to the queue."""
        self._queue.put((metrics, checkpoint))

    def wait_for_end(self, run: RunHandle) -> None:
        """Wait for the run and add its end to the queue."""
        try:
            run.wait()
        except Exception as error:
            self._queue.put(error)
        else:
            self._queue.put((None, None))

    def get(self) -> tuple[list[dict[str, object]] | None, Checkpoint | None]:
        """Wait for the next round. The metrics are None when the run has ended.

        Raises:
            Exception: Error that ended the run.
        """
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        metrics, checkpoint = item
        return metrics, checkpoint
