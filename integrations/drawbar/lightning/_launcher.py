"""Run a Trainer that was created in the driver on Ray workers.

Lightning calls the strategy's launcher to run `fit`, `validate`, `test`, and `predict`. This
launcher starts a run of `drawbar.torch.TorchTrainer` whose training function calls the same method
on a copy of the Trainer with the same arguments. Rank 0 returns the Trainer's state, which is then
loaded into the driver's Trainer.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypedDict, cast

import cloudpickle
import numpy as np
import torch

from drawbar.lightning._callback_state import CallbackState, collect_callbacks
from drawbar.lightning._model_checkpoint import reject_weights_only
from drawbar.lightning._resume import is_tuner_run
from drawbar.torch import TorchConfig, TorchTrainer
from drawbar.train import Checkpoint, Result, RunConfig, ScalingConfig, UserAbort, runs

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


@dataclass(frozen=True)
class WorkerLaunchConfig:
    """Configuration of the workers that a strategy starts."""

    scaling_config: ScalingConfig
    run_config: RunConfig

    @classmethod
    def from_arguments(
        cls,
        num_workers: int | tuple[int, int] | None,
        use_gpu: bool,
        scaling_config: ScalingConfig | None,
        run_config: RunConfig | None,
    ) -> Self | None:
        """Create the configuration from a strategy's arguments; None if they start no workers.

        Raises:
            TypeError, ValueError: An argument is invalid or conflicts with another one.
        """
        if scaling_config is not None and (num_workers is not None or use_gpu):
            raise ValueError(
                "num_workers and use_gpu cannot be combined with scaling_config. Use "
                f"ScalingConfig(num_workers={num_workers}, use_gpu={use_gpu})."
            )
        if num_workers is not None:
            scaling_config = ScalingConfig(num_workers=num_workers, use_gpu=use_gpu)
        if scaling_config is not None:
            if scaling_config.max_workers == 0:
                raise ValueError(
                    "num_workers=0 trains in this process, which needs no drawbar.lightning "
                    "strategy. Remove strategy= from the Trainer."
                )
            return cls(scaling_config, run_config or RunConfig())
        if use_gpu or run_config is not None:
            argument = "use_gpu" if use_gpu else "run_config"
            raise ValueError(
                f"{argument} cannot be used without num_workers. Set num_workers=N, or, if this "
                "code runs in a training function of TorchTrainer, set scaling_config= and "
                "run_config= of that trainer."
            )
        return None

    def run_config_for(self, trainer: Trainer) -> RunConfig:
        """Return the run configuration of one call. Only `fit` uses the run's name and resumes."""
        if trainer.state.fn == "fit":
            return self.run_config
        return dataclasses.replace(self.run_config, name=None, resume="auto")


class ProcessGroupOptions(TypedDict, total=False):
    """Process group options set by the user, as arguments of `TorchConfig`."""

    backend: str
    timeout_s: float


class RayLauncher:
    """Launcher that runs the methods of a driver's Trainer on Ray workers."""

    is_interactive_compatible = True

    def __init__(self, launch: WorkerLaunchConfig, torch_config: ProcessGroupOptions) -> None:
        self._launch = launch
        self._torch_config = torch_config
        self._newest: Checkpoint | None = None  # of the last `fit`

    def launch(
        self, function: Callable[..., object], *args: object, trainer: Trainer, **kwargs: object
    ) -> Any:
        """Run a Trainer method on the workers and return rank 0's result.

        Raises:
            ValueError: The caller is Lightning's `Tuner`, whose results would stay in the workers.
            TrainingFailedError: A worker failed; see `TorchTrainer.fit`.
            UserAbort: Ctrl-C stopped the run.
        """
        if is_tuner_run(trainer):
            raise ValueError(
                f"Lightning's Tuner does not support {type(trainer.strategy).__name__}"
                "(num_workers=...): its results would stay in the workers. Use a Trainer without "
                "strategy=, or run the Tuner in a training function of drawbar.torch.TorchTrainer."
            )
        reject_weights_only(trainer, cast("Any", trainer.strategy).package)
        restore_state = capture_reproducibility_state()

        call = inspect.signature(function).bind(*args, **kwargs)
        previous = self._newest
        if previous is None and call.arguments.get("ckpt_path") == "last":
            previous = find_newest_of_named_run(self._launch.run_config)

        def run_trainer() -> TrainerResult:
            restore_state()
            return _run_in_worker(trainer, args, kwargs, previous)

        run = TorchTrainer(
            run_trainer,
            torch_config=TorchConfig(**self._torch_config),
            scaling_config=self._launch.scaling_config,
            run_config=self._launch.run_config_for(trainer),
        )
        try:
            finished = run.fit()
        except UserAbort as abort:
            print(abort)  # Lightning ends the process without a message
            raise
        if trainer.state.fn == "fit":
            self._newest = finished.checkpoint
        outcomes = finished.return_values
        outcome = outcomes[0]
        if outcome is None:
            raise RuntimeError(
                "Training finished, but the result of rank 0 could not be pickled. The error is "
                "logged above."
            )
        outcome.apply_to(trainer)
        if outcome.state.fn != "predict":
            return outcome.result
        return interleave_predictions([item.result for item in outcomes], outcome.dataloaders)

    def kill(self, signum: object) -> None:
        """Do nothing. Workers end with their run."""


