"""A trainer as Ray Tune takes it: a class whose steps are the rounds of reports of a run."""

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
from ray.tune.trainable.function_trainable import (  # type: ignore[attr-defined]  # not public
    _TrainingResult,  # what save() gives
)

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
from drawbar.tune._report_callback import tune_metrics
from drawbar.tune._resources import as_placement_group_factory
from drawbar.tune._result_files import patch_result_restore
from drawbar.tune._trial import (
    apply_parameters,
    choose_run_name,
    merge_parameters,
    sorted_run_names,
    validate_param_space,
)

STOP_TIMEOUT_S = 10.0


def as_trainable(trainer: DataParallelTrainer) -> type[tune.Trainable]:
    """Give what `ray.tune.Tuner` takes for a trainer. `trainer.as_trainable()` is the same.

        tuner = tune.Tuner(
            trainer.as_trainable(),
            param_space={"train_loop_config": {"lr": tune.loguniform(1e-4, 1e-1)}},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=8),
        )

    The names in `param_space` are arguments of the trainer. A dict changes those keys of a dict
    that it has, or those fields of a config: `{"scaling_config": {"num_workers": 2}}`.

    Each trial is a run in the trial's folder, and its workers lie in the trial's placement group;
    nothing else takes resources. Each round of reports is one of Tune's: rank 0's metrics, and the
    checkpoint, which Tune can start this or another trial from. It is not copied. The trainer's
    `FailureConfig` restarts workers within the trial; Tune's restarts the trial.

    Raises:
        ValueError: The trainer's run cannot be a trial's; the message says why.
    """
    config = trainer.run_config
    if config.detached:
        raise ValueError(
            "RunConfig(detached=True) outlives its driver, and a trial must end when Tune ends it; "
            "set detached=False"
        )
    if config.checkpoint_config.num_to_keep is not None:
        raise ValueError(
            f"CheckpointConfig.num_to_keep={config.checkpoint_config.num_to_keep} would delete "
            "checkpoints that Tune starts trials from; set it in the Tuner's "
            "ray.tune.RunConfig(checkpoint_config=ray.tune.CheckpointConfig(num_to_keep=...))"
        )
    kind, scaling, validation = type(trainer), trainer.scaling_config, trainer.validation_config

    class TrainerTrainable(RunTrainable):
        _name = kind.__name__

        @classmethod
        def default_resource_request(cls, config: dict[str, object]) -> tune.PlacementGroupFactory:
            validate_param_space(kind, config)
            wanted = merge_parameters(scaling, config.get("scaling_config", scaling))
            return as_placement_group_factory(wanted, validation)

    patch_result_restore()
    driver = DriverContext.capture(config.forward_env)
    trainable: type[tune.Trainable] = tune.with_parameters(
        TrainerTrainable, trainer=trainer, driver=driver
    )
    return trainable


