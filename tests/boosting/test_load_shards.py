"""Loading shards: columns have one role each, and all ranks agree on one schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from drawbar._boosting.reader import ColumnFormat
from drawbar.lightgbm import LightGBMTrainer
from drawbar.train import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
    get_context,
)
from drawbar.train.testing import run_in_threads
from drawbar.xgboost import XGBoostTrainer
from tests.boosting.shards import load_on_rank

Rows = dict[str, Any]
Columns = dict[str, Any]


def load_on_ranks(
    run_config: RunConfig,
    columns: Columns,
    *ranks: Mapping[str, Sequence[Rows]],
    **options: Any,
) -> list[dict[str, list[Any]]]:
    """Load datasets on as many ranks as there are; each is given its tables by dataset."""

    def function() -> Any:
        given = ranks[get_context().get_world_rank()]
        tables = {name: [pa.table(rows) for rows in parts] for name, parts in given.items()}
        shards = load_on_rank(columns, tables, **options)
        return {name: list(shard) for name, shard in shards.items()}, shards["train"].schema

    result = run_in_threads(function, num_workers=len(ranks), run_config=run_config)
    blocks, schemas = zip(*result.return_values, strict=True)
    assert all(schema == schemas[0] for schema in schemas)
    return list(blocks)


def train_blocks(
    run_config: RunConfig, columns: Columns, *ranks: Rows, **options: Any
) -> list[Any]:
    loaded = load_on_ranks(run_config, columns, *({"train": [each]} for each in ranks), **options)
    return [each["train"] for each in loaded]


def error_of(run_config: RunConfig, columns: Columns, *ranks: Mapping[str, Sequence[Rows]]) -> str:
    with pytest.raises(WorkerGroupError) as raised:
        load_on_ranks(run_config, columns, *ranks)
    failure = raised.value.failures[0]
    assert failure.type_name == "ValueError"
    return failure.message


LABEL = {"label": "y"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_column": "y"}, "'y' is used in label_column and in weight_column"),
        ({"categorical_features": ["y"]}, "'y' is used in label_column and in categorical"),
        ({"label_column": 3}, "label_column must be a column name or a list of .* names, found 3"),
        ({"label_column": ["y", "y"]}, "'y' is used in label_column and in label_column"),
        ({"categorical_features": "c"}, "must be a list of columns, found 'c'"),
        ({"group_column": 2}, "group_column must name columns, found 2"),
    ],
)
def test_column_roles_with_invalid_arguments_raise(arguments: Columns, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        XGBoostTrainer(
            params={}, datasets={"train": lambda: None}, **{"label_column": "y", **arguments}
        )


class PolarsFrame:
    """Table with the interface of a polars DataFrame, whose `schema` is a property."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @property
    def schema(self) -> dict[str, str]:
        return {name: "Float64" for name in self._table.schema.names}

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("trainer", [LightGBMTrainer, XGBoostTrainer])
def test_trainer_validates_columns_of_polars_frame(
    trainer: type[LightGBMTrainer | XGBoostTrainer],
) -> None:
    datasets = {"train": PolarsFrame(pa.table({"y": [0.0, 1.0], "a": [1.0, 2.0]}))}
    trainer(params={}, label_column="y", datasets=datasets)
    with pytest.raises(ValueError, match="label_column is 'z', but datasets"):
        trainer(params={}, label_column="z", datasets=datasets)


@pytest.mark.parametrize("trainer", [LightGBMTrainer, XGBoostTrainer])
def test_trainer_does_not_read_a_stream(trainer: type[LightGBMTrainer | XGBoostTrainer]) -> None:
    reader = pa.table({"y": [0.0, 1.0], "a": [1.0, 2.0]}).to_reader()
    trainer(params={}, label_column="y", datasets={"train": reader})
    with pytest.raises(ValueError, match="label_column is 'z', but datasets"):
        trainer(params={}, label_column="z", datasets={"train": reader})
    assert reader.read_all().num_rows == 2


def test_columns_without_role_are_features(run_config: RunConfig) -> None:
    columns = {"label": "y", "weight": "w", "group": "g", "base_margin": "m"}
    names = ["a", "y", "w", "__index_level_0__", "b", "g", "m"]

    def function() -> list[str]:
        table = pa.table({name: [0.0] for name in names if name != "g"} | {"g": [0]})
        schema = load_on_rank(columns, {"train": [table]})["train"].schema
        return [feature.name for feature in schema.features]

    result = run_in_threads(function, num_workers=1, run_config=run_config)
    assert result.return_value == ["a", "b"]


