"""Choose the run of a trial and apply its parameters to the trainer."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drawbar.train import DataParallelTrainer

_RUN = re.compile(r"run_(\d+)")


def sorted_run_names(names: Iterable[str]) -> list[str]:
    """Return the run names among the names in a trial directory, oldest first."""
    return sorted(filter(_RUN.fullmatch, names), key=_number)


def choose_run_name(
    runs: Sequence[str], start_from: str | None, *, latest_checkpoint: str | None
) -> str:
    """Return the name of the run that a trial starts or resumes.

    The runs of a trial are `run_0`, `run_1`, and so on. The trial resumes the newest run if this
    starts from the checkpoint that Tune expects: the newest one of the run, or none. Otherwise it
    starts a new run. Population based training expects a checkpoint of another trial. A killed
    trial may have newer checkpoints than Tune knows of; resuming from them would make Tune count
    iterations too low.

    Args:
        runs: Names of the trial's runs, oldest first.
        start_from: Path of the checkpoint from which Tune starts the trial; None for none.
        latest_checkpoint: Path of the latest checkpoint of the newest run; None for none.
    """
    if not runs:
        return "run_0"
    return runs[-1] if start_from == latest_checkpoint else f"run_{_number(runs[-1]) + 1}"


def _number(run: str) -> int:
    return int(run.rpartition("_")[2])


def validate_param_space(kind: type[DataParallelTrainer], config: Mapping[str, object]) -> None:
    """Check that all parameters are arguments of the trainer that can be tuned.

    Raises:
        ValueError: A parameter is not an argument, or it cannot be tuned.
    """
    if "run_config" in config:
        raise ValueError(
            "param_space['run_config'] cannot be tuned, because each trial stores its run in the "
            "trial's directory. Pass a ray.tune.RunConfig to Tuner, or a RunConfig to the trainer."
        )
    known = inspect.signature(kind).parameters
    for name in config:
        if name not in known:
            raise ValueError(
                f"param_space[{name!r}] is not an argument of {kind.__name__}. Pass parameters of "
                f"the training function as 'train_loop_config': {{{name!r}: ...}}."
            )


def apply_parameters(
    trainer: DataParallelTrainer, config: Mapping[str, object], **overrides: object
) -> DataParallelTrainer:
    """Return a copy of a trainer with the parameters of a trial and other overrides."""
    arguments = trainer.init_arguments
    for name, value in config.items():
        arguments[name] = merge_parameters(
            arguments.get(name) or getattr(trainer, name, None), value
        )
    return type(trainer)(**arguments | overrides)


def merge_parameters(value: object, parameters: object) -> Any:
    """Return the value of an argument with parameters applied.

    A dict replaces the given keys of a dict, or the given fields of a config. Any other parameter
    replaces the value.
    """
    if isinstance(parameters, Mapping) and isinstance(value, Mapping):
        return {**value, **parameters}
    if isinstance(parameters, Mapping) and dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **parameters)  # type: ignore[type-var]  # an instance
    return parameters
