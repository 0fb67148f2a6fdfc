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


@pytest.mark.parametrize("nbytes", [1, STREAMED_BYTES], ids=["table", "streamed"])
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


def test_types_that_cannot_be_combined_raise(run_config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    write(folder / "0.parquet", y=[1.0])
    write(folder / "1.parquet", y=[1.0], flag=[True])
    write(folder / "2.parquet", y=[1.0], flag=[2])
    message = (
        rf"datasets\['train'\] cannot be read .*column 'flag' has type bool in {folder}/1.parquet "
        rf"and type int64 in {folder}/2.parquet"
    )
    with pytest.raises(ValueError, match=message):
        read(str(folder), run_config)
