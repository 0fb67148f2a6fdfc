"""Tests of Parquet files whose schemas differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet
import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
]

STREAMED_BYTES = 140_000_000
"""More than a quarter of the object store of the tests."""


def write(path: Path, **columns: Any) -> None:
    """Write columns. Zeros take few bytes, but the metadata contain their size in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="zstd")


def read_columns() -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Return the types of all columns and their sorted values other than 0 and null."""
    shard: Any = train.get_dataset_shard("train")
    values: dict[str, set[Any]] = {}
    for batch in shard.iter_batches(batch_format="pyarrow", batch_size=None):
        types = {field.name: str(field.type) for field in batch.schema}
        for name in batch.column_names:
            found = values.setdefault(name, set())
            found.update(value for value in batch[name].unique().to_pylist() if value)
    return types, {name: sorted(found) for name, found in values.items()}


def read(paths: Any, run_config: RunConfig) -> tuple[dict[str, str], dict[str, list[Any]]]:
    trainer = DataParallelTrainer(
        read_columns,
        datasets={"train": paths},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    found: tuple[dict[str, str], dict[str, list[Any]]] = trainer.fit().return_value
    return found


@pytest.mark.parametrize(
    "nbytes",
    [1, pytest.param(STREAMED_BYTES, marks=pytest.mark.nightly)],
    ids=["table", "streamed"],
)
def test_columns_of_all_files_are_read_with_common_types(
    run_config: RunConfig, tmp_path: Path, nbytes: int
) -> None:
    folder = tmp_path / "batch=5" / "files"
    kinds = [pa.array([name]).dictionary_encode() for name in "pq"]
    write(folder / "day=3" / "0.parquet", y=[1], flag=pa.nulls(1), kind=kinds[0])
    write(folder / "day=3" / "1.parquet", y=[2.5], more=[7], flag=[True], kind=kinds[1])
    write(folder / "day=4" / "2.parquet", y=[0.0], zeros=[bytes(nbytes)])
    types = {
        "y": "double",
        "flag": "bool",
        "kind": str(kinds[0].type),
        "more": "int64",
        "zeros": "binary",
        "day": "int32",
    }
    values = {
        "y": [1.0, 2.5],
        "flag": [True],
        "kind": ["p", "q"],
        "more": [7],
        "zeros": [bytes(nbytes)],
        "day": [3, 4],
    }
    assert read(folder, run_config) == (types, values)
    files = sorted(folder.glob("*/*.parquet"))
    assert read(files, RunConfig(name="list", storage_path=tmp_path)) == (types, values)


def test_column_of_hive_directory_may_be_in_the_files(
    run_config: RunConfig, tmp_path: Path
) -> None:
    for day in (3, 4):
        write(tmp_path / "files" / f"day={day}" / "0.parquet", day=[day])
    assert read(tmp_path / "files", run_config) == ({"day": "int64"}, {"day": [3, 4]})


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"flag": [True]}, {"flag": [2]}, "'flag' has type bool in F0 and type int64 in F1"),
        (
            {"id": [2**60 + 1]},
            {"id": [0.5]},
            "'id' has type int64 in F0, and with the other files type double, which cannot hold",
        ),
        (
            {"id": [-1]},
            {"id": pa.array([2**63 + 1], pa.uint64())},
            "'id' has type uint64 in F1, and with the other files type int64, which cannot hold",
        ),
        (
            {"at": pa.array([2**50], pa.timestamp("ms"))},
            {"at": pa.array([1], pa.timestamp("ns"))},
            r"'at' has type timestamp\[ms\] in F0, and with the other files type timestamp\[ns\]",
        ),
        ({"day": [3]}, {"y": [1]}, "'day' is in some files, but F1 has it only in its path"),
        ([[1], [2]], [[1], [2]], "F0 has 2 columns 'y'"),
    ],
)
def test_columns_that_cannot_be_combined_raise_with_file_and_column(
    run_config: RunConfig, tmp_path: Path, first: Any, second: Any, message: str
) -> None:
    folder = tmp_path / "files"
    files = [folder / f"day={number}" / "0.parquet" for number in range(2)]
    for file, columns in zip(files, (first, second), strict=True):
        file.parent.mkdir(parents=True)
        is_named = isinstance(columns, dict)
        table = pa.table(columns, names=None if is_named else ["y", "y"])
        pyarrow.parquet.write_table(table, file)
        message = message.replace(f"F{files.index(file)}", str(file))
    with pytest.raises(ValueError, match=rf"datasets\['train'\] cannot be read .*{message}"):
        read(files, run_config)
    with pytest.raises(ValueError, match=rf"datasets\['train'\] cannot be read .*{message}"):
        read(folder, run_config)


def test_categories_and_strings_become_strings(run_config: RunConfig, tmp_path: Path) -> None:
    kinds = pa.array(["p"]).dictionary_encode()
    write(tmp_path / "a" / "0.parquet", kind=kinds, day=pa.array(["x"]), k2=kinds)
    write(tmp_path / "b" / "1.parquet", kind=["q"], day=pa.array(["y"], "large_string"))
    write(tmp_path / "b" / "2.parquet", kind=pa.nulls(1), k2=pa.nulls(1))
    types = {"kind": "string", "day": "large_string", "k2": str(kinds.type)}
    values = {"kind": ["p", "q"], "day": ["x", "y"], "k2": ["p"]}
    assert read([tmp_path / "a", tmp_path / "b"], run_config) == (types, values)
