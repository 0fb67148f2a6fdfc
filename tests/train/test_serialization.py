"""Tests of _serialization: user objects in functions, configs, callbacks, and return values."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray
from ray.util.queue import Queue

from drawbar import train
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    UserCallback,
    ValidationConfig,
    WorkerGroupError,
)

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
    pytest.mark.filterwarnings("ignore:RunConfig.detached=True has no effect"),
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def fit(
    function: Callable[..., Any],
    storage: Path,
    config: Any = None,
    num_workers: int = 1,
    **options: Any,
) -> Result:
    run_config = {key: options.pop(key) for key in ("detached", "callbacks") if key in options}
    return DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=1),
            **run_config,
        ),
        **options,
    ).fit()


def test_object_references_are_available_in_every_attempt(tmp_path: Path) -> None:
    captured, died = ray.put("captured"), tmp_path / "died"

    def function(config: dict[str, Any]) -> list[str]:
        values = ray.get([captured, config["nested"][0]])
        if train.get_context().get_world_rank() == 1 and not died.exists():
            died.touch()
            os._exit(1)
        train.collective.barrier()
        return values

    result = fit(function, tmp_path, {"nested": [ray.put("configured")]}, num_workers=2)
    assert result.return_values == [["captured", "configured"]] * 2
    assert died.exists()


class Process:
    def pid(self) -> int:
        return os.getpid()


def test_actors_queues_and_placement_groups_work_and_are_released(
    tmp_path: Path, wait_until_gone: Callable[..., None]
) -> None:
    def function(config: dict[str, Any]) -> Any:
        config["queue"].put(config["group"].bundle_count)
        return ray.get(config["process"].pid.remote())

    process: Any = ray.remote(num_cpus=0)(Process).remote()
    queue = Queue(actor_options={"num_cpus": 0})
    group = ray.util.placement_group([{"CPU": 0.001}])
    pid = ray.get(process.pid.remote())
    config = {"queue": queue, "group": group, "process": process}
    result = fit(function, tmp_path, config)
    assert result.return_value == pid
    assert queue.get_nowait() == 1
    ray.util.remove_placement_group(group)
    queue.shutdown()
    del process, config["process"]
    wait_until_gone([pid])


def test_collective_with_object_reference_keeps_its_owner(tmp_path: Path) -> None:
    def function() -> list[int]:
        rank = train.get_context().get_world_rank()
        mine = ray.put(rank)
        first = train.collective.broadcast_from_rank_zero([mine])[0]
        others = train.collective.all_gather([mine])
        values = ray.get([first, *[each[0] for each in others]])
        train.collective.barrier()
        return values

    assert fit(function, tmp_path, num_workers=2).return_values == [[0, 0, 1]] * 2


@functools.lru_cache(maxsize=50)
def fibonacci(number: int) -> int:
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


class Cached(int):
    @functools.cache  # noqa: B019  # the instances live as long as the test
    def doubled(self) -> int:
        return 2 * self


@pytest.fixture(scope="module")
def returned(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return value of a function that captures a dataset, arrays, and an object reference."""
    dataset, reference = ray.data.range(8).materialize(), ray.put("driver's")
    large, small = np.ones(1 << 18), np.ones(1 << 10)

    def function(config: dict[str, Any]) -> dict[str, Any]:
        arrays = [large, config["large"], small, config["small"]]
        return {
            "rows": dataset.to_pandas()["id"].sum(),
            "is_writeable": [bool(array.all()) and array.flags.writeable for array in arrays],
            "created": [ray.put([ray.put("worker's")])],
            "captured": reference,
            "cached": [fibonacci(30), Cached(3).doubled(), fibonacci.cache_info().maxsize],
        }

    config = {"large": large, "small": small}
    value: dict[str, Any] = fit(function, tmp_path_factory.mktemp("run"), config).return_value
    return value


def test_captured_dataset_can_be_read_by_workers(returned: dict[str, Any]) -> None:
    assert returned["rows"] == 28


def test_large_arrays_are_shared_and_small_ones_are_writeable(returned: dict[str, Any]) -> None:
    assert returned["is_writeable"] == [False, False, True, True]


def test_return_values_with_object_references_outlive_workers(returned: dict[str, Any]) -> None:
    assert ray.get(ray.get(returned["created"][0])[0]) == "worker's"
    assert ray.get(returned["captured"]) == "driver's"


def test_cached_functions_and_methods_can_be_called(returned: dict[str, Any]) -> None:
    assert returned["cached"] == [832_040, 6, 50]


def test_validation_function_receives_captured_object(tmp_path: Path) -> None:
    threshold = ray.put(3)

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"threshold": ray.get(threshold)}

    def function() -> None:
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path, validation=True)

    result = fit(function, tmp_path, validation_config=ValidationConfig(fn=validate))
    assert result.checkpoint is not None
    assert result.best_checkpoints[0][1]["threshold"] == 3


class Loud:
    def __reduce__(self) -> Any:
        return exec, ("raise OSError('not here')",)


def test_config_that_cannot_be_deserialized_fails_the_rank(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="not here"):
        fit(lambda config: None, tmp_path, {"loud": Loud()})


class KeepsTheThreshold(UserCallback):
    def __init__(self, reference: Any, queue: Queue) -> None:
        self._reference = reference
        self._queue = queue

    def after_report(self, *_: Any) -> None:
        self._queue.put(ray.get(self._reference))


def test_detached_run_and_callbacks_receive_object_references(tmp_path: Path) -> None:
    threshold, queue = ray.put(3), Queue(actor_options={"num_cpus": 0})

    def function() -> Any:
        train.report({})
        return [ray.get(threshold), ray.put("made"), threshold]

    callback = KeepsTheThreshold(threshold, queue)
    with pytest.warns(UserWarning, match=r"process owns \(1\)\. When this process ends"):
        result = fit(function, tmp_path, detached=True, callbacks=[callback])
    value, made, given = result.return_values[0]
    assert [value, ray.get(made), given] == [3, "made", threshold]
    assert queue.get(timeout=300) == 3
    with pytest.warns(
        UserWarning, match="rank . is lost, .*ObjectRef.* was lost when its Ray session ended"
    ):
        assert train.attach(str(tmp_path / "run")).wait().return_values == [None]


def test_restore_with_lost_reference_raises_and_names_the_argument(tmp_path: Path) -> None:
    fit(lambda config: None, tmp_path, {"x": ray.put(1)}, num_workers=0)
    with pytest.raises(
        ValueError, match=r"config referred .*ObjectRef.* restore\(path, train_loop_"
    ):
        DataParallelTrainer.restore(tmp_path / "run")
    trainer = DataParallelTrainer.restore(tmp_path / "run", train_loop_config={"x": 2})
    assert trainer.train_loop_config == {"x": 2}
