"""Compare the loss of each boosting objective on several workers with one process.

    python -m benchmarks objectives
    python -m benchmarks objectives --only reg:gamma --rows 10000

Each objective of XGBoost and LightGBM is trained on rows that are sorted by label, shuffled, or
weighted, by 1 to 3 workers, as by `XGBoostTrainer(params=...)` and `LightGBMTrainer(params=...)`.
The workers are threads of this process. The table has the largest difference of the loss on all
rows from the loss of the plain library in one process, and "error" if several workers raise one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import xgboost

from benchmarks._objective_rows import (
    FEATURES,
    OBJECTIVES,
    ORDERS,
    ROWS_PER_QUERY,
    Objective,
    Order,
    make_rows,
)
from drawbar._boosting.load import load_shards
from drawbar.lightgbm import LightGBMConfig, LightGBMTrainer
from drawbar.train import (
    LoggingConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    get_context,
)
from drawbar.train.testing import run_in_threads
from drawbar.xgboost import RayTrainReportCallback, XGBoostConfig, XGBoostTrainer, train

WORKERS = (1, 2, 3)
ROUNDS = 20
BASE_PARAMS: dict[str, dict[str, Any]] = {
    "xgboost": {"nthread": 1, "max_depth": 3, "tree_method": "hist"},
    "lightgbm": {
        "num_threads": 1,
        "num_leaves": 8,
        "verbosity": -1,
        "force_row_wise": True,  # by columns, weights are wrong in LightGBM's `mape`
        "min_data_in_leaf": 1,  # several workers estimate the number from hessians
    },
}


def compare(objective: Objective, order: Order, num_workers: int, rows: int) -> float | str:
    """Return the relative difference of the loss from one process, or the error."""
    frame = make_rows(objective, order, rows)
    params = {
        **BASE_PARAMS[objective.library],
        **dict(objective.params),
        "objective": objective.name,
    }
    library: Any = _XGBoost if objective.library == "xgboost" else _LightGBM
    try:
        distributed = library.fit(objective, params, frame, num_workers)
    except (TrainingFailedError, ValueError) as error:
        return str(error)
    alone, found = (
        library.loss(params, frame, model)
        for model in (library.fit_alone(params, frame), distributed)
    )
    return float((found - alone) / abs(alone))


class _XGBoost:
    @staticmethod
    def matrix(frame: pd.DataFrame, params: dict[str, Any]) -> xgboost.DMatrix:
        """Create a matrix; a query has the weight of its first row."""
        weight = frame.get("weight")
        if weight is not None and "query" in frame:
            weight = weight[~frame["query"].duplicated()]
        matrix = xgboost.DMatrix(frame[FEATURES], frame["y"], weight=weight, qid=frame.get("query"))
        if params["objective"] == "survival:aft":
            matrix.set_float_info("label_lower_bound", frame["y"])
            matrix.set_float_info("label_upper_bound", frame["y"] * 1.5)
        return matrix

    @classmethod
    def fit_alone(cls, params: dict[str, Any], frame: pd.DataFrame) -> xgboost.Booster:
        return xgboost.train(params, cls.matrix(frame, params), ROUNDS)

    @classmethod
    def fit(
        cls, objective: Objective, params: dict[str, Any], frame: pd.DataFrame, workers: int
    ) -> Any:
        if objective.labels == "time":  # the trainer has no column for the upper bound

            def train_func() -> None:
                train(params, cls.matrix(_part(frame), params), ROUNDS)

            with _run_config() as run_config:
                result = run_in_threads(
                    train_func,
                    num_workers=workers,
                    backend_config=XGBoostConfig(),
                    run_config=run_config,
                )
                return _model(result, RayTrainReportCallback.get_model)
        trainer: Any = XGBoostTrainer
        return _fit_trainer(trainer, XGBoostConfig(), params, frame, workers)

    @classmethod
    def loss(cls, params: dict[str, Any], frame: pd.DataFrame, model: xgboost.Booster) -> float:
        model.set_param(params)
        text = model.eval(cls.matrix(frame, params))  # such as "[0]\teval-rmse:0.25"
        name, value = text.rsplit("\t", 1)[1].rsplit(":", 1)
        return 1 - float(value) if "ndcg" in name or "map" in name else float(value)


class _LightGBM:
    @staticmethod
    def dataset(frame: pd.DataFrame, **options: Any) -> lightgbm.Dataset:
        group = frame.groupby("query").size() if "query" in frame else None
        weight = frame.get("weight")
        return lightgbm.Dataset(frame[FEATURES], frame["y"], weight=weight, group=group, **options)

    @classmethod
    def fit_alone(cls, params: dict[str, Any], frame: pd.DataFrame) -> lightgbm.Booster:
        return lightgbm.train(params, cls.dataset(frame), ROUNDS)

    @classmethod
    def fit(
        cls, objective: Objective, params: dict[str, Any], frame: pd.DataFrame, workers: int
    ) -> Any:
        trainer: Any = LightGBMTrainer
        return _fit_trainer(trainer, LightGBMConfig(), params, frame, workers)

    @classmethod
    def loss(cls, params: dict[str, Any], frame: pd.DataFrame, model: lightgbm.Booster) -> float:
        """Evaluate a model without trees that starts from the scores of the model."""
        scores = model.predict(frame[FEATURES], raw_score=True)
        data = cls.dataset(frame, init_score=scores)
        _, name, value, *_ = lightgbm.Booster(params, data).eval_train()[0]
        return 1 - value if "ndcg" in name else float(value)


def _fit_trainer(
    trainer_class: Any,
    backend_config: Any,
    params: dict[str, Any],
    frame: pd.DataFrame,
    num_workers: int,
) -> Any:
    """Train like the trainer, with ranks in threads and the trainer's order of the rows."""
    columns = {"weight_column": "weight", "group_column": "query"}
    with _run_config() as run_config:
        trainer = trainer_class(
            params=params,
            label_column="y",
            **{role: name for role, name in columns.items() if name in frame},
            num_boost_round=ROUNDS,
            datasets={"train": frame},
            scaling_config=ScalingConfig(num_workers=num_workers),
        )
        if trainer.dataset_config.shuffles("train"):
            frame = frame.sample(frac=1, random_state=1, ignore_index=True)
        spec = trainer.train_loop_per_worker

        def train_func() -> None:
            table = pa.Table.from_pandas(_part(frame))
            shards = load_shards(
                spec.datasets,
                spec.columns,
                spec.column_format,
                get_shard=lambda _: _TableShard(table),
            )
            spec.train(shards)

        result = run_in_threads(
            train_func,
            num_workers=num_workers,
            backend_config=backend_config,
            run_config=run_config,
        )
        return _model(result, trainer.get_model)


