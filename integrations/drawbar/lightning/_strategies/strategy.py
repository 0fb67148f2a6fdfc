"""RayStrategy: take ranks, devices, and process group from the run.

Lightning derives ranks, devices, and process groups from the arguments of its Trainer. On a worker,
all three already exist: the run assigns the rank, Ray assigns the device, and `drawbar.torch`
creates the process group. Each strategy is Lightning's class with these three taken from the run,
and with fixes where Lightning or torch assume GPUs.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from drawbar.lightning._bases import DDPStrategy, ParallelStrategy
from drawbar.lightning._checkpoint import CheckpointStrategyMixin
from drawbar.lightning._compat import (
    LauncherHook,
    ModelSetupHook,
    get_process_group_settings,
    get_trainer,
    make_precision_plugin,
)
from drawbar.lightning._environment import RayLightningEnvironment, is_in_training_function
from drawbar.lightning._in_place import InPlaceFit
from drawbar.lightning._launcher import ProcessGroupOptions, RayLauncher, WorkerLaunchConfig
from drawbar.lightning._model_checkpoint import decide_who_saves
from drawbar.lightning._package import LateBoundBase, bind_base, import_lightning_class
from drawbar.lightning._strategies.accelerator import configure_for_workers
from drawbar.lightning._strategies.collectives import (
    RecoverableCollectives,
    recovers_in_place,
)
from drawbar.lightning._worker_launcher import WorkerLauncher
from drawbar.torch import get_device
from drawbar.torch.integration import find_training
from drawbar.train import Checkpoint, RunConfig, ScalingConfig, get_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer
    from torch import nn

StateDict = dict[str, Any]


class RayStrategy(LauncherHook, CheckpointStrategyMixin, LateBoundBase, ParallelStrategy):
    """Base class of the strategies. Ranks, device, and process group come from the run.

    In a training function, create a strategy without the arguments below. In an ordinary script or
    notebook, they make the Trainer start workers: `trainer.fit`, `validate`, `test`, and `predict`
    run on them, and their results are then loaded into the Trainer of this process.

    Args:
        *args: Positional arguments of Lightning's strategy.
        num_workers: Number of workers to start; see `drawbar.train.ScalingConfig`.
        use_gpu: Whether each worker gets one GPU.
        scaling_config: Alternative to `num_workers` and `use_gpu` with more options.
        run_config: Run configuration: storage, restarts, callbacks.
        return_weights: Whether to return the weights of the trained module. If True, rank 0 and
            this process hold all of them in memory. If False, the module in this process is not
            changed, and the weights are in the checkpoints.
        **kwargs: Keyword arguments of Lightning's strategy. In a training function, the process
            group already exists, so pass `process_group_backend` and `timeout` to `TorchConfig`.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        ```python
        # In a script or notebook, without TorchTrainer:
        trainer = L.Trainer(strategy=drawbar.lightning.RayDDPStrategy(num_workers=2))
        trainer.fit(MyModule(), datamodule=MyDataModule())
        ```
    """

    trained_weights: StateDict | None = None
    """Trained weights on the CPU, on rank 0 after a `fit` that was started in the driver."""

    def __init__(
        self,
        *args: Any,
        num_workers: int | tuple[int, int] | None = None,
        use_gpu: bool = False,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        return_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.launch_config = WorkerLaunchConfig.from_arguments(
            num_workers, use_gpu, scaling_config, run_config
        )
        self._return_weights = return_weights
        self._should_collect_weights = False
        if self.launch_config is not None:
            configure_for_workers(self, self.launch_config.scaling_config)

    @cached_property  # Lightning reads it several times in each step
    def root_device(self) -> torch.device:
        """Device of this worker; see `drawbar.torch.get_device`."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments that shard data across all workers of the run."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- creation of the Trainer

    def set_world_ranks(self) -> None:
        """Set the ranks of the run. Lightning calls this when it creates or starts a Trainer.

        Raises:
            RuntimeError: `num_workers` is missing outside a training function, or set inside one.
        """
        validate_context(
            type(self).__name__, in_worker=is_in_training_function(), launch=self.launch_config
        )
        if self.launch_config is not None:
            environment = "plugins.environments.LightningEnvironment"
            self.cluster_environment = import_lightning_class(environment, self.package)()
        else:
            self._use_run_environment()
        super().set_world_ranks()  # type: ignore[misc]  # Lightning's parallel strategies have it

    def _use_run_environment(self) -> None:
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            self.cluster_environment = bind_base(RayLightningEnvironment, self.package)()
        kind, count = self.root_device.type, get_context().get_local_world_size()
        self.parallel_devices = [torch.device(kind, index) for index in range(count)]

    recovers_in_place = False
    """True if the strategy works with `FailureConfig(recovery="in_place")`."""

    def configure_launcher(self) -> None:
        """Start workers with `num_workers`; otherwise, check the process group of this worker.

        Raises:
            ValueError: The run recovers in place, and the strategy does not support it.
        """
        launch = self.launch_config
        is_requested = (
            recovers_in_place()
            if launch is None
            else launch.run_config.failure_config.recovery == "in_place"
        )
        if is_requested and not self.recovers_in_place:
            raise ValueError(
                f"{type(self).__name__} does not work with FailureConfig(recovery='in_place'), "
                "because no other rank has the weights of a dead one. Use RayDDPStrategy(), or set "
                "recovery='restart'."
            )
        if launch is None:
            self._check_process_group()
            self.set_launcher(WorkerLauncher())
        else:
            self.set_launcher(RayLauncher(launch, self.process_group_options()))

    def attach_to_worker(self, trainer: Trainer, previous: Checkpoint | None) -> None:
        """Attach to the worker that received the Trainer from the driver.

        Args:
            trainer: The Trainer.
            previous: Newest checkpoint of its last `fit`, if any.
        """
        self.launch_config = None
        self.previous_checkpoint = previous
        self.set_launcher(WorkerLauncher(previous))
        self._should_collect_weights = self._return_weights
        # The driver may have had no GPU, and therefore no gradient scaler.
        self.precision_plugin = make_precision_plugin(trainer)
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """Connect the callbacks to the run, also the ones of `configure_callbacks`."""
        decide_who_saves(get_trainer(self.lightning_module), self.package)
        super().setup_environment()

    # -- the process group

    def process_group_options(self) -> ProcessGroupOptions:
        """Return the user's process group options, as arguments of `TorchConfig`."""
        backend, timeout = get_process_group_settings(self)
        requested: ProcessGroupOptions = {}
        if backend is not None:
            requested["backend"] = backend
        if timeout not in (None, default_pg_timeout):
            requested["timeout_s"] = timeout.total_seconds()
        return requested

    def _check_process_group(self) -> None:
        name = type(self).__name__
        if not dist.is_initialized():
            raise RuntimeError(
                f"{name} needs a process group, but this worker has none. Run the training "
                "function with drawbar.torch.TorchTrainer."
            )
        requested = self.process_group_options()
        if requested.get("backend") in (dist.get_backend(), dist.get_backend_config()):
            del requested["backend"]
        if requested:
            listed = ", ".join(f"{key}={value!r}" for key, value in requested.items())
            raise ValueError(
                f"process_group_backend and timeout of {name} have no effect, because the run has "
                f"already created its process group ({dist.get_backend_config()}). Use "
                f"TorchTrainer(torch_config=TorchConfig({listed})) instead."
            )

    # -- weights

    def full_state_dict(self) -> StateDict:
        """Gather all weights of the module on rank 0's CPU; other ranks may get fewer."""
        return self.lightning_module_state_dict()

    def teardown(self) -> None:
        """Release the model. After a `fit` that was started in the driver, keep the weights.

        The weights are gathered before the base classes run, because these release the model.
        """
        trainer = get_trainer(self.lightning_module)
        if self._should_collect_weights and trainer is not None and _is_fit_teardown(trainer):
            weights = self.full_state_dict()
            if self.is_global_zero:
                self.trained_weights = {name: to_cpu(value) for name, value in weights.items()}
        super().teardown()


