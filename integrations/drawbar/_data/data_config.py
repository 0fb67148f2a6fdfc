"""`DataConfig`: which datasets are split between the workers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from drawbar._base.fields import ConfigRepr, list_of
from drawbar._records.events import UnevenRows
from drawbar.train._config.data_source import TRAIN_DATASET_KEY

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset, ExecutionOptions
    from ray.data.preprocessor import Preprocessor


def _check_datasets_to_split(name: str, value: Any) -> str | tuple[str, ...]:
    if value == "all":
        return "all"
    names: tuple[str, ...] = list_of(str, '"all" or a list of dataset names')(name, value)
    return names


@dataclass(frozen=True, repr=False)
class DataConfig(ConfigRepr):
    """Splitting of datasets between the workers, and execution by Ray Data.

    Override `configure` in a subclass to split datasets differently.

    Args:
        datasets_to_split: "all", or the names of the datasets that are split between the workers.
            Each worker reads all rows of the other datasets. Default: only "train" is split.
        execution_options: `ray.data.ExecutionOptions` for all datasets, or one per dataset name. By
            default the order of rows is preserved, so that a restart can resume within an epoch. If
            you pass options, a restart can do so only with `preserve_order=True`.
        enable_shard_locality: Whether workers prefer blocks that are stored on their node. Ray Data
            does this only if the order of rows is not preserved.
        uneven_rows: Handling of rows that cannot be divided evenly between the workers.
            "drop" leaves out at most `num_workers - 1` rows of an epoch. If an epoch is resumed
            with another number of workers, this limit also applies, except for Ray Data datasets:
            these leave out rows before the resume and again after it.
            "pad" repeats one row of a neighbouring worker on workers that have one row less.
            "keep" assigns every row to exactly one worker, so some workers have one more row and
            maybe one more batch. Use it if workers do not wait for each other at each batch, or
            with PyTorch's `Join`.
            "error" raises an error if rows remain.
            All values except "drop" materialize a Ray Data dataset once per run in Ray's object
            store and give each worker consecutive rows, which are the same in every attempt.
        group_column: Column whose equal values stay together: all rows of a group are consecutive
            and go to the same worker. A dataset in which they are not consecutive is sorted first.
            Requires `uneven_rows="keep"`.
        preprocessor: A preprocessor of `ray.data.preprocessors`. Unless it is fitted, it is fitted
            on "train" before the workers start. It is applied to all datasets and stored in every
            checkpoint (`Checkpoint.get_preprocessor()`).
        datasets_to_shuffle: Names of split datasets whose rows are shuffled once before the split,
            so that the rows of each worker are a random sample of the dataset. The order is the
            same in every attempt. Requires an `uneven_rows` other than "drop" and no
            `group_column`. Default: none.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `uneven_rows` is unknown, or an argument conflicts with another one.

    Example:
        >>> DataConfig(datasets_to_split=["train", "val"], uneven_rows="pad")
        DataConfig(datasets_to_split=('train', 'val'), uneven_rows='pad')
    """

    datasets_to_split: Annotated[Literal["all"] | Sequence[str], _check_datasets_to_split] = (
        TRAIN_DATASET_KEY,
    )
    execution_options: ExecutionOptions | Mapping[str, ExecutionOptions] | None = None
    enable_shard_locality: bool = True
    _: KW_ONLY
    uneven_rows: UnevenRows = "drop"
    group_column: str | None = None
    preprocessor: Preprocessor | None = None
    datasets_to_shuffle: Annotated[Sequence[str], list_of(str, "a list of dataset names")] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_column is not None and self.uneven_rows != "keep":
            raise ValueError(
                f"DataConfig.group_column={self.group_column!r} needs workers with different "
                f"numbers of rows, but uneven_rows={self.uneven_rows!r}. "
                'Set uneven_rows="keep"'
            )
        if self.preprocessor is not None and not hasattr(self.preprocessor, "fit_status"):
            raise TypeError(
                "DataConfig.preprocessor must be one of ray.data.preprocessors, such as "
                f"StandardScaler(columns=[...]), found {self.preprocessor!r}"
            )
        names = self.datasets_to_shuffle
        if names and self.uneven_rows == "drop":
            raise ValueError(
                f"DataConfig.datasets_to_shuffle={list(names)} needs all rows before they "
                'are split, but uneven_rows="drop" streams them. Set uneven_rows="keep", or '
                "shuffle the dataset with ray.data.Dataset.random_shuffle(seed=...)"
            )
        if names and self.group_column is not None:
            raise ValueError(
                f"DataConfig.datasets_to_shuffle={list(names)} would separate the rows of a group, "
                f"but group_column={self.group_column!r} keeps them together. Remove one of them"
            )

    def shuffles(self, name: str) -> bool:
        """Return whether the rows of a dataset are shuffled before they are split."""
        return self.is_materialized_split(name) and name in self.datasets_to_shuffle

    def is_split(self, name: str) -> bool:
        """Return whether a dataset is split between the workers."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def is_materialized_split(self, name: str) -> bool:
        """Return whether a dataset is materialized and split by row number."""
        return self.is_split(name) and self.uneven_rows != "drop" and not self.has_custom_split

    @property
    def has_custom_split(self) -> bool:
        """True if a subclass overrides `configure`."""
        return type(self).configure is not DataConfig.configure

    def configure(
        self,
        datasets: Mapping[str, Dataset],
        world_size: int,
        worker_handles: Sequence[object] | None = None,
        worker_node_ids: Sequence[str] | None = None,
        **_: object,
    ) -> list[dict[str, DataIterator]]:
        """Return the shards of each worker. Override this method to split datasets differently.

        The controller's process calls it before each attempt. If a subclass overrides it, workers
        receive exactly the iterators that it returns. Checkpoints then record only complete epochs.

        Args:
            datasets: Datasets by name. Dataset factories have been called.
            world_size: Number of workers.
            worker_handles: Always None. Accepted for compatibility with Ray Train.
            worker_node_ids: Node id of each worker.

        Returns:
            One mapping from dataset name to iterator per worker, in rank order.
        """
        hints = list(worker_node_ids or ()) if self.enable_shard_locality else None
        shards: list[dict[str, DataIterator]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            dataset = self.apply_options(name, dataset)
            # A single worker reads the dataset directly: streaming_split() would need an actor.
            if self.is_split(name) and world_size > 1:
                iterators = dataset.streaming_split(
                    world_size, equal=self.uneven_rows != "keep", locality_hints=hints or None
                )
            else:
                iterators = [dataset.iterator()] * world_size
            for shard, iterator in zip(shards, iterators, strict=True):
                shard[name] = iterator
        return shards

    @staticmethod
    def default_ingest_options() -> ExecutionOptions:
        """Return the default execution options of datasets, for example to modify them.

        Returns:
            A copy of the options of the current `ray.data.DataContext` with `preserve_order=True`.
        """
        from ray.data import DataContext

        # Copy them, since all datasets in this process share them.
        options = copy.deepcopy(DataContext.get_current().execution_options)
        options.preserve_order = True
        return options

    def apply_options(self, name: str, dataset: Dataset) -> Dataset:
        """Return a copy of a dataset with the execution options of this config."""
        options = self.execution_options
        return with_options(dataset, options.get(name) if isinstance(options, Mapping) else options)


def with_options(dataset: Dataset, options: ExecutionOptions | None) -> Dataset:
    """Return a copy of a dataset with other execution options.

    Without a terminal, Ray Data logs one line per epoch instead of progress bars.

    Args:
        dataset: Dataset to copy.
        options: Execution options. None keeps the dataset's options and preserves the row order.
    """
    copied = type(dataset).copy(dataset, _deep_copy=True)  # copies the context, which may be shared
    copied.context.execution_options = copy.deepcopy(
        copied.context.execution_options if options is None else options
    )
    if options is None:
        copied.context.execution_options.preserve_order = True
    if not sys.stderr.isatty():
        # Without a terminal, progress bars would print dozens of lines for each epoch.
        copied.context.enable_progress_bars = False
        copied.context.print_on_execution_start = False
    return copied