@dataclass
class _TableShard:
    """Shard of a table in memory, as `load_shards` reads it."""

    table: pa.Table
    is_in_object_store: bool = False

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        yield self.table


def _part(frame: pd.DataFrame) -> pd.DataFrame:
    """Return this rank's consecutive rows, with whole queries."""
    context = get_context()
    unit = ROWS_PER_QUERY if "query" in frame else 1
    units = np.array_split(np.arange(len(frame) // unit), context.get_world_size())
    own = units[context.get_world_rank()]
    return frame[own[0] * unit : (own[-1] + 1) * unit]


@contextlib.contextmanager
def _run_config() -> Iterator[RunConfig]:
    with tempfile.TemporaryDirectory() as storage:
        yield RunConfig(storage_path=storage, logging_config=LoggingConfig("ERROR"))


def _model(result: Result, load: Callable[[Any], Any]) -> Any:
    assert result.checkpoint is not None
    return load(result.checkpoint)


def main(arguments: Sequence[str]) -> None:
    """Run the command `python -m benchmarks objectives`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks objectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=5000, help="number of rows (5000)")
    parser.add_argument("--only", action="append", metavar="OBJECTIVE", help="may be repeated")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # LightGBM's network writes to it
    show = functools.partial(print, file=output, flush=True)
    begin = time.perf_counter()
    show(f"| library | objective | {' | '.join(ORDERS)} |\n|---|---|{'---|' * len(ORDERS)}")
    errors = []
    for objective in OBJECTIVES:
        if options.only and objective.name not in options.only:
            continue
        cells = []
        for order in ORDERS:
            found = [compare(objective, order, count, options.rows) for count in WORKERS]
            numbers = [each for each in found if not isinstance(each, str)]
            texts = [each for each in found if isinstance(each, str)]
            worst = max(numbers, key=abs, default=0.0)
            cells.append(f"{worst:+.2%}" + (", error" if texts else ""))
            errors += [f"{objective.name}, {order}: {text.splitlines()[0]}" for text in texts[:1]]
        show(f"| {objective.library} | `{objective.name}` | {' | '.join(cells)} |")
    show("\n".join(["", *errors, f"{time.perf_counter() - begin:.0f} s"]))
