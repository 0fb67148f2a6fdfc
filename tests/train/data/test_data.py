"""Tests of Ray Data datasets: split, unsplit, streamed, and created by factories."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import cloudpickle
import pyarrow as pa
import pytest
import ray
import ray.data
from ray.data.expressions import col
from ray.data.preprocessors import MaxAbsScaler

from drawbar import train
from drawbar.train import (
    ControllerError,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    InsufficientResourcesError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    collective,
)
from tests._ray_compat import get_log_directory
from tests.train.conftest import PATIENCE_S
from tests.train.data.shards import make_shards, run_as_tune_trial, take
from tests.train.rank_data_probe import save, saved

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def fit(
    function: Callable[[], Any],
    config: RunConfig,
    datasets: dict[str, Any],
    num_workers: int = 2,
    dataset_config: DataConfig | None = None,
    cpus_per_worker: int = 1,
) -> Result:
    return DataParallelTrainer(
        function,
        datasets=datasets,
        dataset_config=dataset_config,
        scaling_config=ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": cpus_per_worker}
        ),
        run_config=config,
    ).fit()


def lazy(rows: int) -> ray.data.Dataset:
    """Make a dataset that is computed when it is read, by two tasks in one process."""
    return ray.data.range(rows, override_num_blocks=2, concurrency=1)


def in_memory(rows: int) -> ray.data.Dataset:
    return ray.data.from_items([{"id": row} for row in range(rows)], override_num_blocks=2)


def ids() -> list[int]:
    return ids_of("train")


def ids_of(name: str) -> list[int]:
    """Return the ids that this worker reads in one epoch of a dataset."""
    batches = train.get_dataset_shard(name).iter_batches(batch_size=7)
    return [int(each) for batch in batches for each in batch["id"]]


def assert_split(shards: list[list[int]], rows: int) -> None:
    """Every row is in one shard, and the shards are equally long."""
    assert sorted(each for shard in shards for each in shard) == list(range(rows))
    assert len({len(shard) for shard in shards}) == 1


class RankReadings(NamedTuple):
    """Results of one rank of a run that reads three datasets."""

    train: list[int]
    train_again: list[int]
    valid: list[int]
    cpus_left: float
    coordinator: int
    """Process that splits the dataset `partial`, of which this rank has read one row."""


def read_three_datasets() -> RankReadings:
    shard: Any = train.get_dataset_shard("train")
    rows = iter(shard.iter_rows())
    first = next(rows)["id"]
    valid = ids_of("valid")  # during another iteration: both share the remaining resources
    again = train.get_dataset_shard("train")
    assert again is shard
    partial: Any = train.get_dataset_shard("partial")
    next(iter(partial.iter_rows()))
    (coordinator,) = partial.split_coordinators
    return RankReadings(
        train=[first, *(row["id"] for row in rows)],
        train_again=[row["id"] for row in again.materialize().take_all()],
        valid=valid,
        cpus_left=shard.get_context().execution_options.resource_limits.cpu,
        coordinator=ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid())),
    )


@pytest.fixture(scope="module")
def readings(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[RankReadings]:
    """Return the readings of both ranks of one run."""
    many_rows = ray.data.range(100_000, override_num_blocks=50, concurrency=1)
    datasets = {"train": lazy(100), "valid": lazy(10), "partial": many_rows}
    config = RunConfig(storage_path=tmp_path_factory.mktemp("run"))
    split = DataConfig(datasets_to_split=["train", "partial"])
    values = fit(read_three_datasets, config, datasets, dataset_config=split).return_values
    return list(values)


def test_train_dataset_is_split_and_others_are_complete(readings: list[RankReadings]) -> None:
    assert_split([each.train for each in readings], 100)
    assert [sorted(each.valid) for each in readings] == [list(range(10))] * 2
    assert [each.cpus_left for each in readings] == [6, 6]  # of 8 CPUs


def test_dataset_shard_can_be_read_again(readings: list[RankReadings]) -> None:
    assert_split([each.train_again for each in readings], 100)


def test_split_coordinator_of_partially_read_shard_ends_with_the_run(
    readings: list[RankReadings], wait_until_gone: Callable[..., None]
) -> None:
    pid = readings[0].coordinator
    wait_until_gone([pid])
    logs = list(get_log_directory().glob(f"worker-*-{pid}.err"))
    assert logs
    assert not any("***" in each.read_text() for each in logs)


def test_local_mode_reads_complete_dataset(run_config: RunConfig) -> None:
    def function() -> list[list[int]]:
        batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=4)
        return [[int(each) for batch in batches for each in batch["id"]], ids_of("valid")]

    datasets = {"train": lazy(10), "valid": lambda: in_memory(5)}
    (value,) = fit(function, run_config, datasets, num_workers=0).return_values
    assert [sorted(ids) for ids in value] == [list(range(10)), list(range(5))]


def test_get_dataset_shard_with_unknown_name_raises_with_known_names(run_config: RunConfig) -> None:
    def function() -> None:
        with pytest.raises(KeyError, match="no dataset 'test'; its datasets: 'train', 'valid'"):
            train.get_dataset_shard("test")

    fit(function, run_config, {"train": in_memory(1), "valid": in_memory(1)}, num_workers=0)


def test_data_config_split_of_missing_dataset_warns(run_config: RunConfig) -> None:
    config = DataConfig(datasets_to_split=["train", "tets"])
    datasets = {"train": in_memory(1), "test": in_memory(1)}
    with pytest.warns(UserWarning, match=r"\['tets'\], but datasets has \['test', 'train'\]"):
        fit(ids, run_config, datasets, num_workers=0, dataset_config=config)


class OddAndEven(DataConfig):
    """Split train into odd and even rows; split other datasets by default."""

    def configure(
        self,
        datasets: Any,
        world_size: int,
        worker_handles: Any = None,
        worker_node_ids: Any = None,
        **kwargs: Any,
    ) -> list[dict[str, ray.data.DataIterator]]:
        others = {name: each for name, each in datasets.items() if name != "train"}
        shards = super().configure(others, world_size, worker_handles, worker_node_ids, **kwargs)
        assert len(worker_node_ids) == world_size
        if "train" not in datasets:
            return shards
        rows = datasets["train"].take_all()
        for rank, shard in enumerate(shards):
            mine = [row for row in rows if row["id"] % world_size == rank]
            shard["train"] = ray.data.from_items(mine).iterator()
        return shards


def test_data_config_subclass_splits_with_configure() -> None:
    config = OddAndEven(datasets_to_split="all")
    odd_and_even = make_shards(lazy(10), 2, config=config)
    found = [sorted(row["id"] for row in shard.iter_rows()) for shard in odd_and_even]
    assert found == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    valid = make_shards(in_memory(4), 2, config=config, name="valid")
    with ThreadPoolExecutor(2) as ranks:
        assert_split(list(ranks.map(lambda shard: take(shard, 4)[0], valid)), 4)


def test_data_config_subclass_with_uneven_shards_raises_without_keep() -> None:
    with pytest.raises(ValueError, match=r"OddAndEven.configure\(\) gives .*'train'\]: \[3, 2\]"):
        make_shards(in_memory(5), 2, config=OddAndEven(uneven_rows="drop"))
    uneven = make_shards(in_memory(5), 2, config=OddAndEven(uneven_rows="keep"))
    assert [shard.materialize().count() for shard in uneven] == [3, 2]


class Streamed(DataConfig):
    """Replace every dataset by one that is computed when it is read."""

    def configure(self, datasets: Any, world_size: int, *_: Any, **__: Any) -> Any:
        return [{name: lazy(10).iterator() for name in datasets} for _ in range(world_size)]


def test_stream_without_rows_for_any_rank_raises(run_config: RunConfig) -> None:
    """That it would is not known before; a rank that is given nothing would wait for the others."""
    nobodys = lazy(3).filter(expr=col("id") == 0)
    shards = make_shards(nobodys, 2)

    def read(shard: Any) -> None:
        with pytest.raises(ValueError, match=r"fewer rows than there are workers \(2\)"):
            list(shard.iter_rows())

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(read, shards))
    with pytest.raises(TrainingFailedError, match=r"datasets\['valid'\] has no rows"):
        fit(
            lambda: ids_of("valid"),
            run_config,
            {"valid": lazy(3).filter(expr=col("id") > 3)},
            num_workers=0,
        )


def test_data_config_subclass_with_wrong_result_raises(run_config: RunConfig) -> None:
    class Wrong(DataConfig):
        def configure(self, *args: Any, **kwargs: Any) -> Any:
            return [{}, {}]

    with pytest.raises(
        ControllerError, match=r"Wrong.configure\(\) must return .* 1 workers, found \["
    ):
        fit(ids, run_config, {"train": lazy(1)}, num_workers=0, dataset_config=Wrong())


def test_execution_options_apply_to_all_datasets_or_by_name(run_config: RunConfig) -> None:
    def function() -> list[bool]:
        shards: list[Any] = [train.get_dataset_shard(name) for name in ("train", "valid")]
        return [shard.get_context().execution_options.preserve_order for shard in shards]

    options = DataConfig.default_ingest_options()
    assert options.preserve_order
    options.preserve_order = False
    datasets = {"train": lazy(1), "valid": lazy(1)}
    for given, found in ((options, [False, False]), ({"valid": options}, [True, False])):
        config = DataConfig(execution_options=given)
        run = dataclasses.replace(run_config, name=None)
        result = fit(function, run, datasets, num_workers=0, dataset_config=config)
        assert result.return_value == found


def test_trainer_with_invalid_dataset_raises_before_start(run_config: RunConfig) -> None:
    with pytest.raises(TypeError, match=r"datasets\['train'\] must be a ray.data.Dataset"):
        fit(ids, run_config, {"train": [1, 2, 3]})


def read_with_two_failures() -> tuple[list[int], list[int]]:
    """Fail after two rows of each rank: at first without a checkpoint, and then with one.

    Returns the ids that all ranks read before the checkpoint and the ids that this one read after.
    """
    attempt = train.get_context().get_attempt()
    if attempt < 2:
        batches = iter(train.get_dataset_shard("train").iter_batches(batch_size=2))
        batch = next(batches)
        if attempt == 1:
            save(ids=[int(each) for each in batch["id"]])
        collective.barrier()
        raise RuntimeError("on purpose")
    return [each for rank in saved() for each in rank["ids"]], ids()


def test_workers_without_cpu_left_for_streamed_data_raise(run_config: RunConfig) -> None:
    for dataset, config in (
        (lazy(10), None),
        (lambda: lazy(10), None),
        (in_memory(10), DataConfig(preprocessor=MaxAbsScaler(["id"]))),
    ):
        with pytest.raises(InsufficientResourcesError, match="needs at least one CPU"):
            fit(ids, run_config, {"train": dataset}, 2, config, cpus_per_worker=4)  # of 8 CPUs


@pytest.mark.nightly
def test_restarts_without_cpu_left_split_dataset_in_memory_again(run_config: RunConfig) -> None:
    failures = FailureConfig(max_failures=2)
    values = fit(
        read_with_two_failures,
        dataclasses.replace(run_config, failure_config=failures),
        {"train": lambda: in_memory(10)},
        cpus_per_worker=4,  # of 8 CPUs
    ).return_values
    assert [len(rest) for _, rest in values] == [3, 3]
    before = values[0][0]
    assert sorted(before + values[0][1] + values[1][1]) == list(range(10))


@contextlib.contextmanager
def hold_cpus(count: int) -> Iterator[None]:
    """Hold CPUs as another run does."""
    group = ray.util.placement_group([{"CPU": count}])
    assert group.wait(PATIENCE_S)
    try:
        yield
    finally:
        ray.util.remove_placement_group(group)


@pytest.mark.nightly
def test_streamed_data_without_cpu_left_by_other_runs_raises(run_config: RunConfig) -> None:
    message = "hold CPU=8 of the cluster's CPU=8"
    with hold_cpus(7), pytest.raises(InsufficientResourcesError, match=message):
        fit(ids, run_config, {"train": lazy(10)}, num_workers=1)
    with hold_cpus(8), run_as_tune_trial():
        for dataset, config in (
            (lazy(10), DataConfig()),
            (lazy(10), DataConfig(uneven_rows="keep")),
            (lazy(10), DataConfig(preprocessor=MaxAbsScaler(["id"]))),
            (in_memory(10), Streamed()),
        ):
            with pytest.raises(InsufficientResourcesError, match="max_concurrent_trials"):
                fit(ids, run_config, {"train": dataset}, num_workers=0, dataset_config=config)
        even = fit(ids, run_config, {"train": in_memory(10)}, 0, OddAndEven()).return_value
        assert sorted(even) == list(range(10))


def test_dataset_of_older_ray_data_raises_before_start(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.53.0")
    with pytest.raises(ImportError, match=r"ray 2.53.0 is installed, but 2.54 or newer is needed"):
        DataParallelTrainer(print, datasets={"train": ray.data.range(2)})
    DataParallelTrainer(print, datasets={"train": pa.table({"id": [1]})})
