"""TensorflowTrainer: run a TensorFlow training function on Ray workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drawbar.tensorflow._backend import TensorflowConfig
from drawbar.train import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.backend import DataSource, TrainFunction, resolve_config


class TensorflowTrainer(DataParallelTrainer):
    """Run a TensorFlow training function on every worker, with TF_CONFIG set.

    After a failure, all processes are replaced, because TensorFlow cannot leave a cluster whose
    peers are dead. For Keras 3 on any backend, use `drawbar.keras.KerasTrainer`.

    Args:
        train_loop_per_worker: Training function; takes `train_loop_config` or nothing.
        train_loop_config: Argument of the training function.
        tensorflow_config: Configuration of the workers; see `TensorflowConfig`.
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
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = tf.keras.Sequential(...)  # Keras 2, see TensorflowConfig
                model.compile("adam", "mse")
            shard = drawbar.train.get_dataset_shard("train").to_tf("x", "y", batch_size=32)
            model.fit(prepare_dataset_shard(shard), epochs=config["epochs"])

        result = TensorflowTrainer(
            train_func,
            train_loop_config={"epochs": 5},
            datasets={"train": dataset},
            scaling_config=ScalingConfig(num_workers=4),
        ).fit()
        ```
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        tensorflow_config: TensorflowConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | DataSource | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=resolve_config("tensorflow_config", tensorflow_config, TensorflowConfig),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
