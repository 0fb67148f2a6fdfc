"""TorchTrainer: run a PyTorch training function on Ray workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drawbar.torch._backend import TorchConfig
from drawbar.torch._pickling import pickle_modules_by_name
from drawbar.train import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.backend import DataSource, TrainFunction, resolve_config


class TorchTrainer(DataParallelTrainer):
    """Run a PyTorch training function on every worker, with `torch.distributed` initialized.

    The process group is created before the function starts and destroyed after it, so remove
    `init_process_group()` from your code. Lightning, Accelerate, and Transformers use this group.

    Args:
        train_loop_per_worker: Training function. It takes `train_loop_config` or no argument.
        train_loop_config: Argument of the training function.
        torch_config: Configuration of the process group. Default: `TorchConfig()`.
        scaling_config: Number of workers and their resources. Default: one worker without GPU.
        run_config: Run configuration: storage, restarts, callbacks.
        datasets: Datasets by name, for `drawbar.train.get_dataset_shard()`.
        dataset_config: Which datasets to split between the workers, and how.
        metadata: User metadata that is stored with the checkpoints.
        resume_from_checkpoint: Checkpoint that `get_checkpoint()` returns in a new run.
        validation_config: Validation of checkpoints during the run.

    Raises:
        TypeError: An argument has the wrong type. See `DataParallelTrainer` for further errors.
        ValueError: An argument has a wrong value.

    Example:
        ```python
        def train_loop(config):
            model = drawbar.torch.prepare_model(Net())
            loader = DataLoader(dataset, batch_size=32, shuffle=True)
            loader = drawbar.torch.prepare_data_loader(loader)
            for epoch in range(config["epochs"]):
                ...
                drawbar.train.report({"loss": loss})

        result = TorchTrainer(
            train_loop,
            train_loop_config={"epochs": 5},
            scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
        ).fit()
        ```
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | DataSource | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        pickle_modules_by_name()
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=resolve_config("torch_config", torch_config, TorchConfig),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
