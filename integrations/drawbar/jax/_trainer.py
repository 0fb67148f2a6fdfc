"""JaxTrainer: the trainer for functions written in JAX."""

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
from drawbar.train.backend import TrainFunction, resolve_config


class JaxTrainer(DataParallelTrainer):
    """Run a JAX training function on every worker, all of them one program with one set of devices.

        def train_loop(config):
            mesh = jax.make_mesh((jax.device_count(),), ("data",))
            rows = NamedSharding(mesh, PartitionSpec("data"))
            for batch in batches_of(jax.process_index()):
                batch = jax.make_array_from_process_local_data(rows, batch)
                state, loss = step(state, batch)
            drawbar.jax.report_state(state, {"loss": float(loss)})

        result = JaxTrainer(train_loop, scaling_config=ScalingConfig(num_workers=4)).fit()

    `jax.distributed` is initialised before the function starts, so a script's own call goes away.
    After a failure all processes are new: JAX cannot leave a program whose peers are dead.

    Args:
        train_loop_per_worker: The training function; takes `train_loop_config` or nothing.
        jax_config: How the workers meet; see `JaxConfig`.

    All other arguments, and what is raised, are those of `drawbar.train.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
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
