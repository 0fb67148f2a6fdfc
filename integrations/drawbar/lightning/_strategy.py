"""Lightning's strategies on the workers of a run.

Lightning derives ranks, devices and process groups from what its Trainer was told. On a worker all
three exist already: the run has placed it, Ray has given it its device, and `drawbar.torch` has
made the process group. So each strategy is Lightning's own, with those three taken from the run,
and with its way cleared where Lightning or torch take it for granted that there are GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh

from drawbar.lightning._accelerator import set_for_workers
from drawbar.lightning._checkpoints import CommitsCheckpoints
from drawbar.lightning._deepspeed import for_any_number_of_workers
from drawbar.lightning._environment import RayLightningEnvironment, in_training_function
from drawbar.lightning._launcher import Launch, RayLauncher
from drawbar.lightning._package import OfUsersPackage, lightning_class, with_base
from drawbar.torch import at_end, get_device
from drawbar.train import RunConfig, ScalingConfig, get_context
from drawbar.train.backend import require_package

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
    )
    from lightning.pytorch.strategies.parallel import ParallelStrategy
else:
    DDPStrategy = DeepSpeedStrategy = FSDPStrategy = ModelParallelStrategy = object
    ParallelStrategy = object

Weights = dict[str, Any]


class RayStrategy(CommitsCheckpoints, OfUsersPackage, ParallelStrategy):
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

    weights: Weights | None = None
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
        self.launch = Launch.of(num_workers, use_gpu, scaling_config, run_config)
        self._return_weights = return_weights
        self._keeps_weights = False
        if self.launch is not None:
            set_for_workers(self, self.launch.scaling_config)

    @property
    def root_device(self) -> torch.device:
        """The device that Ray gave to this worker; see `drawbar.torch.get_device`."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the data is divided: among all workers of the run."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- where the Trainer is made

    def set_world_ranks(self) -> None:
        """Take the ranks from the run. Lightning calls it as the Trainer is made, and later again.

        Raises:
            RuntimeError: The Trainer is made where this strategy cannot work; the message says what
                to write instead.
        """
        check_place(type(self).__name__, in_worker=in_training_function(), launch=self.launch)
        if self.launch is not None:
            environment = "plugins.environments.LightningEnvironment"
            self.cluster_environment = lightning_class(environment, self.package)()
        else:
            self._take_place()
        super().set_world_ranks()  # type: ignore[misc]  # Lightning's parallel strategies have it

    def _take_place(self) -> None:
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            self.cluster_environment = with_base(RayLightningEnvironment, self.package)()
        kind, count = self.root_device.type, get_context().get_local_world_size()
        self.parallel_devices = [torch.device(kind, index) for index in range(count)]

    def _configure_launcher(self) -> None:
        if self.launch is None:
            self._check_process_group()
        else:
            launcher: Any = RayLauncher(self.launch, self.torch_config_arguments())
            self._launcher = launcher

    def arrive(self, trainer: Trainer) -> None:
        """Take a place in the worker that the Trainer was sent to from the driver."""
        self.launch, self._launcher = None, None
        self._keeps_weights = self._return_weights
        # In the driver there may have been no GPU to scale gradients for.
        self.precision_plugin = trainer._accelerator_connector._check_and_init_precision()
        self.set_world_ranks()

    # -- the process group

    def torch_config_arguments(self) -> dict[str, Any]:
        """Give what the user said about the process group, as arguments of `TorchConfig`."""
        backend: str | None = getattr(self, "_process_group_backend", None)
        timeout = getattr(self, "_timeout", None) or default_pg_timeout
        asked: dict[str, Any] = {}
        if backend is not None:
            asked["backend"] = backend
        if timeout != default_pg_timeout:
            asked["timeout_s"] = timeout.total_seconds()
        return asked

    def _check_process_group(self) -> None:
        name = type(self).__name__
        if not dist.is_initialized():
            raise RuntimeError(
                f"{name} finds no process group in this worker; run the training function with "
                "drawbar.torch.TorchTrainer, which makes it"
            )
        asked = self.torch_config_arguments()
        if asked.get("backend") in (dist.get_backend(), dist.get_backend_config()):
            del asked["backend"]
        if asked:
            listed = ", ".join(f"{key}={value!r}" for key, value in asked.items())
            raise ValueError(
                f"{name} was given process_group_backend or timeout, but the run has made its "
                f"process group already ({dist.get_backend_config()}); write "
                f"TorchTrainer(torch_config=TorchConfig({listed})) instead"
            )

    # -- weights

    def full_state_dict(self) -> Weights:
        """Gather the module's weights, whole, on rank 0's CPU; other ranks may get fewer."""
        return self.lightning_module_state_dict()

    def teardown(self) -> None:
        """Let go of the model; at the end of a fit that the driver has launched, keep the weights.

        They are gathered here, since the strategies take the model apart after this.
        """
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        if self._keeps_weights and trainer is not None and _ends_a_fit(trainer):
            weights = self.full_state_dict()
            if self.is_global_zero:
                self.weights = {name: _on_cpu(value) for name, value in weights.items()}
        super().teardown()


