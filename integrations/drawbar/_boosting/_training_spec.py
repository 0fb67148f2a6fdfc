"""The declarative form: what to train on which columns, without a training function.

A library plugs in by a subclass of `Fit` with two methods: `check`, in the driver, and `train`, on
each worker with the loaded shards. The object itself is the training function.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar

from drawbar._boosting._columns import ColumnRoles
from drawbar._boosting._load import load_shards
from drawbar._boosting._reader import ColumnFormat, LabelRange
from drawbar._boosting._shard import Shard
from drawbar.train import ScalingConfig


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(ABC):
    """A training that is declared rather than written. It is pickled to the workers.

    Args:
        params: The library's own parameters.
        columns: Which column plays which role.
        datasets: Names of the datasets, "train" first. All others are evaluated every round.
        num_boost_round: Rounds in total, those before a resume included.
        early_stopping_rounds: Stop when the last metric on the last dataset has not improved for
            so many rounds. None: never.
        callbacks: The library's own callbacks, pickled to each worker.
        external_memory: Keep rows on disk rather than in memory: True, or the folder to keep them.
        keep_data: Keep what was read as long as the process lives, for a restart after a failure.
    """

    stages_on_disk: ClassVar[bool] = False
    """Whether rows wait on disk for the library to take them, also without external memory."""

    column_format: ClassVar[ColumnFormat] = ColumnFormat()
    """How the library takes columns."""

    parameter_aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    """What the library calls an argument where it stands in `params`: argument to names."""

    params: Mapping[str, object]
    columns: ColumnRoles
    datasets: Sequence[str] = ("train",)
    num_boost_round: int = 10
    early_stopping_rounds: int | None = None
    callbacks: Sequence[Any] = ()
    external_memory: bool | str | os.PathLike[str] = False
    cache_data: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.params, Mapping):
            raise TypeError(f"params must be a dict, found {self.params!r}")
        _require_positive_int("num_boost_round", self.num_boost_round)
        if self.early_stopping_rounds is not None:
            _require_positive_int("early_stopping_rounds", self.early_stopping_rounds)
            if len(self.datasets) == 1:
                raise ValueError(
                    f"early_stopping_rounds={self.early_stopping_rounds} needs a dataset to "
                    'evaluate besides "train"; add one, such as datasets={"train": ..., '
                    '"validation": ...}'
                )

    @classmethod
    def resolve_aliases(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """Take what `params` says of the other arguments out of it, as the library does.

        It wins, with a warning, over an argument that says something else. A number of rounds for
        early stopping that is not positive turns that off, and None is nothing.
        """
        arguments, params = dict(given), given["params"]
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be a dict, found {params!r}")
        spelled = {
            name: argument for argument, names in cls.parameter_aliases.items() for name in names
        }
        arguments["params"] = {name: params[name] for name in params if name not in spelled}
        for name, value in params.items():
            argument = spelled.get(name)
            if argument is None or value is None:
                continue
            if arguments.get(argument, value) != value:
                warnings.warn(
                    f"params[{name!r}]={value!r} is taken, and not {argument}="
                    f"{arguments[argument]!r}",
                    stacklevel=6,
                )
            arguments[argument] = value
        rounds = arguments.get("early_stopping_rounds")
        if "early_stopping_rounds" in spelled.values() and isinstance(rounds, int) and rounds <= 0:
            del arguments["early_stopping_rounds"]
        return arguments

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user runs on the workers."""
        return any(getattr(callback, "runs_user_code", True) for callback in self.callbacks)

    @property
    @abstractmethod
    def averages_percentiles(self) -> bool:
        """True if the objective sets leaf values to percentiles of a worker's rows.

        The library averages these values over the workers. The result is close to the percentile of
        all rows only if each worker has a random sample of them.
        """

    @property
    def storage_directory(self) -> Path | None:
        """Where to keep rows on disk; None for the system's folder for such."""
        return None if isinstance(self.external_memory, bool) else Path(self.external_memory)

    @abstractmethod
    def validate(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver, before a process starts.

        Raises:
            TypeError, ValueError: Training cannot work with them.
        """

    @abstractmethod
    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round; `shards` has the datasets in their order."""

    def __call__(self) -> None:
        """Load the data and train: the training function."""
        shards = load_shards(
            self.datasets,
            self.columns,
            self.column_format,
            on_disk=self.stages_on_disk or bool(self.external_memory),
            folder=self.storage_directory,
            should_cache=self.cache_data,
        )
        self.train(shards)


def validate_labels(
    shard: Shard,
    required_by: str,
    *,
    low: float = float("-inf"),
    high: float = float("inf"),
    whole_numbers: bool = False,
) -> None:
    """Check the labels of all ranks against what an objective takes.

    Args:
        shard: Any rank's shard of the dataset.
        why: What wants it, such as "objective 'binary:logistic'".
        low: The smallest label that may be.
        high: The largest.
        whole_numbers: Whether it must be a whole number.

    Raises:
        ValueError: A label is outside; the message has what was found.
    """
    found: LabelRange = shard.label_range
    kind = "whole numbers" if whole_numbers else "numbers"
    if found.low < low or found.high > high or (whole_numbers and not found.whole_numbers):
        raise ValueError(
            f"{required_by} takes labels that are {kind} from {low:g} to {high:g}, but column "
            f"{shard.columns.label!r} of datasets[{shard.name!r}] goes from {found.low:g} to "
            f"{found.high:g}{'' if found.whole_numbers else ', with fractions'}"
        )


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, found {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, found {value}")