class RunTrainable(FunctionTrainable):
    """A trial that is a run.

    Ray Tune knows classes, whose checkpoints it copies, and functions, which report checkpoints
    that lie in the storage already. This is a class of the second kind, without the function's
    thread and session.
    """

    def setup(  # type: ignore[override]  # tune.with_parameters gives the trainer
        self, config: dict[str, object], trainer: DataParallelTrainer, driver: DriverContext
    ) -> None:
        """Take the trainer; the run starts with the first step, when Tune has said from where."""
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
            return {RESULT_DUPLICATE: True}  # the last one was the last
        if checkpoint is not None:
            tune_checkpoint = tune.Checkpoint(
                self._checkpoint_path(self._run.name, checkpoint), self._filesystem
            )
            self._saved = TuneCheckpoint(tune_checkpoint, {})
        return tune_metrics(metrics, checkpoint) | {SHOULD_CHECKPOINT: checkpoint is not None}

    def save(self, checkpoint_dir: str | None = None) -> _TrainingResult:
        """Give the newest checkpoint, with the result that it belongs to."""
        if not self._saved.metrics:
            self._saved.metrics = dict(self._last_result or {})
        return self._saved

    def load_checkpoint(self, checkpoint_result: Any) -> None:
        """Take the checkpoint that the run is to start from."""
        self._start_from = checkpoint_result.checkpoint.path

    def reset_config(self, new_config: dict[str, object]) -> bool:
        """Be another trial, in the same process."""
        self.cleanup()
        self._reset()
        return True

    def cleanup(self) -> None:
        """End the run in order: when this returns, none of its processes is alive."""
        if self._run is not None:
            self._run.stop(save=False)
            with contextlib.suppress(TimeoutError, TrainingFailedError):
                self._run.wait(STOP_TIMEOUT_S)

    # -- the run

    @property
    def _trial_directory(self) -> str:
        assert self._storage is not None  # Tune has given it
        return self._storage.trial_fs_path

    @property
    def _filesystem(self) -> FileSystem:
        assert self._storage is not None
        return self._storage.storage_filesystem

    @property
    def _remote_filesystem(self) -> FileSystem | None:
        """The filesystem as Drawbar takes it: None for local paths."""
        return None if isinstance(self._filesystem, LocalFileSystem) else self._filesystem

    def _start_run(self) -> RunHandle:
        set_tune_trial(
            name=self.trial_name,
            id=self.trial_id,
            directory=self._trial_directory,
            resources=self.trial_resources,
        )
        name, start_from = self._choose_run()
        run_config, changed = self._trainer.run_config, {}
        if start_from is not None:
            changed["resume_from_checkpoint"] = start_from
        run_config = dataclasses.replace(
            run_config,
            name=name,
            storage_path=self._trial_directory,
            storage_filesystem=self._remote_filesystem,
            callbacks=[*run_config.callbacks, self._rounds],
            resume="auto",
        )
        trainer = apply_parameters(self._trainer, self.config, run_config=run_config, **changed)
        with self._driver.apply():  # this process may be on another node than the Tuner's
            return trainer.start()

    def _choose_run(self) -> tuple[str, Checkpoint | None]:
        """Give the name of the run to go on with, and the checkpoint that it begins at, if any."""
        selector = FileSelector(self._trial_directory, allow_not_found=True)
        infos = self._filesystem.get_file_info(selector)
        runs = sorted_run_names(info.base_name for info in infos if info.type is FileType.Directory)
        newest = self._latest_checkpoint_path(runs[-1]) if runs else None
        name = choose_run_name(runs, self._start_from, latest_checkpoint=newest)
        if name in runs or self._start_from is None:
            return name, None
        return name, Checkpoint(self._start_from, self._remote_filesystem)

    def _latest_checkpoint_path(self, name: str) -> str | None:
        """Give the path of a run's newest checkpoint."""
        try:
            result = Result.from_path(f"{self._trial_directory}/{name}", self._remote_filesystem)
        except FileNotFoundError:
            return None
        return self._checkpoint_path(name, result.checkpoint) if result.checkpoint else None

    def _checkpoint_path(self, run: str, checkpoint: Checkpoint) -> str:
        """Give the path of a run's checkpoint as Tune writes it, below the trial's folder."""
        return f"{self._trial_directory}/{run}/{checkpoint.path.rpartition('/')[2]}"


class TuneCheckpoint(_TrainingResult):
    """A checkpoint for Tune, equal to any other of the same path.

    Tune asks again for the newest one when it pauses a trial, and registers it again. Objects of
    its own class are unequal then, so that `num_to_keep` has one of them deleted for the other.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TuneCheckpoint) and self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    @property
    def _path(self) -> str | None:
        return self.checkpoint.path if self.checkpoint else None


class ReportQueue(UserCallback):
    """The rounds of reports of a run, in order, and then its end."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, object]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Keep a round until it is asked for."""
        self._queue.put((metrics, checkpoint))

    def wait_for_end(self, run: RunHandle) -> None:
        """Wait for the run, and keep how it ended."""
        try:
            run.wait()
        except Exception as error:
            self._queue.put(error)
        else:
            self._queue.put((None, None))

    def get(self) -> tuple[list[dict[str, object]] | None, Checkpoint | None]:
        """Wait for the next round; there are no metrics when the run is over.

        Raises:
            Exception: That ended the run.
        """
        said = self._queue.get()
        if isinstance(said, Exception):
            raise said
        metrics, checkpoint = said
        return metrics, checkpoint
