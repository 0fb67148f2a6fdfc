"""TorchTrainer: the trainer for functions written in PyTorch."""

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
from drawbar.train.backend import TrainFunction, resolve_config


class TorchTrainer(DataParallelTrainer):
    """Run a PyTorch training function on every worker, with `torch.distributed` up.

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

    The process group is made before the function starts and taken down after it, so a script's own
    `init_process_group` goes away. Lightning, Accelerate and Transformers find the group and use
    it.

    Args:
        train_loop_per_worker: The training function; takes `train_loop_config` or nothing.
        torch_config: How the process group is made; see `TorchConfig`.

    All other arguments, and what is raised, are those of `drawbar.train.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
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
