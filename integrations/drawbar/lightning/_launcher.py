"""A Trainer in the driver that runs on workers: what is sent there, and what comes back.

Lightning asks its strategy's launcher to run `fit` and its companions. This one starts a run of
`drawbar.torch.TorchTrainer` whose training function is: the Trainer, as it was made in the driver,
takes its place in the worker and is called with the same arguments. What the user may look at
afterwards is sent back by rank 0 and put into the driver's Trainer.
"""

from __future__ import annotations

import dataclasses
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
from drawbar.lightning._prepare import prepare_trainer
from drawbar.lightning._resume import is_tuner_run
from drawbar.torch import TorchConfig, TorchTrainer
from drawbar.train import RunConfig, ScalingConfig, UserAbort

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


@dataclass(frozen=True)
class WorkerLaunchConfig:
    """The workers that a strategy was told to start."""

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
        """Make it of a strategy's arguments; None if they ask for no workers.

        Raises:
            TypeError, ValueError: They contradict each other, or one is wrong.
        """
        if scaling_config is not None and (num_workers is not None or use_gpu):
            raise ValueError(
                f"num_workers={num_workers}, use_gpu={use_gpu} and scaling_config were given; "
                "put the first two into the ScalingConfig"
            )
        if num_workers is not None:
            scaling_config = ScalingConfig(num_workers=num_workers, use_gpu=use_gpu)
        if scaling_config is not None:
            if scaling_config.max_workers == 0:
                raise ValueError(
                    "num_workers=0 is this very process, for which a Trainer needs no strategy of "
                    "drawbar.lightning; leave strategy= out"
                )
            return cls(scaling_config, run_config or RunConfig())
        if use_gpu or run_config is not None:
            raise ValueError(
                "use_gpu and run_config are for workers that the Trainer starts; say how many by "
                "num_workers=, or leave them to TorchTrainer, if it runs this as training function"
            )
        return None

    def run_config_for(self, trainer: Trainer) -> RunConfig:
        """Give the settings of one call: a run that has a name is that of `fit`, to be resumed."""
        if trainer.state.fn == "fit":
            return self.run_config
        return dataclasses.replace(self.run_config, name=None, resume="auto")


class ProcessGroupOptions(TypedDict, total=False):
    """What the user said about the process group, as arguments of `TorchConfig`."""

    backend: str
    timeout_s: float


class RayLauncher:
    """Does on workers what a Trainer in the driver is asked for. Lightning calls it."""

    is_interactive_compatible = True

    def __init__(self, launch: WorkerLaunchConfig, torch_config: ProcessGroupOptions) -> None:
        self._launch = launch
        self._torch_config = torch_config

    def launch(
        self, function: Callable[..., object], *args: object, trainer: Trainer, **kwargs: object
    ) -> Any:
        """Do on the workers what the Trainer is about to do here, and give rank 0's result.

        Raises:
            ValueError: Lightning's `Tuner` calls: what it finds would stay in the workers.
            TrainingFailedError: A worker failed, see `TorchTrainer.fit`.
            UserAbort: Ctrl-C stopped the run.
        """
        if is_tuner_run(trainer):
            raise ValueError(
                f"Tuner was given a Trainer with {type(trainer.strategy).__name__}(num_workers=...)"
                ", whose workers would keep what it finds to themselves; tune with a Trainer that "
                "has no strategy=, or inside the function that drawbar.torch.TorchTrainer runs"
            )
        state = ReproducibilityState.capture()

        def run_trainer() -> TrainerResult:
            state.restore()
            return _run_in_worker(trainer, args, kwargs)

        run = TorchTrainer(
            run_trainer,
            torch_config=TorchConfig(**self._torch_config),
            scaling_config=self._launch.scaling_config,
            run_config=self._launch.run_config_for(trainer),
        )
        try:
            outcomes = run.fit().return_values
        except UserAbort as abort:
            print(abort)  # Lightning ends the process without a word
            raise
        outcome = outcomes[0]
        if outcome is None:
            raise RuntimeError(
                "the workers are done, but what they have for this process cannot be pickled; the "
                "lines above say what it is"
            )
        outcome.apply_to(trainer)
        if outcome.state.fn != "predict":
            return outcome.result
        return interleave_predictions([each.result for each in outcomes], outcome.dataloaders)

    def kill(self, signum: object) -> None:
        """Do nothing: workers end with their run."""


def _run_in_worker(
    trainer: Trainer, args: Sequence[object], kwargs: Mapping[str, object]
) -> TrainerResult:
    """Run the method that was called on the driver's Trainer, and return its outcome."""
    strategy: Any = trainer.strategy
    callbacks = list(cast("Any", trainer).callbacks)
    strategy.attach_to_worker(trainer)
    prepare_trainer(trainer)
    assert trainer.state.fn is not None
    method = getattr(trainer, trainer.state.fn.value)  # fit, validate, test or predict
    result = method(*args, **kwargs)
    return TrainerResult.from_trainer(trainer, callbacks, result)


@dataclass(frozen=True)
class ReproducibilityState:
    """What a process has set beside its variables: random generators, and torch's flags."""

    python: tuple[object, ...]
    numpy: Any
    torch: torch.Tensor
    deterministic: tuple[bool, bool]
    benchmark: bool

    @classmethod
    def capture(cls) -> Self:
        """Give that of this process."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
            torch=torch.get_rng_state(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            benchmark=torch.backends.cudnn.benchmark,
        )

    def restore(self) -> None:
        """Make it that of this process."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        enabled, warn_only = self.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = self.benchmark


@dataclass(frozen=True)
class TrainerResult:
    """What a worker's Trainer has after a call: all that is not in a folder by then."""

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
        """Collect the outcome of a call.

        Args:
            trainer: The worker's Trainer.
            callbacks: The driver's callbacks, as they arrived.
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
            weights=trainer.strategy.weights,
        )

    def apply_to(self, trainer: Any) -> None:
        """Load the outcome into the driver's Trainer, and the weights into its module."""
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
    """Pickle a logger, with the folder or run that it has begun; None if it cannot be."""
    try:
        pickled: bytes = cloudpickle.dumps(logger)
    except Exception:
        return None
    return pickled


_METRIC_ATTRIBUTES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def load_weights(weights: Mapping[str, object], module: torch.nn.Module) -> None:
    """Load trained weights into the driver's module; warns if it has other ones."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    if missing or unexpected:
        warnings.warn(
            f"{type(module).__name__} has other weights here than in the workers, so that not all "
            f"came back; only here: {missing}, only there: {unexpected}. What configure_model() "
            "makes is made in the workers alone: load it from a checkpoint",
            stacklevel=2,
        )


def interleave_predictions(predictions: Sequence[Any], dataloaders: int) -> Any:
    """Put the ranks' predictions together: the first batch of each rank, the second of each ...

    Args:
        predictions: What `predict` gave on each rank: a list of batches, for several dataloaders a
            list of such lists; None if predictions were not to be returned.
        dataloaders: How many dataloaders there were.
    """
    if None in predictions:
        return None
    if dataloaders > 1:
        return [interleave_predictions(batches, 1) for batches in zip(*predictions, strict=True)]
    end = object()
    turns = itertools.zip_longest(*predictions, fillvalue=end)
    return [batch for turn in turns for batch in turn if batch is not end]
