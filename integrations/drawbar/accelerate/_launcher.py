"""The counterpart of Accelerate's `notebook_launcher`."""

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
    """Run a function that makes an `Accelerator` on every worker, and wait for it.

    It does for a Ray cluster what `accelerate.notebook_launcher(function, args, num_processes)`
    does for one machine, from a notebook or a script.

    Args:
        function: What to run.
        args: Its arguments.
        scaling_config: How many workers, on what.
        run_config: Where the run lies, and how it is kept going.

    Returns:
        The result of the run; `result.return_values` has what the function returned on each rank.

    Raises:
        TypeError: `args` is not a sequence of arguments.
        TrainingFailedError: As `TorchTrainer.fit` does.
    """
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple or list of arguments, found {args!r}")

    def train_loop() -> object:
        return function(*args)

    return TorchTrainer(train_loop, scaling_config=scaling_config, run_config=run_config).fit()
