"""Start runs of training functions."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from drawbar.train import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drawbar.train.testing import run_in_threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def fit(
    function: Any,
    run: RunConfig | Path | str,
    config: Any = None,
    *,
    num_workers: int = 0,
    in_threads: bool = False,
    **options: Any,
) -> Result:
    """Run a training function.

    Args:
        function: Training function.
        run: Settings of the run, or the storage path of a run named `run`.
        config: Argument of the training function.
        num_workers: Number of workers. Default: local mode.
        in_threads: Whether the workers are threads of this process instead of Ray actors.
        options: Settings of `RunConfig` and `FailureConfig`, and other arguments of the trainer.
    """
    failure = _pop_settings(FailureConfig, options)
    if failure:
        options["failure_config"] = FailureConfig(**failure)
    settings = _pop_settings(RunConfig, options)
    if isinstance(run, RunConfig):
        run_config = replace(run, **settings)
    else:
        run_config = RunConfig(**{"name": "run", "storage_path": run, **settings})
    if in_threads:
        return run_in_threads(
            function,
            num_workers=num_workers,
            train_loop_config=config,
            run_config=run_config,
            **options,
        )
    return DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=run_config,
        **options,
    ).fit()


def _pop_settings(config: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of a config class from the options and return them."""
    names = inspect.signature(config).parameters.keys() & options.keys()
    return {name: options.pop(name) for name in names}
