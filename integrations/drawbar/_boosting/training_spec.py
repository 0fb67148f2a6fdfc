"""TrainingSpec: training described by parameters instead of a function.

A library implements two methods in a subclass: `validate`, called in the driver, and `train`,
called on each worker with the loaded shards. The object itself is used as the training function.
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

from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.load import load_shards
from drawbar._boosting.reader import ColumnFormat, LabelRange
from drawbar._boosting.shard import Shard
from drawbar.train import ScalingConfig


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(ABC):
    """Training that is described by parameters and columns. It is pickled to the workers.

    Args:
        params: Parameters of the library.
        columns: Roles of the columns.
        datasets: Names of the datasets, "train" first. All others are evaluated every round.
        num_boost_round: Total number of rounds, including those before a resume.
        early_stopping_rounds: Stop when a metric has not improved for this number of rounds. The
            library determines which metrics count. None disables early stopping.
        callbacks: Callbacks of the library, pickled to each worker.
        external_memory: Whether the library's dataset is on disk, or the directory for all files.
        cache_data: Whether to keep loaded data while the process lives, for restarts.
    """

    column_format: ClassVar[ColumnFormat] = ColumnFormat()
    """Column formats that the library accepts."""

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
            raise TypeError(f"params must be a dict, found {self.params!r}.")
        _require_positive_int("num_boost_round", self.num_boost_round)
        if self.early_stopping_rounds is not None:
            _require_positive_int("early_stopping_rounds", self.early_stopping_rounds)
            if len(self.datasets) == 1:
                raise ValueError(
                    f"early_stopping_rounds={self.early_stopping_rounds} needs a dataset to "
                    'evaluate in addition to "train". Add one, for example '
                    'datasets={"train": ..., "validation": ...}.'
                )

    @classmethod
    def get_parameter_aliases(cls) -> Mapping[str, Sequence[str]]:
        """Return names in `params` that stand for an argument: argument to names."""
        return {}

    @classmethod
    def resolve_aliases(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """Move aliases of other arguments from `params` to these arguments, like the library.

        They override different values of the arguments with a warning. Values of None are ignored,
        and early stopping with a number of rounds that is not positive is disabled.
        """
        arguments, params = dict(given), given["params"]
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be a dict, found {params!r}.")
        by_alias = {
            alias: argument
            for argument, names in cls.get_parameter_aliases().items()
            for alias in names
        }
        arguments["params"] = {name: params[name] for name in params if name not in by_alias}
        for name, value in params.items():
            argument = by_alias.get(name)
            if argument is None or value is None:
                continue
            if arguments.get(argument, value) != value:
                warnings.warn(
                    f"params[{name!r}]={value!r} overrides {argument}={arguments[argument]!r}. "
                    "Set only one of them.",
                    stacklevel=6,
                )
            arguments[argument] = value
        rounds = arguments.get("early_stopping_rounds")
        if "early_stopping_rounds" in by_alias.values() and isinstance(rounds, int) and rounds <= 0:
            del arguments["early_stopping_rounds"]
        return arguments

    @property
    def runs_user_code(self) -> bool:
        """Whether user code runs on the workers."""
        return any(getattr(callback, "runs_user_code", True) for callback in self.callbacks)

    @property
    @abstractmethod
    def needs_random_rows(self) -> bool:
        """True if the library averages nonlinear values of each worker's rows, such as percentiles.

        The result is close to the value of all rows only if each worker has a random sample of
        them.
        """

    @property
    def storage_directory(self) -> Path | None:
        """Directory for rows on disk; None for the system's temporary directory."""
        return None if isinstance(self.external_memory, bool) else Path(self.external_memory)

    @abstractmethod
    def validate(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver, before any worker starts.

        Raises:
            TypeError, ValueError: A parameter is invalid.
        """

    @abstractmethod
    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round. `shards` is in the order of `datasets`."""

    def __call__(self) -> None:
        """Load the data and train."""
        shards = load_shards(
            self.datasets,
            self.columns,
            self.column_format,
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
    """Check the labels of all ranks against the requirements of an objective.

    Args:
        shard: Shard of the dataset on any rank.
        required_by: Description of what has the requirement, such as "objective 'binary:logistic'".
        low: Smallest valid label.
        high: Largest valid label.
        whole_numbers: Whether labels must be integers.

    Raises:
        ValueError: A label is invalid.
    """
    labels: LabelRange = shard.label_range
    kind = "integers" if whole_numbers else "numbers"
    if labels.low < low or labels.high > high or (whole_numbers and not labels.whole_numbers):
        raise ValueError(
            f"{required_by} needs labels that are {kind} from {low:g} to {high:g}, but column "
            f"{shard.columns.label!r} of datasets[{shard.name!r}] has "
            f"{'integers' if labels.whole_numbers else 'fractional values'} from {labels.low:g} to "
            f"{labels.high:g}."
        )


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, found {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, found {value}.")
