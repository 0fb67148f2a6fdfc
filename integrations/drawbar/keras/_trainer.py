"""KerasTrainer: run a Keras training function on Ray workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drawbar.keras._backend import KerasBackendName, KerasConfig, current_keras_backend
from drawbar.train import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.backend import BackendConfig, DataSource, TrainFunction


class KerasTrainer(DataParallelTrainer):
    """Run a Keras 3 training function with `model.fit` on every worker.

    Args:
        train_loop_per_worker: Training function; takes `train_loop_config` or nothing.
        train_loop_config: Argument of the training function.
        keras_backend: "torch", "jax", or "tensorflow". Default: the backend of Keras if it is
            imported in this process, or else KERAS_BACKEND, or else "tensorflow".
        backend_config: Configuration of the backend: a `TorchConfig`, `JaxConfig`, or
            `TensorflowConfig`.
        scaling_config: Number of workers and their resources.
        run_config: Run configuration: storage, restarts, callbacks.
        datasets: Datasets by name, for `drawbar.train.get_dataset_shard()`.
        dataset_config: Distribution of the datasets to the workers.
        metadata: User data, for `drawbar.train.get_context().get_metadata()`.
        resume_from_checkpoint: Checkpoint from which the first attempt starts.
        validation_config: Validation of checkpoints. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An argument is invalid; see `drawbar.train.DataParallelTrainer`.

    Example:
        ```python
        def train_func(config):
            model = prepare_model(make_model())  # built and compiled
            data = prepare_dataset(x, y, batch_size=64)
            callback = ReportCheckpointCallback()
            initial_epoch = load_state(model)
            model.fit(data, epochs=10, initial_epoch=initial_epoch, callbacks=[callback])

        KerasTrainer(
            train_func, keras_backend="jax", scaling_config=ScalingConfig(num_workers=4)
        ).fit()
        ```
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        keras_backend: KerasBackendName | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | DataSource | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        if keras_backend is None:
            keras_backend = current_keras_backend()
        if keras_backend == "jax" and backend_config is None and scaling_config is not None:
            backend_config = _jax_config(scaling_config)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=KerasConfig(keras_backend, backend_config),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )


def _jax_config(scaling_config: ScalingConfig) -> BackendConfig:
    from drawbar.jax import JaxConfig

    return JaxConfig(use_gpu=scaling_config.use_gpu, use_tpu=scaling_config.use_tpu)
