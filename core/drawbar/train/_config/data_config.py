"""`DataConfig`: which datasets are split between the workers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, get_args

from drawbar.train._config.checks import (
    ConfigRepr,
    is_list_of,
    require_choice,
    require_type,
)
from drawbar.train._row_positions import UnevenRows

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset, ExecutionOptions
    from ray.data.preprocessor import Preprocessor

TRAIN_DATASET_KEY = "train"
"""The name of the dataset that is trained on."""


@dataclass(frozen=True, repr=False)
class DataConfig(ConfigRepr):
    """Which datasets are split between the workers, and how Ray Data runs them.

    A subclass that overrides `configure` splits in its own way.

    Args:
        datasets_to_split: "all", or the names of the datasets that are split evenly and streamed.
            Every other one is whole on each worker. Default: only "train" is split.
        execution_options: `ray.data.ExecutionOptions` for all datasets, or one per name. Without
            them the order of the rows is preserved, so that a restart goes on inside an epoch; with
            them it is if they say `preserve_order=True`.
        enable_shard_locality: Prefer giving a worker the blocks that lie on its own node. Ray Data
            does so only where the order is not preserved.
        uneven_rows: How to handle rows that the workers cannot share equally. "drop" leaves them
            out:
            at most `num_workers` - 1 rows of an epoch, also if it was resumed with other numbers of
            workers; for streams, that many at each number of workers. "pad" gives workers with one
            row less one more row from their neighbour. "keep" gives every row to one worker, so
            that some get one row more, and maybe one batch more: for functions in which workers do
            not wait for each other at each batch, or with PyTorch's `Join`. "error" raises an
            error if rows remain. All but "drop" compute a Ray Data dataset once per run, keep it in
            Ray's object store, and give each worker consecutive rows, the same in every attempt.
        group_column: Rows with the same value in this column go to one worker, side by side; a
            dataset whose groups lie apart is sorted first. Needs `uneven_rows="keep"`.
        preprocessor: Of `ray.data.preprocessors`: fitted on "train" before the workers start,
            unless it is fitted already, and applied to all datasets. Every checkpoint has it:
            `Checkpoint.get_preprocessor()`.
        datasets_to_shuffle: Names of split datasets whose rows are shuffled once, before the split,
            so that the rows of each worker are a random sample of the dataset. The order is the
            same in every attempt. Needs an `uneven_rows` other than "drop" and no `group_column`.
            Default: none.
    """

    datasets_to_split: Literal["all"] | Sequence[str] = (TRAIN_DATASET_KEY,)
    execution_options: ExecutionOptions | Mapping[str, ExecutionOptions] | None = None
    enable_shard_locality: bool = True
    _: KW_ONLY
    uneven_rows: UnevenRows = "drop"
    group_column: str | None = None
    preprocessor: Preprocessor | None = None
    datasets_to_shuffle: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_type("DataConfig.enable_shard_locality", self.enable_shard_locality, bool)
        require_choice("DataConfig.uneven_rows", self.uneven_rows, get_args(UnevenRows))
        if self.group_column is not None:
            require_type("DataConfig.group_column", self.group_column, str)
            if self.uneven_rows != "keep":
                raise ValueError(
                    f"DataConfig.group_column={self.group_column!r} keeps groups whole, so the "
                    f"workers cannot get equally many rows, but uneven_rows={self.uneven_rows!r}; "
                    "set "
                    'uneven_rows="keep"'
                )
        if self.preprocessor is not None and not hasattr(self.preprocessor, "fit_status"):
            raise TypeError(
                "DataConfig.preprocessor must be one of ray.data.preprocessors, such as "
                f"StandardScaler(columns=[...]), found {self.preprocessor!r}"
            )
        self._check_shuffle()
        names = self.datasets_to_split
        if names == "all":
            return
        if not is_list_of(str, names):
            raise TypeError(
                'DataConfig.datasets_to_split must be "all" or a list of dataset names, '
                f"found {names!r}"
            )
        object.__setattr__(self, "datasets_to_split", tuple(names))

    def _check_shuffle(self) -> None:
        """Check `datasets_to_shuffle` and store it as a tuple.

        Raises:
            TypeError: It is not a list of names.
            ValueError: It cannot be combined with the other arguments.
        """
        names = self.datasets_to_shuffle
        if not is_list_of(str, names):
            raise TypeError(
                f"DataConfig.datasets_to_shuffle must be a list of dataset names, found {names!r}"
            )
        object.__setattr__(self, "datasets_to_shuffle", tuple(names))
        if names and self.uneven_rows == "drop":
            raise ValueError(
                f"DataConfig.datasets_to_shuffle={list(names)} needs rows that are split by "
                'number, but uneven_rows="drop" streams them. Set uneven_rows="keep", or shuffle '
                "the "
                "dataset with ray.data.Dataset.random_shuffle(seed=...)"
            )
        if names and self.group_column is not None:
            raise ValueError(
                f"DataConfig.datasets_to_shuffle={list(names)} would separate the rows of a group, "
                f"but group_column={self.group_column!r} keeps them together. Remove one of them"
            )

    def shuffles(self, name: str) -> bool:
        """Return True if the rows of a dataset are shuffled before they are split."""
        return self.is_materialized_split(name) and name in self.datasets_to_shuffle

    def is_split(self, name: str) -> bool:
        """Whether the dataset of this name is split between the workers."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def is_materialized_split(self, name: str) -> bool:
        """Whether it is split by row numbers, and computed for that."""
        return self.is_split(name) and self.uneven_rows != "drop" and not self.has_custom_split

    @property
    def has_custom_split(self) -> bool:
        """Whether a subclass splits in its own way."""
        return type(self).configure is not DataConfig.configure

    def configure(
        self,
        datasets: Mapping[str, Dataset],
        world_size: int,
        worker_handles: Sequence[object] | None = None,
        worker_node_ids: Sequence[str] | None = None,
        **_: object,
    ) -> list[dict[str, DataIterator]]:
        """Give each worker its part of each dataset, in rank order. A hook for subclasses.

        It is called before each attempt, where the run is controlled. What an override gives is
        passed on as it is: of its data position a checkpoint has the whole epochs only.

        Args:
            datasets: Datasets by name; those given as functions are made.
            world_size: Number of workers.
            worker_handles: Always None: there is nothing to ask the workers.
            worker_node_ids: Id of each worker's node.
        """
        hints = list(worker_node_ids or ()) if self.enable_shard_locality else None
        shards: list[dict[str, DataIterator]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            dataset = self.apply_options(name, dataset)
            # One worker reads the whole: a split would keep an actor for it that hands the rows
            # out.
            if self.is_split(name) and world_size > 1:
                parts = dataset.streaming_split(
                    world_size, equal=self.uneven_rows != "keep", locality_hints=hints or None
                )
            else:
                parts = [dataset.iterator()] * world_size
            for shard, part in zip(shards, parts, strict=True):
                shard[name] = part
        return shards

    @staticmethod
    def default_ingest_options() -> ExecutionOptions:
        """Give the options that datasets have here by default, to change and to pass on.

        They are those of the current `ray.data.DataContext`, and keep the order of the rows.
        """
        from ray.data import DataContext

        # A copy: the current ones are those of every dataset of this process.
        options = copy.deepcopy(DataContext.get_current().execution_options)
        options.preserve_order = True
        return options

    def apply_options(self, name: str, dataset: Dataset) -> Dataset:
        """Give a copy of a dataset that Ray Data runs as this config says."""
        options = self.execution_options
        return with_options(dataset, options.get(name) if isinstance(options, Mapping) else options)


def with_options(dataset: Dataset, options: ExecutionOptions | None) -> Dataset:
    """Give a copy of a dataset with other options; without options, one that keeps its order.

    Off a terminal Ray Data logs one line for each pass over it, and draws no bars.
    """
    copied = type(dataset).copy(dataset, _deep_copy=True)  # the context too, which is often shared
    copied.context.execution_options = copy.deepcopy(
        copied.context.execution_options if options is None else options
    )
    if options is None:
        copied.context.execution_options.preserve_order = True
    if not sys.stderr.isatty():
        # Else Ray Data draws bars for each pass, dozens of lines where nothing is redrawn.
        copied.context.enable_progress_bars = False
        copied.context.print_on_execution_start = False
    return copied
