"""Tests of tables: in-memory tables and Parquet files as trainer datasets."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
from ray.data.preprocessors import MaxAbsScaler

from drawbar import train
from drawbar.train import DataConfig, DataParallelTrainer, RunConfig, ScalingConfig
from tests.train.data.shards import make_shards, take

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # it warns of itself

SHUFFLE = {"local_shuffle_buffer_size": 30, "local_shuffle_seed": 7}
NAMES = ("arrow", "pandas", "hugging_face", "parquet", "made")


def frame(rows: int) -> pd.DataFrame:
    return pd.DataFrame({"id": range(rows), "half": [row / 2 for row in range(rows)]})


def ids(batches: Any) -> list[int]:
    return [int(each) for batch in batches for each in batch["id"]]


def read_every_kind() -> dict[str, list[int]]:
    return {
        name: ids(train.get_dataset_shard(name).iter_batches(batch_size=4)) for name in NAMES
    } | {"valid": ids(train.get_dataset_shard("valid").iter_torch_batches(batch_size=4))}


@pytest.mark.usefixtures("ray_cluster")
def test_all_table_types_are_split_equally_without_free_cpus(
    run_config: RunConfig, tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pa.table({"id": range(19)}), tmp_path / "part.parquet")
    result = DataParallelTrainer(
        read_every_kind,
        datasets={
            "arrow": pa.table({"id": range(19)}),
            "pandas": frame(40)[:19],
            "hugging_face": datasets.Dataset.from_dict({"id": range(40)}).select(range(19)),
            "parquet": tmp_path / "part.parquet",
            "made": lambda: frame(19),
            "valid": frame(5),
        },
        dataset_config=DataConfig(datasets_to_split=NAMES),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 4}),
        run_config=run_config,
    ).fit()
    halves = [list(range(9)), list(range(9, 18))]  # row 18 is left out
    for rank, found in enumerate(result.return_values):
        assert found == dict.fromkeys(NAMES, halves[rank]) | {"valid": list(range(5))}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("to_split", "lengths"), [("all", (50, 5)), (["valid"], (100, 5))])
def test_table_split_follows_datasets_to_split(to_split: Any, lengths: tuple[int, int]) -> None:
    config = DataConfig(datasets_to_split=to_split)
    trains = make_shards(frame(100), 2, config=config)
    valids = make_shards(frame(10), 2, config=config, name="valid")
    assert [(len(train), len(valid)) for train, valid in zip(trains, valids, strict=True)] == (
        [lengths] * 2
    )


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("shuffle", [{}, SHUFFLE])
def test_table_resumed_with_other_world_sizes_reads_each_row_once(shuffle: dict[str, int]) -> None:
    position, seen = None, list[int]()
    for workers, rows in ((2, 10), (3, 20), (3, 10), (2, 1000)):
        ranks = [
            take(each, rows, **shuffle) for each in make_shards(frame(1000), workers, position)
        ]
        position = ranks[0][1]
        seen += chain(*(ids for ids, _ in ranks))
    # For 3 workers, 2 of 980 rows were left out. The resize to 2 workers includes them again.
    assert sorted(seen) == list(range(1000))
    assert position == {"epoch": 1, "read": []}


@pytest.mark.usefixtures("ray_cluster")
def test_seeded_shuffle_resumes_and_differs_by_epoch_and_rank() -> None:
    whole = make_shards(frame(200), 2)
    first, second = ([take(each, 1000, **SHUFFLE)[0] for each in whole] for _ in range(2))
    assert all(
        sorted(one) == sorted(other) and one != other
        for one, other in zip(first, second, strict=True)
    )
    assert [each - 100 for each in first[1]] != first[0]
    begun = [take(each, 40, **SHUFFLE) for each in make_shards(frame(200), 2)]
    rest = [take(each, 1000, **SHUFFLE) for each in make_shards(frame(200), 2, begun[0][1])]
    assert [one[0] + other[0] for one, other in zip(begun, rest, strict=True)] == first


@pytest.mark.usefixtures("ray_cluster")
def test_small_shuffle_buffer_yields_equal_batch_counts() -> None:
    """Ray Data alone makes 15 instead of 13 batches of these blocks (ray-project/ray#66085)."""
    sizes = [175, 20, 37, 28, 9, 10, 1, 1]
    (shard,) = make_shards(pa.table({"id": range(sum(sizes))}), 1)
    blocks = [pa.table({"id": range(size)}) for size in sizes]
    shard._source = ray.data.from_blocks(blocks).iterator()
    sizes_of = [
        len(batch["id"])
        for batch in shard.iter_batches(
            batch_size=22, local_shuffle_buffer_size=17, local_shuffle_seed=0
        )
    ]
    assert sizes_of == [22] * 12 + [17]


@pytest.mark.usefixtures("ray_cluster")
def test_table_shard_has_all_iterator_methods() -> None:
    (shard,) = make_shards(frame(6), 1)
    assert shard.count() == len(shard) == 6
    assert shard.schema().names == ["id", "half"]
    assert shard.materialize().count() == 6
    assert [row["id"] for row in shard.iter_rows()] == list(range(6))
    assert sum(table.num_rows for table in shard.iter_arrow_tables()) == 6
    if not ray.__version__.startswith("2.54."):  # which raises AttributeError for any table
        assert isinstance(shard.stats(), str)
    assert callable(shard.to_tf)  # which would import TensorFlow


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("uneven_rows", "parts"),
    [
        ("drop", [[0, 1], [2, 3], [4, 5]]),
        ("pad", [[0, 1, 2], [2, 3, 4], [4, 5, 6]]),
        ("keep", [[0, 1], [2, 3], [4, 5, 6]]),
    ],
)
def test_uneven_rows_sets_rows_of_each_rank(uneven_rows: Any, parts: list[list[int]]) -> None:
    found = make_shards(frame(7), 3, config=DataConfig(uneven_rows=uneven_rows))
    assert [ids(each.iter_batches()) for each in found] == parts


