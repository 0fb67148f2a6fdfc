"""Load shards, and train like a trainer, on ranks in threads: a run takes milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.load import load_shards
from drawbar._boosting.shard import Shard
from drawbar.train import Result
from drawbar.train.backend import BackendConfig
from drawbar.train.testing import run_in_threads

if TYPE_CHECKING:  # a test has one of the libraries only
    from drawbar.lightgbm import LightGBMTrainer
    from drawbar.xgboost import XGBoostTrainer


@dataclass
class TableShard:
    """Shard of tables in memory, as `load_shards` reads it."""

    tables: Iterable[pa.Table]
    is_in_object_store: bool = False

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        return iter(self.tables)


def load_on_rank(
    columns: Mapping[str, Any],
    tables: Mapping[str, Iterable[pa.Table]] | None = None,
    **options: Any,
) -> dict[str, Shard]:
    """Load the shards of this rank in a training function.

    Args:
        columns: Columns by role, for example `{"label": "y"}`.
        tables: Tables of this rank by dataset. Default: the dataset "train" of the trainer.
        **options: Options of the shards, for example `folder`.
    """
    if tables is None:
        return load_shards(["train"], ColumnRoles(**columns), **options)
    return load_shards(
        list(tables),
        ColumnRoles(**columns),
        get_shard=lambda name: TableShard(tables[name]),
        **options,
    )


def train_in_threads(
    trainer: LightGBMTrainer | XGBoostTrainer,
    backend_config: BackendConfig,
    get_tables: Callable[[], Mapping[str, Iterable[pa.Table]]],
) -> Result:
    """Train like the trainer's `fit()`, but in threads and on other data.

    Args:
        trainer: Trainer without a training function. Its datasets are not read.
        backend_config: Config of the library.
        get_tables: Function that returns the tables of this rank by dataset.
    """
    shared: Any = trainer.train_loop_per_worker

    def function() -> None:
        tables = get_tables()
        spec = copy.deepcopy(shared)  # callbacks have state, and a process would have its own
        shards = load_shards(
            spec.datasets,
            spec.columns,
            spec.column_format,
            get_shard=lambda name: TableShard(tables[name]),
        )
        spec.train(shards)

    num_workers = trainer.scaling_config.num_workers
    assert isinstance(num_workers, int)
    return run_in_threads(
        function,
        num_workers=num_workers,
        backend_config=backend_config,
        run_config=trainer.run_config,
        validation_config=trainer.validation_config,
    )