def test_columns_come_in_one_order_and_categories_get_one_code(run_config: RunConfig) -> None:
    first, second = train_blocks(
        run_config,
        {"label": "y", "categorical": ["c"]},
        {"y": [0, 1], "a": [1.5, None], "c": ["pear", "fig"], "n": [True, False]},
        {"n": [True], "c": ["apple"], "y": [1], "a": [2]},
    )
    assert first[0].to_numpy().tolist()[0] == [1.5, 2, 1]
    assert np.isnan(first[0].to_numpy()[1, 0])
    assert first[0].to_numpy()[1, 1:].tolist() == [1, 0]
    assert second[0].to_numpy().tolist() == [[2, 0, 1]]
    assert first[0].to_numpy().dtype == np.float32


def test_load_shards_keeps_common_pandas_category_order(run_config: RunConfig) -> None:
    sizes = pd.CategoricalDtype(["small", "large"])
    rows = {"y": [0, 1], "size": pd.Categorical(["large", None], dtype=sizes)}
    (block,), _ = train_blocks(run_config, LABEL, rows, rows)
    assert block.to_numpy()[0].tolist() == [1]
    assert np.isnan(block.to_numpy()[1, 0])


def test_integers_that_are_categories_are_their_own_codes(run_config: RunConfig) -> None:
    def function() -> Any:
        rows = {"y": [0], "c": [7 * get_context().get_world_rank()]}
        columns = {"label": "y", "categorical": ["c"]}
        shards = load_on_rank(columns, {"train": [pa.table(rows)]})
        return shards["train"].schema.features[0].categories

    result = run_in_threads(function, run_config=run_config)
    assert result.return_values == [tuple(range(8))] * 2


def test_load_shards_without_rows_yields_zero_weight_row(run_config: RunConfig) -> None:
    columns = {"label": "y", "base_margin": ["m0", "m1"], "group": "g"}
    some = {"train": [{"y": [3.0], "a": [1.0], "m0": [0.5], "m1": [0.25], "g": ["q"]}]}
    full, empty = load_on_ranks(run_config, columns, some, {"train": []})
    assert full["train"][0].weight is not None
    assert full["train"][0].weight.tolist() == [1]
    (block,) = empty["train"]
    assert np.isnan(block.to_numpy()).all()
    assert block.label.tolist() == [3]
    assert [block.weight, block.group] == [np.array([0]), np.array([0])]
    assert block.base_margin is not None
    assert block.base_margin.tolist() == [[0, 0]]