@pytest.mark.usefixtures("ray_cluster")
def test_uneven_rows_error_names_rows_of_each_rank_before_start(
    run_config: RunConfig,
) -> None:
    trainer = DataParallelTrainer(
        read_every_kind,
        datasets={"train": lambda: frame(8)},
        dataset_config=DataConfig(uneven_rows="error"),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=run_config,
    )
    message = (
        r"datasets\['train'\] has 8 rows, which cannot be divided evenly between 3 workers: "
        r"3 on ranks 1, 2, 2 on rank 0"
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit()


@pytest.mark.usefixtures("ray_cluster")
def test_dataset_without_rows_for_workers_raises_before_start(
    run_config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    nothing: dict[str, list[int]] = {"id": []}
    for dataset, message in (
        (tmp_path / "files", rf"datasets\['train'\]: there is no Parquet file in {tmp_path}/files"),
        ([tmp_path / "gone.parquet"], rf"datasets\['train'\]: {tmp_path}/gone.parquet"),
        (frame(0), r"datasets\['train'\] has no rows"),
        (datasets.Dataset.from_dict(nothing), r"datasets\['train'\] has no rows"),
        (ray.data.from_arrow(pa.table(nothing)), r"datasets\['train'\] has no rows"),
        (
            pa.chunked_array([[1, 2, 3]]),
            r"datasets\['train'\] cannot be read as a table: .*; AttributeError",
        ),
        (
            pd.DataFrame({"age": pd.cut([1, 5, 9], 2)}),
            r"datasets\['train'\] cannot .* column 'age' has categories of the type .*interval",
        ),
        (pd.DataFrame(index=range(5)), r"datasets\['train'\] has no columns"),
        (frame(1), r"datasets\['train'\] has 1 row, but each of 2 workers needs at least one"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            DataParallelTrainer(
                lambda: None,
                datasets={"train": dataset},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=run_config,
            ).fit()


def small_codes(letter: str) -> pa.Table:
    """100 categories with codes of 8 bits, also within a struct and a list."""
    names = pa.array([f"{letter}{number}" for number in range(100)])
    kinds = names.dictionary_encode().cast(pa.dictionary(pa.int8(), "string"))
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays(range(101), kinds)], ["kinds"])
    return pa.table({"id": range(100), "kind": kinds, "nested": nested})


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("make", [pa.concat_tables, ray.data.from_arrow])
@pytest.mark.parametrize(
    "config", [DataConfig(uneven_rows="keep", datasets_to_shuffle=["train"]), DataConfig()]
)
def test_categories_of_chunks_may_differ_and_exceed_8_bits(make: Any, config: DataConfig) -> None:
    dataset = make([small_codes("a"), small_codes("b")])

    def read(**batches: Any) -> list[tuple[str, str]]:
        (shard,) = make_shards(dataset, 1, config=config)
        return [
            (kind, nested["kinds"][0])
            for batch in shard.iter_batches(batch_size=150, **batches)
            for kind, nested in zip(batch["kind"], batch["nested"], strict=True)
        ]

    if make is ray.data.from_arrow and not config.datasets_to_shuffle:
        with pytest.raises(ValueError, match=r"datasets\['train'\] have .* in 'kind', 'nested'"):
            read()  # Ray Data combines the blocks of a stream
    else:
        names = [f"{letter}{number}" for letter in "ab" for number in range(100)]
        assert sorted(read()) == sorted(zip(names, names, strict=True))


def scaled() -> tuple[list[float], list[float]]:
    """Save a checkpoint; give the preprocessed column of both datasets."""
    streamed = [row["half"] for row in train.get_dataset_shard("streamed").iter_rows()]
    halves = [row["half"] for row in train.get_dataset_shard("train").iter_rows()]
    with train.checkpoint_dir() as path:
        train.report({}, checkpoint=path)
    return halves, streamed


@pytest.mark.usefixtures("ray_cluster")
def test_preprocessor_is_fitted_on_train_applied_to_all_and_saved(run_config: RunConfig) -> None:
    result = DataParallelTrainer(
        scaled,
        datasets={"train": frame(5), "streamed": lambda: ray.data.from_pandas(frame(3))},
        dataset_config=DataConfig(preprocessor=MaxAbsScaler(["half"])),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()
    assert result.return_value == ([0, 0.25, 0.5, 0.75, 1], [0, 0.25, 0.5])
    assert result.checkpoint is not None
    kept = result.checkpoint.get_preprocessor()
    assert kept is not None
    assert kept.transform_batch(frame(9))["half"].max() == 2


def test_preprocessor_without_train_dataset_raises(run_config: RunConfig) -> None:
    trainer = DataParallelTrainer(
        scaled,
        datasets={"valid": frame(5)},
        dataset_config=DataConfig(preprocessor=MaxAbsScaler(["half"])),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    with pytest.raises(ValueError, match=r"fitted on datasets\['train'\], but .* are 'valid'"):
        trainer.fit()
    with pytest.raises(TypeError, match=r"must be one of ray\.data\.preprocessors"):
        DataConfig(preprocessor=1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", ["table", "ray"])
def test_shuffled_dataset_gives_each_worker_a_random_sample(kind: str) -> None:
    names = pd.Categorical(["low"] * 500 + ["high"] * 500)
    table = frame(1000).assign(name=names)
    dataset = table if kind == "table" else ray.data.from_pandas([table[:400], table[400:]])
    config = DataConfig(uneven_rows="keep", datasets_to_shuffle=["train"])

    def read() -> list[pd.DataFrame]:
        parts = (each.iter_arrow_tables() for each in make_shards(dataset, 3, config=config))
        return [pd.concat(each.to_pandas() for each in tables) for tables in parts]

    parts = read()
    assert sorted(chain(*(part["id"] for part in parts))) == list(range(1000))
    for part in parts:
        assert len(part) in (333, 334)
        assert part["id"].mean() == pytest.approx(500, rel=0.1)
        assert ((part["name"] == "low") == (part["id"] < 500)).all()
        assert (part["half"] == part["id"] / 2).all()
    for part, again in zip(parts, read(), strict=True):
        assert part["id"].tolist() == again["id"].tolist()


@pytest.mark.usefixtures("ray_cluster")
def test_shuffled_table_resumes_inside_an_epoch() -> None:
    config = DataConfig(uneven_rows="keep", datasets_to_shuffle=["train"])
    first = [take(each, 10) for each in make_shards(frame(100), 2, config=config)]
    rest = [take(each, 1000) for each in make_shards(frame(100), 3, first[0][1], config=config)]
    assert sorted(chain(*(ids for ids, _ in first + rest))) == list(range(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uneven_rows": "drop"}, 'uneven_rows="drop" streams them'),
        ({"uneven_rows": "keep", "group_column": "q"}, "would separate the rows of a group"),
    ],
)
def test_data_config_with_conflicting_shuffle_raises(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(datasets_to_shuffle=["train"], **options)
    with pytest.raises(TypeError, match="must be a list of dataset names, found 'train'"):
        DataConfig(datasets_to_shuffle="train", uneven_rows="keep")
