"""launch: run an Accelerate function on Ray workers, like notebook_launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drawbar.torch import TorchTrainer
from drawbar.train import Result, RunConfig, ScalingConfig


def launch(
    function: Callable[..., object],
    args: Sequence[object] = (),
    scaling_config: ScalingConfig | None = None,
    *,
    run_config: RunConfig | None = None,
) -> Result:
    """Run a function that creates an `Accelerator` on every worker.

    Corresponds to `accelerate.notebook_launcher(function, args, num_processes)`, for a Ray cluster
    instead of one machine. Call it from a notebook or a script.

    Args:
        function: Function to run on every worker.
        args: Positional arguments of the function.
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, callbacks.

    Returns:
        The result of the run. `result.return_values` contains the return value of each rank.

    Raises:
        TypeError: `args` is not a tuple or list.
        TrainingFailedError: The function failed. See `TorchTrainer.fit()`.

    Example:
        ```python
        result = launch(train, args=(0.001,), scaling_config=ScalingConfig(num_workers=2))
        ```
    """
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(
            f"args must be a tuple or list of arguments, found {args!r}. Use args=({args!r},)."
        )

    def train_loop() -> object:
        return function(*args)

    return TorchTrainer(train_loop, scaling_config=scaling_config, run_config=run_config).fit()