def _ends_a_fit(trainer: Trainer) -> bool:
    return (trainer.state.fn, trainer.state.status) == ("fit", "running")


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def check_place(name: str, *, in_worker: bool, launch: Launch | None) -> None:
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


class RayFSDPStrategy(RayStrategy, FSDPStrategy, base="strategies.FSDPStrategy"):
    """Lightning's `FSDPStrategy` on the workers of a run; see `RayStrategy` for the arguments.

    It shards on CPUs too.
    """

    def setup_environment(self) -> None:
        """Make a device mesh that was given as a shape, on the kind of device that there is."""
        shape = self.kwargs.get("device_mesh")
        if isinstance(shape, tuple):  # FSDPStrategy would make it on CUDA
            self.kwargs["device_mesh"] = init_device_mesh(self.root_device.type, shape)
        super().setup_environment()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if self.root_device.type != "cpu" or _has(FullyShardedDataParallel, model):
            return super()._setup_model(model)
        wrapped = FullyShardedDataParallel(model, **self._wrapping)
        policy = self.kwargs.pop("auto_wrap_policy", None)
        try:
            return super()._setup_model(wrapped)  # finds it wrapped, and does the rest
        finally:
            if policy is not None:
                self.kwargs["auto_wrap_policy"] = policy

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Have `torch.distributed.fsdp.wrap.wrap` in `configure_model` wrap as this strategy."""
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._wrapping):
            yield

    @property
    def _wrapping(self) -> dict[str, Any]:
        """How modules are wrapped: as `FSDPStrategy` does, but for `device_id`.

        It gives the device's index, which the CPU has none of; torch then looks for a GPU.
        """
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Give the module's weights as `state_dict_type` says: this rank's, or all on rank 0."""
        return self.full_state_dict() if self._is_full else super().lightning_module_state_dict()

    def full_state_dict(self) -> Weights:
        """Gather the module's weights on rank 0."""
        assert self.model is not None
        with _full_state(self.model):
            return self.model.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Give an optimizer's state as `state_dict_type` says: this rank's, or all on rank 0."""
        if not self._is_full:
            return super().optimizer_state(optimizer)
        from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

        assert self.model is not None
        plain = getattr(optimizer, "_optimizer", optimizer)  # out of a LightningOptimizer
        with _full_state(self.model):
            state = FullyShardedDataParallel.optim_state_dict(self.model, plain)
            if not self.is_global_zero:
                return state
            by_number = OptimStateKeyType.PARAM_ID
            return FullyShardedDataParallel.rekey_optim_state_dict(state, by_number, self.model)

    @property
    def _is_full(self) -> bool:
        return self._state_dict_type == "full"


@contextmanager
def _full_state(model: nn.Module) -> Iterator[None]:
    """Have FSDP gather state on rank 0, in the CPU's memory.

    What is there already is not "offloaded" there: torch would take the very tensors for copies,
    free them, and crash.
    """
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    offload = any(parameter.device.type != "cpu" for parameter in model.parameters())
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True),
    ):
        yield


def _has(kind: type[nn.Module], model: nn.Module) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


class RayModelParallelStrategy(
    RayStrategy, ModelParallelStrategy, base="strategies.ModelParallelStrategy"
):
    """Lightning's `ModelParallelStrategy` (FSDP2 and tensor parallelism) on the workers of a run.

    See `RayStrategy` for the arguments. With `tensor_parallel_size="auto"` and no
    `data_parallel_size`, the workers of a node share a model, as in Lightning; with one of the two
    given, the other is what makes their product the number of workers.
    """

    def setup_environment(self) -> None:
        """Make the device mesh."""
        context = get_context()
        self._data_parallel_size, self._tensor_parallel_size = mesh_shape(
            self._data_parallel_size,
            self._tensor_parallel_size,
            world_size=context.get_world_size(),
            local_world_size=context.get_local_world_size(),
        )
        super().setup_environment()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the data is divided: among the workers that differ in the mesh's data dimension."""
        mesh = self.device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def full_state_dict(self) -> Weights:
        """Gather the module's weights on rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)


def mesh_shape(
    data_parallel: int | str, tensor_parallel: int | str, *, world_size: int, local_world_size: int
) -> tuple[int, int]:
    """Say what "auto" stands for in the shape of a device mesh.

    Raises:
        ValueError: The shape does not have as many places as there are workers.
    """
    if isinstance(data_parallel, int):
        tensor = (
            tensor_parallel if isinstance(tensor_parallel, int) else world_size // data_parallel
        )
        shape = data_parallel, tensor
    else:
        tensor = tensor_parallel if isinstance(tensor_parallel, int) else local_world_size
        shape = world_size // tensor, tensor
    if shape[0] * shape[1] != world_size:
        raise ValueError(
            f"data_parallel_size={data_parallel!r} and tensor_parallel_size={tensor_parallel!r} do "
            f"not make {world_size} workers; their product must"
        )
    return shape


class RayDeepSpeedStrategy(RayStrategy, DeepSpeedStrategy, base="strategies.DeepSpeedStrategy"):
    """Lightning's `DeepSpeedStrategy` on the workers of a run; see `RayStrategy` for the arguments.

    It trains on CPUs too, with every stage of ZeRO.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_package("deepspeed", "deepspeed")
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The device that Ray gave to this worker, with the index that DeepSpeed wants."""
        device = get_device()
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """Hand the run's process group to DeepSpeed, until the attempt ends.

        Raises:
            RuntimeError: The worker's device is not the one that DeepSpeed would use.
        """
        device, local_rank = self.root_device, self.local_rank
        if device.type == "cuda" and device.index != local_rank:
            raise RuntimeError(
                f"DeepSpeed computes on cuda:{local_rank} on local rank {local_rank}, but this "
                f"worker's GPU is {device}; give each worker one whole GPU"
            )
        if device.type == "cpu":
            _use_gloo_alone()
        at_end(_forget_attempt)
        # What DeepSpeedStrategy adds to this is to refuse CPUs.
        lightning_class("strategies.DDPStrategy", self.package).setup_environment(self)

    def loadable(self, path: Path) -> AbstractContextManager[Path]:
        """Give a checkpoint as this many workers can load it."""
        return for_any_number_of_workers(path, self.deepspeed_engine)

    def full_state_dict(self) -> Weights:
        """Gather the module's weights on rank 0, one at a time."""
        import deepspeed

        assert self.lightning_module is not None
        weights = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                weights[name] = _on_cpu(value).clone() if self.is_global_zero else None
        return weights


def _use_gloo_alone() -> None:
    """Keep DeepSpeed from compiling an all-reduce of its own, which does what gloo does.

    It would do so as it meets a process group on CPUs for the first time. That takes a compiler and
    a minute, and if it is cut short, every later run waits for its lock without a word.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _forget_attempt() -> None:
    """Have DeepSpeed let go of what it keeps of this attempt in its modules.

    These are process groups; and counters of ZeRO 3, on which the ranks must agree in the next
    attempt, those whose process is new with those whose process is kept.
    """
    import deepspeed.comm.comm
    import deepspeed.utils.groups
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)
    deepspeed.zero.Init.param_id = 0
    (modules,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    modules[0] = 0  # a default argument that it counts in
