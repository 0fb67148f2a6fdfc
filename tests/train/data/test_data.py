"""Tests of Ray Data datasets: split, unsplit, streamed, and created by factories."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
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
from drawbar.train.backend import set_tune_trial
from tests.train.data.shards import make_shards, wait_briefly_for_cpus
from tests.train.rank_data_probe import save

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

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
) -> Result:
    return DataParallelTrainer(
        function,
        datasets=datasets,
        dataset_config=dataset_config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=config,
    ).fit()


def lazy(rows: int) -> ray.data.Dataset:
    """Make a dataset that is computed when it is read, by two tasks."""
    return ray.data.range(rows, override_num_blocks=2)


def in_memory(rows: int) -> ray.data.Dataset:
    return ray.data.from_items([{"id": row} for row in range(rows)], override_num_blocks=2)


def ids() -> list[int]:
    return ids_of("train")


def ids_of_both() -> tuple[list[int], list[int]]:
    return ids_of("train"), ids_of("valid")


def ids_of(name: str) -> list[int]:
    """Return the ids that this worker reads in one epoch of a dataset."""
    batches = train.get_dataset_shard(name).iter_batches(batch_size=7)
    return [int(each) for batch in batches for each in batch["id"]]


def assert_split(shards: list[list[int]], rows: int) -> None:
    """Every row is in one shard, and the shards are equally long."""
    assert sorted(each for shard in shards for each in shard) == list(range(rows))
    assert len({len(shard) for shard in shards}) == 1


def test_train_dataset_is_split_and_others_are_complete(
    run_config: RunConfig,
) -> None:
    def function() -> tuple[list[int], list[int], float]:
        shard: Any = train.get_dataset_shard("train")
        left = shard.get_context().execution_options.resource_limits.cpu
        found = iter(shard.iter_rows())
        first = next(found)["id"]
        valid = ids_of("valid")  # during another iteration: both share the remaining resources
        return [first, *(row["id"] for row in found)], valid, left

    datasets = {"train": lazy(100), "valid": lazy(10)}
    values = fit(function, run_config, datasets).return_values
    assert_split([shard for shard, _, _ in values], 100)
    assert [sorted(whole) for _, whole, _ in values] == [list(range(10))] * 2
    assert [left for _, _, left in values] == [6, 6]  # of 8 CPUs


def test_dataset_shard_can_be_requested_and_read_again(run_config: RunConfig) -> None:
    def function() -> list[list[int]]:
        shard = train.get_dataset_shard("train")
        rows = [row["id"] for row in shard.iter_rows()]
        again = train.get_dataset_shard("train")
        assert again is shard
        return [rows, [row["id"] for row in again.materialize().take_all()]]

    values = fit(function, run_config, {"train": lazy(100)}).return_values
    for way in range(2):
        assert_split([value[way] for value in values], 100)


def test_restart_splits_dataset_again(run_config: RunConfig) -> None:
    def function() -> list[int]:
        if train.get_context().get_attempt() == 0:
            next(iter(train.get_dataset_shard("train").iter_batches(batch_size=10)))
            if train.get_context().get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            collective.barrier()
        return ids()

    config = RunConfig(
        name="run",
        storage_path=run_config.storage_path,
        failure_config=FailureConfig(max_failures=1),
    )
    assert_split(fit(function, config, {"train": lambda: lazy(100)}).return_values, 100)


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
        valid = {name: each for name, each in datasets.items() if name == "valid"}
        shards = super().configure(valid, world_size, worker_handles, worker_node_ids, **kwargs)
        assert len(worker_node_ids) == world_size
        rows = datasets["train"].take_all()
        for rank, shard in enumerate(shards):
            mine = [row for row in rows if row["id"] % world_size == rank]
            shard["train"] = ray.data.from_items(mine).iterator()
        return shards


def test_data_config_subclass_splits_with_configure(run_config: RunConfig) -> None:
    datasets = {"train": lambda: lazy(10), "valid": in_memory(4)}
    config = OddAndEven(datasets_to_split="all")
    values = fit(ids_of_both, run_config, datasets, dataset_config=config).return_values
    assert [sorted(rows) for rows, _ in values] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert_split([valid for _, valid in values], 4)


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


def rest_of_ids() -> list[int]:
    """Return the rows that this worker reads after two rows were read before rank 1 died."""
    if train.get_context().get_attempt() == 0:
        batches = iter(train.get_dataset_shard("train").iter_batches(batch_size=2))
        next(batches)
        save()
        if train.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collective.barrier()
    return ids()


def hold_cpu() -> None:
    """Hold a CPU as another run does."""
    ray.get(ray.util.placement_group([{"CPU": 1}]).ready())


def test_workers_without_cpu_left_for_streamed_data_raise(
    run_config: RunConfig, drivers: Drivers
) -> None:
    """Datasets in memory need no CPU, also when an epoch is resumed."""

    def main() -> None:
        ray.init(address="local", num_cpus=2, include_dashboard=False)
        scaled = DataConfig(preprocessor=MaxAbsScaler(["id"]))
        for dataset, config in (
            (lazy(10), None),
            (lambda: lazy(10), None),
            (in_memory(10), scaled),
        ):
            with pytest.raises(InsufficientResourcesError, match="needs at least one CPU"):
                fit(ids, run_config, {"train": dataset}, dataset_config=config)
        restarts = dataclasses.replace(
            run_config, name="restarts", failure_config=FailureConfig(max_failures=1)
        )
        values = fit(rest_of_ids, restarts, {"train": in_memory(10)}).return_values
        assert [len(each) for each in values] == [3, 3]
        wait_briefly_for_cpus()
        busy = dataclasses.replace(run_config, name="busy cluster")
        hold_cpu()
        with pytest.raises(InsufficientResourcesError, match="hold CPU=2 of the cluster's CPU=2"):
            fit(ids, busy, {"train": lazy(10)}, num_workers=1)
        hold_cpu()
        set_tune_trial(name="trial", id="1", directory="", resources=None)
        for dataset, config in (
            (lazy(10), DataConfig()),
            (lazy(10), DataConfig(uneven_rows="keep")),
            (lazy(10), scaled),
            (in_memory(10), Streamed()),
        ):
            with pytest.raises(InsufficientResourcesError, match="max_concurrent_trials"):
                fit(ids, busy, {"train": dataset}, num_workers=0, dataset_config=config)
        even = fit(ids, busy, {"train": in_memory(10)}, 0, OddAndEven()).return_value
        assert sorted(even) == list(range(10))

    drivers.run(main)


def test_split_coordinator_of_partially_read_shard_ends_with_the_run(
    run_config: RunConfig, wait_until_gone: Callable[..., None]
) -> None:
    def function() -> Any:
        shard: Any = train.get_dataset_shard("train")
        next(iter(shard.iter_rows()))
        (coordinator,) = shard.split_coordinators
        return ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid()))

    dataset = ray.data.range(100_000, override_num_blocks=50).map(lambda row: row)
    pid = fit(function, run_config, {"train": dataset}).return_values[0]
    wait_until_gone([pid])
    context = ray.get_runtime_context()
    directory = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    logs = list(directory.glob(f"worker-*-{pid}.err"))
    assert logs
    assert not any("***" in each.read_text() for each in logs)
