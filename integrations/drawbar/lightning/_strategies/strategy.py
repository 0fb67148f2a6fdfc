"""Lightning's strategies on the workers of a run.

Lightning derives ranks, devices and process groups from what its Trainer was told. On a worker all
three exist already: the run has placed it, Ray has given it its device, and `drawbar.torch` has
made the process group. So each strategy is Lightning's own, with those three taken from the run,
and with its way cleared where Lightning or torch take it for granted that there are GPUs.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from drawbar.lightning._checkpoint import CheckpointStrategyMixin
from drawbar.lightning._environment import RayLightningEnvironment, is_in_training_function
from drawbar.lightning._launcher import ProcessGroupOptions, RayLauncher, WorkerLaunchConfig
from drawbar.lightning._package import LateBoundBase, bind_base, import_lightning_class
from drawbar.lightning._strategies.accelerator import configure_for_workers
from drawbar.torch import get_device
from drawbar.train import RunConfig, ScalingConfig, get_context

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.strategies.parallel import ParallelStrategy
else:
    DDPStrategy = ParallelStrategy = object

StateDict = dict[str, Any]


class RayStrategy(CheckpointStrategyMixin, LateBoundBase, ParallelStrategy):
    """What the strategies have in common: ranks, device and process group are the run's.

    In a training function a strategy is made without the arguments below. In an ordinary script or
    notebook they have the Trainer start the workers by itself: `trainer.fit`, `validate`, `test`
    and `predict` run on them, and what came of it is in this process afterwards.

    Args:
        num_workers: How many workers to start; see `drawbar.train.ScalingConfig`.
        use_gpu: One GPU per worker.
        scaling_config: In place of these two, to say more.
        run_config: Where the run lies, restarts, callbacks.
        return_weights: Bring the weights of the trained module back. Rank 0 and this process then
            hold all of them in memory; with False the module here stays as it is, and the weights
            are in the checkpoints.

    All other arguments are those of Lightning's strategy. In a training function the process group
    is there before, so that `process_group_backend` and `timeout` are given to `TorchConfig`.

    Raises:
        TypeError, ValueError: An argument is wrong, here or in the config that it is for.
    """

    trained_weights: StateDict | None = None
    """On rank 0, after a fit that the driver has launched: the trained weights, on the CPU."""

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

    @cached_property  # Lightning asks several times in each step
    def root_device(self) -> torch.device:
        """The device that Ray gave to this worker; see `drawbar.torch.get_device`."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How the data is divided: among all workers of the run."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- where the Trainer is made

    def set_world_ranks(self) -> None:
        """Take the ranks from the run. Lightning calls it as the Trainer is made, and later again.

        Raises:
            RuntimeError: The Trainer is made where this strategy cannot work; the message says what
                to write instead.
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

    def _configure_launcher(self) -> None:
        if self.launch_config is None:
            self._check_process_group()
        else:
            self._launcher = cast(
                "_Launcher", RayLauncher(self.launch_config, self.process_group_options())
            )

    def attach_to_worker(self, trainer: Trainer) -> None:
        """Take a place in the worker that the Trainer was sent to from the driver."""
        self.launch_config, self._launcher = None, None
        self._should_collect_weights = self._return_weights
        # In the driver there may have been no GPU to scale gradients for.
        self.precision_plugin = trainer._accelerator_connector._check_and_init_precision()
        self.set_world_ranks()

    # -- the process group

    def process_group_options(self) -> ProcessGroupOptions:
        """Give what the user said about the process group, as arguments of `TorchConfig`."""
        backend: str | None = getattr(self, "_process_group_backend", None)
        timeout = getattr(self, "_timeout", None) or default_pg_timeout
        requested: ProcessGroupOptions = {}
        if backend is not None:
            requested["backend"] = backend
        if timeout != default_pg_timeout:
            requested["timeout_s"] = timeout.total_seconds()
        return requested

    def _check_process_group(self) -> None:
        name = type(self).__name__
        if not dist.is_initialized():
            raise RuntimeError(
                f"{name} finds no process group in this worker; run the training function with "
                "drawbar.torch.TorchTrainer, which makes it"
            )
        requested = self.process_group_options()
        if requested.get("backend") in (dist.get_backend(), dist.get_backend_config()):
            del requested["backend"]
        if requested:
            listed = ", ".join(f"{key}={value!r}" for key, value in requested.items())
            raise ValueError(
                f"{name} was given process_group_backend or timeout, but the run has made its "
                f"process group already ({dist.get_backend_config()}); write "
                f"TorchTrainer(torch_config=TorchConfig({listed})) instead"
            )

    # -- weights

    def full_state_dict(self) -> StateDict:
        """Gather the module's weights, whole, on rank 0's CPU; other ranks may get fewer."""
        return self.lightning_module_state_dict()

    def teardown(self) -> None:
        """Let go of the model; at the end of a fit that the driver has launched, keep the weights.

        They are gathered here, since the strategies take the model apart after this.
        """
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        if self._should_collect_weights and trainer is not None and _is_fit_teardown(trainer):
            weights = self.full_state_dict()
            if self.is_global_zero:
                self.trained_weights = {name: to_cpu(value) for name, value in weights.items()}
        super().teardown()


def _is_fit_teardown(trainer: Trainer) -> bool:
    return (trainer.state.fn, trainer.state.status) == ("fit", "running")


def to_cpu(value: object) -> object:
    """Give a tensor's values on the CPU, without its history; anything else as it is."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def validate_context(name: str, *, in_worker: bool, launch: WorkerLaunchConfig | None) -> None:
    """Check that a strategy with or without `num_workers` belongs where its Trainer is made.

    Raises:
        RuntimeError: It does not.
    """
    if not in_worker and launch is None:
        raise RuntimeError(
            f"{name}() is in a Trainer outside a training function, where there are no workers; "
            f"to have the Trainer start some, write {name}(num_workers=2), or make the Trainer "
            "inside the function that drawbar.torch.TorchTrainer runs"
        )
    if in_worker and launch is not None:
        raise RuntimeError(
            f"{name} was given num_workers or scaling_config inside a training function, whose "
            f"workers run already; write {name}() there, and "
            "TorchTrainer(scaling_config=ScalingConfig(num_workers=...)) outside"
        )


class RayDDPStrategy(RayStrategy, DDPStrategy, base="strategies.DDPStrategy"):
    """Lightning's `DDPStrategy` on the workers of a run; see `RayStrategy` for the arguments."""