def find_newest_of_named_run(run_config: RunConfig) -> Checkpoint | None:
    """Return the newest checkpoint of the run with this name, if there is one."""
    if run_config.name is None:
        return None
    filesystem = run_config.storage_filesystem
    try:
        if run_config.storage_path is None:
            path = runs.find_run(run_config.name, filesystem).path
        else:
            path = f"{run_config.storage_path}/{run_config.name}"
        return Result.from_path(path, filesystem).checkpoint
    except (FileNotFoundError, LookupError):
        return None


def _run_in_worker(
    trainer: Trainer,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    previous: Checkpoint | None,
) -> TrainerResult:
    """Run the method that was called on the driver's Trainer and return its result."""
    strategy: Any = trainer.strategy
    callbacks = list(cast("Any", trainer).callbacks)
    strategy.attach_to_worker(trainer, previous)
    assert trainer.state.fn is not None
    method = getattr(trainer, trainer.state.fn.value)  # fit, validate, test or predict
    result = method(*args, **kwargs)
    return TrainerResult.from_trainer(trainer, callbacks, result)


def capture_reproducibility_state() -> Callable[[], None]:
    """Return a function that gives another process the random state and torch flags of this one."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark

    return restore


@dataclass(frozen=True)
class TrainerResult:
    """State of a worker's Trainer after a call, except for files on disk."""

    result: object
    dataloaders: int
    state: object
    metrics: dict[str, dict[str, object]]
    callbacks: list[CallbackState]
    loggers: list[bytes | None]
    progress: dict[str, object]
    weights: dict[str, object] | None

    @classmethod
    def from_trainer(cls, trainer: Any, callbacks: Sequence[Callback], result: Any) -> Self:
        """Collect the state of a Trainer after a call.

        Args:
            trainer: The worker's Trainer.
            callbacks: The driver's callbacks, as received by the worker.
            result: Return value of the call.
        """
        is_fit, is_predict = trainer.state.fn == "fit", trainer.state.fn == "predict"
        return cls(
            result=result,
            dataloaders=trainer.predict_loop.num_dataloaders if is_predict else 1,
            state=trainer.state,
            metrics={name: dict(getattr(trainer, name)) for name in _METRIC_ATTRIBUTES},
            callbacks=collect_callbacks(trainer, callbacks),
            loggers=[_try_pickle(logger) for logger in trainer.loggers],
            progress=trainer.fit_loop.state_dict() if is_fit else {},
            weights=trainer.strategy.trained_weights,
        )

    def apply_to(self, trainer: Any) -> None:
        """Load the state into the driver's Trainer, and the weights into its module."""
        trainer.state = self.state
        for name, values in self.metrics.items():
            known = getattr(trainer, name)
            known.clear()
            known.update(values)
        is_fit = trainer.state.fn == "fit"
        for callback, state in zip(trainer.callbacks, self.callbacks, strict=True):
            state.load_into(callback, fitted=is_fit)
        for logger, pickled in zip(trainer.loggers, self.loggers, strict=True):
            if pickled is not None:
                vars(logger).update(vars(cloudpickle.loads(pickled)))
        if self.progress:
            trainer.fit_loop.load_state_dict(self.progress)
        if self.weights is not None:
            load_weights(self.weights, trainer.lightning_module)


def _try_pickle(logger: object) -> bytes | None:
    """Pickle a logger with its open directory or run. Return None if that is not possible."""
    try:
        pickled: bytes = cloudpickle.dumps(logger)
    except Exception:
        return None
    return pickled


_METRIC_ATTRIBUTES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def load_weights(weights: Mapping[str, object], module: torch.nn.Module) -> None:
    """Load trained weights into the driver's module, and warn about parameters that differ."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    if missing or unexpected:
        warnings.warn(
            f"Not all weights were returned: {type(module).__name__} has different parameters in "
            f"this process (only here: {missing}; only in the workers: {unexpected}). If "
            "configure_model() creates these layers, load their weights from a checkpoint.",
            stacklevel=2,
        )


def interleave_predictions(predictions: Sequence[Any], dataloaders: int) -> Any:
    """Merge the ranks' predictions: the first batch of each rank, then the second, and so on.

    Args:
        predictions: Results of `predict` on each rank: a list of batches or, for several
            dataloaders, a list of lists; None if `predict` ran with `return_predictions=False`.
        dataloaders: Number of dataloaders.
    """
    if None in predictions:
        return None
    if dataloaders > 1:
        return [interleave_predictions(batches, 1) for batches in zip(*predictions, strict=True)]
    end = object()
    turns = itertools.zip_longest(*predictions, fillvalue=end)
    return [batch for turn in turns for batch in turn if batch is not end]
