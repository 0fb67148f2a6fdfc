"""RayFSDPStrategy: FSDP1 on the run's process group, also on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from drawbar.lightning._bases import FSDPStrategy
from drawbar.lightning._compat import ModelSetupHook, has_full_state_dict
from drawbar.lightning._strategies.strategy import RayStrategy, StateDict


class RayFSDPStrategy(ModelSetupHook, RayStrategy, FSDPStrategy, base="strategies.FSDPStrategy"):
    """Lightning's `FSDPStrategy` on the workers of a run, with GPUs or CPUs.

    Args:
        *args: Positional arguments of Lightning's `FSDPStrategy`.
        num_workers: Number of workers to start; see `RayStrategy`.
        use_gpu: Whether each worker gets one GPU; see `RayStrategy`.
        scaling_config: Alternative to `num_workers` and `use_gpu`; see `RayStrategy`.
        run_config: Run configuration: storage, restarts, callbacks; see `RayStrategy`.
        return_weights: Whether to return the trained weights to the driver; see `RayStrategy`.
        **kwargs: Keyword arguments of Lightning's `FSDPStrategy`.

    Example:
        ```python
        strategy = drawbar.lightning.RayFSDPStrategy(state_dict_type="sharded")
        trainer = drawbar.lightning.prepare_trainer(L.Trainer(strategy=strategy))
        ```
    """

    def setup_environment(self) -> None:
        """Create a device mesh that was passed as a shape, on this worker's type of device."""
        shape = self.kwargs.get("device_mesh")
        if isinstance(shape, tuple):  # FSDPStrategy would create it on CUDA
            self.kwargs["device_mesh"] = init_device_mesh(self.root_device.type, shape)
        super().setup_environment()

    def wrap_model(self, model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Wrap a model. Lightning's `wrap` would look for a GPU, so this does it on CPUs."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if self.root_device.type != "cpu" or _contains_module(FullyShardedDataParallel, model):
            return wrap(model)
        wrapped = FullyShardedDataParallel(model, **self._fsdp_kwargs)
        policy = self.kwargs.pop("auto_wrap_policy", None)
        try:
            return wrap(wrapped)  # the model is already wrapped
        finally:
            if policy is not None:
                self.kwargs["auto_wrap_policy"] = policy

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Use this strategy's settings for `torch.distributed.fsdp.wrap.wrap`."""
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._fsdp_kwargs):
            yield

    @property
    def _fsdp_kwargs(self) -> dict[str, Any]:
        """Arguments of `FullyShardedDataParallel`, as in `FSDPStrategy` except `device_id`.

        `FSDPStrategy` passes the device index, which a CPU does not have; torch would then look for
        a GPU.
        """
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }

    def lightning_module_state_dict(self) -> StateDict:
        """Return the weights of this rank, or all weights on rank 0; see `state_dict_type`."""
        return (
            self.full_state_dict()
            if has_full_state_dict(self)
            else super().lightning_module_state_dict()
        )

    def full_state_dict(self) -> StateDict:
        """Gather the module's weights on rank 0."""
        assert self.model is not None
        with _full_state_dict_context(self.model):
            return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the optimizer state of this rank, or all on rank 0; see `state_dict_type`."""
        if not has_full_state_dict(self):
            return super().optimizer_state(optimizer)
        from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

        assert self.model is not None
        unwrapped_optimizer = getattr(optimizer, "optimizer", optimizer)  # of LightningOptimizer
        with _full_state_dict_context(self.model):
            state = FullyShardedDataParallel.optim_state_dict(self.model, unwrapped_optimizer)
            if not self.is_global_zero:
                return state
            by_number = OptimStateKeyType.PARAM_ID
            return FullyShardedDataParallel.rekey_optim_state_dict(state, by_number, self.model)


@contextmanager
def _full_state_dict_context(model: nn.Module) -> Iterator[None]:
    """Make FSDP gather state on rank 0 in CPU memory.

    State that is already on the CPU must not be "offloaded": torch would treat the original tensors
    as copies, free them, and crash.
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


def _contains_module(kind: type[nn.Module], model: nn.Module) -> bool:
    return any(isinstance(module, kind) for module in model.modules())
