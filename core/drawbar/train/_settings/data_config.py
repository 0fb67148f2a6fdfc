"""`DataConfig`: which datasets are split between the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from drawbar.train._settings.checks import ShowsWhatWasSet, is_list_of, require_type

TRAIN_DATASET_KEY = "train"
"""The name of the dataset that is trained on."""


@dataclass(frozen=True, repr=False)
class DataConfig(ShowsWhatWasSet):
    """Which datasets are split between the workers, and how Ray Data runs them.

    Args:
        datasets_to_split: "all", or the names of the datasets that are split evenly and streamed.
            Every other one is whole on each worker. Default: only "train" is split.
        execution_options: `ray.data.ExecutionOptions` for all datasets, or one per name. Without
            them the order of the rows is preserved, so that a restart goes on inside an epoch; with
            them it is if they say `preserve_order=True`.
        enable_shard_locality: Prefer giving a worker the blocks that lie on its own node. Ray Data
            does so only where the order is not preserved.
        equal: True streams a split dataset, as many rows to each worker, and leaves up to
            `num_workers` - 1 rows out. False gives every row to a worker: consecutive parts, the
            same in every attempt, that differ by one row at most. The dataset is computed once per
            run and stays in Ray's object store. A part can be read without the other workers; a
            restart begins it anew.
        group_column: Rows with the same value in this column go to one worker, side by side; a
            dataset whose groups lie apart is sorted first. Needs `equal=False`.
    """

    datasets_to_split: Literal["all"] | Sequence[str] = (TRAIN_DATASET_KEY,)
    execution_options: Any | None = None
    enable_shard_locality: bool = True
    _: KW_ONLY
    equal: bool = True
    group_column: str | None = None

    def __post_init__(self) -> None:
        require_type("DataConfig.enable_shard_locality", self.enable_shard_locality, bool)
        require_type("DataConfig.equal", self.equal, bool)
        if self.group_column is not None:
            require_type("DataConfig.group_column", self.group_column, str)
            if self.equal:
                raise ValueError(
                    f"DataConfig.group_column={self.group_column!r} keeps groups whole, so the "
                    "workers cannot get equally many rows; set equal=False"
                )
        names = self.datasets_to_split
        if names == "all":
            return
        if not is_list_of(str, names):
            raise TypeError(
                'DataConfig.datasets_to_split must be "all" or a list of dataset names, '
                f"found {names!r}"
            )
        object.__setattr__(self, "datasets_to_split", tuple(names))

    def splits(self, name: str) -> bool:
        """Whether the dataset of this name is split between the workers."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def splits_exactly(self, name: str) -> bool:
        """Whether it is split so that no row is left out."""
        return self.splits(name) and not self.equal
