"""Run a training function on ranks in threads of this process."""

from __future__ import annotations

from typing import Any

from drawbar._base.frames import without_internal_frames
from drawbar._base.train_function import TrainFunction
from drawbar._handle.result import Result
from drawbar._handle.run_view import RunMode
from drawbar._modes.run_modes import LocalMode
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._trainer import DataParallelTrainer
from drawbar.train.backend import BackendConfig


def run_in_threads(
    train_loop_per_worker: TrainFunction,
    *,
    num_workers: int = 2,
    train_loop_config: dict[str, Any] | None = None,
    backend_config: BackendConfig | None = None,
    run_config: RunConfig | None = None,
    validation_config: ValidationConfig | None = None,
) -> Result:
    """Run a training function on several ranks in threads of this process, without Ray.

    Reports, checkpoints, collectives, divergence, restarts, and the `Result` are real. Process-wide
    state is shared by all ranks: environment variables, the working directory, and `print`.
    Process groups of PyTorch therefore cannot be used. XGBoost's communicator is per thread, so it
    can.

    Args:
        train_loop_per_worker: Training function, as in `DataParallelTrainer`.
        num_workers: Number of ranks, at least 1.
        train_loop_config: Argument of the training function.
        backend_config: As in `DataParallelTrainer`.
        run_config: As in `DataParallelTrainer`.
        validation_config: As in `DataParallelTrainer`.

    Returns:
        The result of the run.

    Raises:
        TrainingFailedError: The run failed, as in `fit()`.

    Example:
        ```python
        result = testing.run_in_threads(train_func, num_workers=2)
        assert result.metrics["loss"] < 1
        ```
    """
    try:
        return _ThreadTrainer(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=backend_config,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=run_config,
            validation_config=validation_config,
        ).fit()
    except Exception as error:
        raise without_internal_frames(error)  # noqa: B904  # the same error


class _ThreadTrainer(DataParallelTrainer):
    def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
        num_threads = self.scaling_config.max_workers
        return LocalMode(self.validation_config, use_caller_thread, num_threads)
