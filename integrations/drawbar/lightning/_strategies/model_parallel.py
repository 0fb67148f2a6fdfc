"""RayModelParallelStrategy: FSDP2 and tensor parallelism on a device mesh."""

from __future__ import annotations

from drawbar.lightning._bases import ModelParallelStrategy
from drawbar.lightning._compat import get_mesh_shape, set_mesh_shape
from drawbar.lightning._strategies.strategy import RayStrategy, StateDict
from drawbar.train import get_context


class RayModelParallelStrategy(
    RayStrategy, ModelParallelStrategy, base="strategies.ModelParallelStrategy"
):
    """Lightning's `ModelParallelStrategy` (FSDP2 and tensor parallelism) on the workers of a run.

    If `tensor_parallel_size` is "auto" and `data_parallel_size` is not set, the workers of a node
    share a model, as in Lightning. If one of them is set, the other is derived from the number of
    workers.

    Args:
        *args: Positional arguments of Lightning's `ModelParallelStrategy`.
        num_workers: Number of workers to start; see `RayStrategy`.
        use_gpu: Whether each worker gets one GPU; see `RayStrategy`.
        scaling_config: Alternative to `num_workers` and `use_gpu`; see `RayStrategy`.
        run_config: Run configuration: storage, restarts, callbacks; see `RayStrategy`.
        return_weights: Whether to return the trained weights to the driver; see `RayStrategy`.
        **kwargs: Keyword arguments of Lightning's `ModelParallelStrategy`.

    Example:
        ```python
        strategy = drawbar.lightning.RayModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=4
        )
        trainer = drawbar.lightning.prepare_trainer(L.Trainer(strategy=strategy))
        ```
    """

    def setup_environment(self) -> None:
        """Create the device mesh."""
        context = get_context()
        shape = resolve_mesh_shape(
            *get_mesh_shape(self),
            world_size=context.get_world_size(),
            local_world_size=context.get_local_world_size(),
        )
        set_mesh_shape(self, shape)
        super().setup_environment()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments that shard data across the data-parallel dimension of the mesh."""
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
    """Resolve "auto" in the shape of a device mesh.

    Raises:
        ValueError: The product of the sizes is not the number of workers.
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
            f"not fit {world_size} workers. Their product must be the number of workers."
        )
    return shape
