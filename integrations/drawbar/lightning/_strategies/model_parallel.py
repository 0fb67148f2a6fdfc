"""RayModelParallelStrategy: FSDP 2 and tensor parallelism, over a device mesh of the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drawbar.lightning._strategies.strategy import RayStrategy, StateDict
from drawbar.train import get_context

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy
else:
    ModelParallelStrategy = object


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
        self._data_parallel_size, self._tensor_parallel_size = resolve_mesh_shape(
            self._data_parallel_size,
            self._tensor_parallel_size,
            world_size=context.get_world_size(),
            local_world_size=context.get_local_world_size(),
        )
        super().setup_environment()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How the data is divided: among the workers that differ in the mesh's data dimension."""
        mesh = self.device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def full_state_dict(self) -> StateDict:
        """Gather the module's weights on rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)


def resolve_mesh_shape(
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
