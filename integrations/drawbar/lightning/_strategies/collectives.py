"""Collectives of Lightning that a new process of a rank can repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from drawbar.lightning._bases import DDPStrategy
from drawbar.lightning._environment import is_in_training_function
from drawbar.train import collective
from drawbar.train.backend import get_recovery

T = TypeVar("T")

_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "mean": lambda stacked: (stacked.sum(0) / len(stacked)).to(stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}


class RecoverableCollectives(DDPStrategy):
    """Mixin for strategies: with recovery in place, use the collectives of `drawbar.train`.

    Their results are recorded for new processes, and waiting ranks can recover. Collectives of
    `torch.distributed` cannot be repeated.
    """

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if recovers_in_place():
            collective.barrier()
        else:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return an object of one rank on all ranks."""
        if not recovers_in_place():
            return super().broadcast(obj, src)
        if src == 0:
            return collective.broadcast_from_rank_zero(obj)
        return collective.all_gather(obj if self.global_rank == src else None)[src]  # type: ignore[return-value]  # of rank `src`

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks. Other objects are returned unchanged."""
        if not isinstance(tensor, Tensor) or not _has_all_ranks(group):
            return super().reduce(tensor, group, reduce_op)
        name = "sum" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        reduction = _REDUCTIONS[{"avg": "mean"}.get(name, name)]
        return reduction(torch.stack(collective.all_gather(tensor.detach())))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor of all ranks."""
        if not _has_all_ranks(group):
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            raise RuntimeError(
                "all_gather(sync_grads=True) does not work with "
                "FailureConfig(recovery='in_place'). Set recovery='restart'."
            )
        return torch.stack(collective.all_gather(tensor.detach()))


def recovers_in_place() -> bool:
    """Return whether this rank can be replaced while the others continue."""
    return is_in_training_function() and get_recovery() is not None


def _has_all_ranks(group: Any) -> bool:
    return recovers_in_place() and group in (None, dist.group.WORLD)