def _is_fit_teardown(trainer: Trainer) -> bool:
    return (trainer.state.fn, trainer.state.status) == ("fit", "running")


def to_cpu(value: object) -> object:
    """Copy a tensor to the CPU without its autograd history; return other objects unchanged."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def validate_context(name: str, *, in_worker: bool, launch: WorkerLaunchConfig | None) -> None:
    """Check that a strategy has `num_workers` if, and only if, it is outside a training function.

    Raises:
        RuntimeError: `num_workers` is missing in the driver or set in a worker.
    """
    if not in_worker and launch is None:
        raise RuntimeError(
            f"{name}() outside a training function needs num_workers. Use {name}(num_workers=2), "
            "or create the Trainer in the training function of drawbar.torch.TorchTrainer."
        )
    if in_worker and launch is not None:
        raise RuntimeError(
            f"{name} has num_workers or scaling_config inside a training function, where the "
            f"workers are already running. Use {name}() here and "
            "TorchTrainer(scaling_config=ScalingConfig(num_workers=...)) in the driver."
        )


class RayDDPStrategy(
    ModelSetupHook, RecoverableCollectives, RayStrategy, DDPStrategy, base="strategies.DDPStrategy"
):
    """Lightning's `DDPStrategy` on the workers of a run.

    It is the only strategy that works with `FailureConfig(recovery="in_place")`.

    Args:
        *args: Positional arguments of Lightning's `DDPStrategy`.
        num_workers: Number of workers to start; see `RayStrategy`.
        use_gpu: Whether each worker gets one GPU; see `RayStrategy`.
        scaling_config: Alternative to `num_workers` and `use_gpu`; see `RayStrategy`.
        run_config: Run configuration: storage, restarts, callbacks; see `RayStrategy`.
        return_weights: Whether to return the trained weights to the driver; see `RayStrategy`.
        **kwargs: Keyword arguments of Lightning's `DDPStrategy`.

    Example:
        ```python
        def train_func():
            strategy = drawbar.lightning.RayDDPStrategy(find_unused_parameters=True)
            trainer = L.Trainer(strategy=strategy)
            trainer.fit(MyModule(), datamodule=MyDataModule())
        ```
    """

    recovers_in_place = True

    _in_place: InPlaceFit | None = None

    def setup_environment(self) -> None:
        """Connect to the other ranks if `fit` can recover from their death."""
        super().setup_environment()
        trainer = get_trainer(self.lightning_module)
        training = find_training() if recovers_in_place() and trainer.state.fn == "fit" else None
        self._in_place = None if training is None else InPlaceFit(trainer, training)

    def wrap_model(self, model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Make a model data-parallel."""
        return wrap(model) if self._in_place is None else self._in_place.wrap_model(model)

    def setup(self, trainer: Trainer) -> None:
        """Set up the model and the optimizers."""
        super().setup(trainer)
        if self._in_place is not None:
            self._in_place.add_optimizers()

    def on_train_start(self) -> None:
        """Prepare for the first batch."""
        super().on_train_start()
        if self._in_place is not None:
            self._in_place.start()

    def teardown(self) -> None:
        """Release the model."""
        if self._in_place is not None:
            self._in_place.end()
        super().teardown()
