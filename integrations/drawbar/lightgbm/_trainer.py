"""LightGBMTrainer: the trainer for LightGBM, with a training function or without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from drawbar.lightgbm._backend import LightGBMConfig
from drawbar.train import Checkpoint, DataConfig, DataParallelTrainer, RunConfig, ScalingConfig

if TYPE_CHECKING:
    from ray.data import Dataset


class LightGBMTrainer(DataParallelTrainer):
    """Run a LightGBM training function on every worker, with LightGBM's network up."""

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        lightgbm_config: LightGBMConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if lightgbm_config is not None and not isinstance(lightgbm_config, LightGBMConfig):
            raise TypeError(f"lightgbm_config must be a LightGBMConfig, found {lightgbm_config!r}")
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=lightgbm_config or LightGBMConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )
