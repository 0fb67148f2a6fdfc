"""RayFSDPStrategy: FSDP 1, with its way cleared where Lightning or torch reckon with GPUs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from drawbar.lightning._strategies.strategy import RayStrategy, StateDict

if TYPE_CHECKING:
    from lightning.pytorch.strategies import FSDPStrategy
    from torch import Tensor
    from torch.optim import Optimizer
else:
    FSDPStrategy = object


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

        if self.root_device.type != "cpu" or _contains_module(FullyShardedDataParallel, model):
            return super()._setup_model(model)
        wrapped = FullyShardedDataParallel(model, **self._fsdp_kwargs)
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

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._fsdp_kwargs):
            yield

    @property
    def _fsdp_kwargs(self) -> dict[str, Any]:
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

    def lightning_module_state_dict(self) -> StateDict:
        """Give the module's weights as `state_dict_type` says: this rank's, or all on rank 0."""
        return (
            self.full_state_dict()
            if self._is_full_state_dict
            else super().lightning_module_state_dict()
        )

    def full_state_dict(self) -> StateDict:
        """Gather the module's weights on rank 0."""
        assert self.model is not None
        with _full_state_dict_context(self.model):
            return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Give an optimizer's state as `state_dict_type` says: this rank's, or all on rank 0."""
        if not self._is_full_state_dict:
            return super().optimizer_state(optimizer)
        from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

        assert self.model is not None
        unwrapped_optimizer = getattr(
            optimizer, "_optimizer", optimizer
        )  # out of a LightningOptimizer
        with _full_state_dict_context(self.model):
            state = FullyShardedDataParallel.optim_state_dict(self.model, unwrapped_optimizer)
            if not self.is_global_zero:
                return state
            by_number = OptimStateKeyType.PARAM_ID
            return FullyShardedDataParallel.rekey_optim_state_dict(state, by_number, self.model)

    @property
    def _is_full_state_dict(self) -> bool:
        return self._state_dict_type == "full"


@contextmanager
def _full_state_dict_context(model: nn.Module) -> Iterator[None]:
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


def _contains_module(kind: type[nn.Module], model: nn.Module) -> bool:
    return any(isinstance(module, kind) for module in model.modules())
