"""JaxTrainer: run a JAX training function on Ray workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drawbar.jax._backend import JaxConfig
from drawbar.train import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.backend import DataSource, TrainFunction, resolve_config


class JaxTrainer(DataParallelTrainer):
    """Run a JAX training function on every worker, as one program with one set of devices.

    `jax.distributed` is initialized before the function starts; do not initialize it again. After a
    failure, all processes are replaced, because a process cannot leave a JAX program in which other
    processes are dead.

    Args:
        train_loop_per_worker: Training function; takes `train_loop_config` or nothing.
        train_loop_config: Argument of the training function.
        jax_config: Configuration of the JAX program; see `JaxConfig`.
        scaling_config: Number of workers and their resources.
        run_config: Run configuration: storage, restarts, callbacks.
        datasets: Datasets by name, for `drawbar.train.get_dataset_shard()`.
        dataset_config: Distribution of the datasets to the workers.
        metadata: User data, for `drawbar.train.get_context().get_metadata()`.
        resume_from_checkpoint: Checkpoint from which a new run starts.
        validation_config: Validation of checkpoints. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An argument is invalid; see `drawbar.train.DataParallelTrainer`.

    Example:
        ```python
        def train_func(config):
            mesh = jax.make_mesh((jax.device_count(),), ("data",))
            sharding = NamedSharding(mesh, PartitionSpec("data"))
            for batch in batches_for(jax.process_index()):
                batch = jax.make_array_from_process_local_data(sharding, batch)
                state, loss = step(state, batch)
            drawbar.jax.report_state(state, {"loss": float(loss)})

        result = JaxTrainer(train_func, scaling_config=ScalingConfig(num_workers=4)).fit()
        ```
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | DataSource | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        config = resolve_config("jax_config", jax_config, JaxConfig)
        if isinstance(scaling_config, ScalingConfig):
            config = replace(
                config,
                use_tpu=config.use_tpu or scaling_config.use_tpu,
                use_gpu=config.use_gpu or scaling_config.use_gpu,
            )
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