def test_blocks_have_one_size_and_hold_whole_queries(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drawbar._boosting.reader.BLOCK_BYTES", 4 * 10)  # of one feature: ten rows
    group = np.repeat(np.arange(12), 4) + 100
    rows = {"y": np.zeros(48), "a": np.arange(48.0), "g": group}
    tables = [{name: values[i : i + 7] for name, values in rows.items()} for i in range(0, 48, 7)]
    columns = {"label": "y", "group": "g"}
    (loaded,) = load_on_ranks(run_config, columns, {"train": tables})
    blocks = loaded["train"]
    assert np.concatenate([b.features[0] for b in blocks]).tolist() == list(range(48))
    assert (
        np.concatenate([b.group for b in blocks]).tolist() == np.repeat(np.arange(12), 4).tolist()
    )
    assert all(len(block) % 4 == 0 and len(block) <= 16 for block in blocks)


@pytest.mark.parametrize(
    ("words", "codes"),
    [(["pear", "pear"], [0.0, 0.0]), (["pear", "apple"], [1.0, 0.0])],  # the latter are sorted
)
def test_blocks_of_rows_that_wait_on_disk_are_views_of_a_file(
    run_config: RunConfig, tmp_path: Path, words: list[str], codes: list[float]
) -> None:
    columns = {"label": "y", "categorical": ["c"]}

    def function() -> Any:
        rank = get_context().get_world_rank()
        folder = tmp_path / f"rows of {rank}"
        folder.mkdir()
        here = words[rank:]
        table = pa.table({"y": [1.0] * len(here), "c": here})
        shards = load_on_rank(columns, {"train": [table]}, folder=folder)
        assert not list(folder.iterdir())  # not even now, so that a killed worker leaves none
        one_by_one = [block.to_numpy().tolist() for block in shards["train"]]
        (block,) = shards["train"].list_blocks()
        shards.clear()  # the file is deleted, the view stays valid
        assert [block.to_numpy().tolist()] == one_by_one
        assert not block.features[0].flags.writeable
        return block.features[0].tolist()

    result = run_in_threads(function, run_config=run_config)
    assert result.return_values == [codes, codes[1:]]


def test_load_shards_with_invalid_data_raises(run_config: RunConfig, tmp_path: Path) -> None:
    def message(columns: Columns, train: Rows, **more: Rows) -> str:
        ranks = {"train": [train], **{name: [rows] for name, rows in more.items()}}
        config = RunConfig(storage_path=tmp_path)
        return error_of(config, columns, ranks)

    valid = {"y": [0, 1], "a": [1, 2]}
    assert "label_column is 'z', but datasets['train'] has the columns 'y', 'a'" in message(
        {"label": "z"}, valid
    )
    assert "Feature 's' of datasets['train'] has type string. Add it to categorical_features" in (
        message(LABEL, {**valid, "s": ["p", "q"]})
    )
    assert "Column 'y' of datasets['train'] must be numeric, found string" in message(
        LABEL, {"y": ["no", "yes"], "a": [1, 2]}
    )
    assert "'valid' differ from 'train': missing ['a'], additional ['b']" in message(
        LABEL, valid, valid={"y": [0], "b": [1]}
    )
    assert "must have integers from 0, found -3" in message(
        {"label": "y", "categorical": ["a"]}, {"y": [0, 1], "a": [1, -3]}
    )
    assert "Rows of group 5 (column 'g' of datasets['train']) are not contiguous" in message(
        {"label": "y", "group": "g"}, {"y": [0, 0, 0], "a": [1, 2, 3], "g": [5, 6, 5]}
    )
    assert "datasets['train'] has no rows" in message(LABEL, {"y": [], "a": []})


@pytest.mark.parametrize(
    ("value", "state"), [(None, "null or NaN"), (np.nan, "null or NaN"), (1e39, "infinite")]
)
@pytest.mark.parametrize(
    ("role", "argument"),
    [
        ("label", "label_column"),
        ("weight", "weight_column"),
        ("base_margin", "base_margin_column"),
    ],
)
def test_load_shards_with_missing_or_infinite_number_raises(
    run_config: RunConfig, value: float | None, state: str, role: str, argument: str
) -> None:
    """The value is in a dataset to evaluate, in the part of another rank."""
    columns = {"label": "y", "weight": "w", "base_margin": "m"}
    valid = {"y": [0.0, 1.0], "a": [1.0, 2.0], "w": [1.0, 2.0], "m": [0.5, 0.5]}
    invalid = {**valid, columns[role]: pa.array([1.0, value], from_pandas=False)}
    text = error_of(
        run_config,
        columns,
        {"train": [valid], "valid": [valid]},
        {"train": [valid], "valid": [valid, invalid]},
    )
    name = columns[role]
    assert f"1 of 6 values in column '{name}' ({argument}) of datasets['valid'] are {state}" in text


@pytest.mark.parametrize("value", [None, np.nan])
def test_load_shards_with_missing_group_raises(run_config: RunConfig, value: float | None) -> None:
    rows = {"y": [0, 1], "a": [1, 2], "g": pa.array([5.0, value], from_pandas=False)}
    text = error_of(run_config, {"label": "y", "group": "g"}, {"train": [rows]})
    assert "1 values of group 'g' of datasets['train'] are null or NaN" in text


def test_load_shards_without_any_base_margin_needs_default_of_library(
    run_config: RunConfig,
) -> None:
    columns = {"label": "y", "base_margin": "m"}
    ranks = {"train": [{"y": [0, 1], "a": [1, 2], "m": [None, np.nan]}]}
    (loaded,) = load_on_ranks(run_config, columns, ranks)
    assert np.isnan(loaded["train"][0].base_margin).all()
    reading = ColumnFormat(has_default_margin=False)
    with pytest.raises(WorkerGroupError, match="2 of 2 values in column 'm'"):
        load_on_ranks(run_config, columns, ranks, reading=reading)


def test_load_shards_with_different_columns_raises_on_all_ranks(run_config: RunConfig) -> None:
    text = error_of(
        run_config, LABEL, {"train": [{"y": [0], "a": [1]}]}, {"train": [{"y": [0], "b": [1]}]}
    )
    assert "'train (another worker's part)'" in text or "train (another worker's part)" in text
    assert "missing ['a'], additional ['b']" in text


def test_load_shards_in_surviving_worker_uses_cache(tmp_path: Path) -> None:
    reads: list[tuple[int, int]] = []

    def function() -> int:
        context = get_context()

        def read() -> Iterator[pa.Table]:
            reads.append((context.get_attempt(), context.get_world_rank()))
            yield pa.table({"y": [0.0], "a": [1.0]})

        shards = load_on_rank(LABEL, {"train": read()}, should_cache=True)
        if context.get_attempt() == 0:
            raise ZeroDivisionError
        return len(shards["train"])

    failures = FailureConfig(max_failures=1)
    config = RunConfig(storage_path=tmp_path, failure_config=failures)
    result: Result = run_in_threads(function, run_config=config)
    assert result.return_values == [1, 1]
    assert sorted(reads) == [(0, 0), (0, 1)]


def test_error_of_a_check_shows_only_its_message(run_config: RunConfig) -> None:
    trainer = XGBoostTrainer(
        params={},
        label_column="y",
        datasets={"train": pd.DataFrame({"y": [0.0, np.nan], "a": [1, 2]})},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    with pytest.raises(WorkerGroupError, match="1 of 2 values in column 'y'") as raised:
        trainer.fit()
    (failure,) = raised.value.failures
    assert (failure.traceback, failure.location) == ("", "")
