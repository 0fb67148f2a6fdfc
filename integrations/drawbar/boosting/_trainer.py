"""The trainer of both libraries: around a training function, or around a declared `Fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drawbar.boosting._columns import Columns
from drawbar.boosting._fit import Fit
from drawbar.train import (
    BackendConfig,
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.data import Dataset

    Datasets = Mapping[str, Dataset | Callable[[], Dataset]]


class BoostingTrainer(DataParallelTrainer):
    """Runs a training function, or a declared training, with a library's workers connected.

    Every row counts, and each worker gets a part of every dataset, also of those to evaluate. So
    unless a `dataset_config` says otherwise, all datasets are split, exactly.

    Args:
        work: The training function, or what is declared instead of one.
        backend_config: How the library's workers meet.
        group_column: The column whose groups stay whole. Default: that of the declared training.

    All other arguments, and what is raised, are those of `drawbar.train.DataParallelTrainer`.
    """

    def __init__(
        self,
        work: Callable[[], Any] | Callable[[dict[str, Any]], Any] | Fit,
        *,
        backend_config: BackendConfig,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Datasets | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if dataset_config is None:
            group = work.columns.group if isinstance(work, Fit) else None
            dataset_config = DataConfig(datasets_to_split="all", equal=False, group_column=group)
        super().__init__(
            work,
            train_loop_config=train_loop_config,
            backend_config=backend_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )
        if isinstance(work, Fit):
            work.check(self.scaling_config)
            for name, dataset in self.datasets.items():
                if not callable(dataset):
                    check_dataset(name, dataset, work.columns)


def choose_work(
    train_loop_per_worker: Callable[..., Any] | None, declared: Mapping[str, Any]
) -> bool:
    """Say whether a trainer was given what it declares, rather than a training function.

    Args:
        train_loop_per_worker: The training function, if there is one.
        declared: The arguments of the declarative form that were set, with "label_column".

    Raises:
        TypeError: Both, or neither.
    """
    given = [name for name, value in declared.items() if value is not None]
    if train_loop_per_worker is not None and given:
        raise TypeError(
            f"{', '.join(given)} and a training function exclude each other: the function itself "
            "says what is trained. Leave one out"
        )
    if train_loop_per_worker is None and declared.get("label_column") is None:
        raise TypeError(
            "give either a training function, or params and label_column, which need none"
        )
    return train_loop_per_worker is None


def check_dataset(name: str, dataset: Dataset, columns: Columns) -> None:
    """Check a dataset's columns, as far as they are known before it is computed.

    Raises:
        ValueError: A column is missing, or holds neither numbers nor categories.
    """
    schema = dataset.schema(fetch_if_missing=False)
    if schema is None:
        return
    import pyarrow as pa

    found = schema.base_schema
    types = found.types if isinstance(found, pa.Schema) else [None] * len(schema.names)
    columns.check(name, dict(zip(schema.names, types, strict=True)))
