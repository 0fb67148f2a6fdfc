"""Which run a trial goes on with, and which trainer a trial's parameters make."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drawbar.train import DataParallelTrainer

_RUN = re.compile(r"run_(\d+)")


def sorted_run_names(found: Iterable[str]) -> list[str]:
    """Give the names of a trial's runs, oldest first, of what lies in its folder."""
    return sorted(filter(_RUN.fullmatch, found), key=_number)


def choose_run_name(
    runs: Sequence[str], start_from: str | None, *, latest_checkpoint: str | None
) -> str:
    """Name the run that a trial goes on with when its process has started.

    A trial has one run after another, `run_0`, `run_1` ... It goes on with the newest if that does
    what Tune wants and counts on: start from the newest checkpoint, or from none. Otherwise a new
    run begins. Population based training wants another trial's checkpoint; and whatever was killed
    may have left later ones than Tune has heard of, whose results it would count from too low.

    Args:
        runs: Names of the runs that the trial has had, oldest first.
        start_from: Path of the checkpoint that Tune starts the trial from; None: from nothing.
        newest: Path of the newest checkpoint of the newest run, if it has one.
    """
    if not runs:
        return "run_0"
    return runs[-1] if start_from == latest_checkpoint else f"run_{_number(runs[-1]) + 1}"


def _number(run: str) -> int:
    return int(run.rpartition("_")[2])


def validate_param_space(kind: type[DataParallelTrainer], config: Mapping[str, object]) -> None:
    """Refuse parameters that are no arguments of the trainer.

    Raises:
        ValueError: One is not, or cannot be tuned.
    """
    if "run_config" in config:
        raise ValueError(
            "param_space has 'run_config', which a trial cannot change: a trial's run lies in the "
            "trial's folder. Give the Tuner a ray.tune.RunConfig, the trainer a RunConfig"
        )
    known = inspect.signature(kind).parameters
    for name in config:
        if name not in known:
            raise ValueError(
                f"param_space has {name!r}, which is no argument of {kind.__name__}; what the "
                f"training function gets goes into 'train_loop_config': {{{name!r}: ...}}"
            )


def apply_parameters(
    trainer: DataParallelTrainer, config: Mapping[str, object], **overrides: object
) -> DataParallelTrainer:
    """Make the trainer of a trial: the same but for its parameters and what is `changed`."""
    arguments = trainer.init_arguments
    for name, value in config.items():
        arguments[name] = merge_parameters(
            arguments.get(name) or getattr(trainer, name, None), value
        )
    return type(trainer)(**arguments | overrides)


def merge_parameters(value: object, parameters: object) -> Any:
    """Give the value of an argument with parameters in it.

    A dict changes those keys of a dict that it has, and those fields of a config. Anything else
    takes the value's place.
    """
    if isinstance(parameters, Mapping) and isinstance(value, Mapping):
        return {**value, **parameters}
    if isinstance(parameters, Mapping) and dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **parameters)  # type: ignore[type-var]  # an instance
    return parameters
