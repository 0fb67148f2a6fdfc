"""Tests of data positions: each row is read once across kills and world sizes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import ray.data

from drawbar import train
from drawbar.train import (
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    collective,
)
from drawbar.train.backend import register_data_position
from drawbar.train.testing import run_in_threads
from tests._ray_compat import get_log_directory
from tests.train.data.shards import make_shards, shut_down, take
from tests.train.rank_data_probe import save, saved

ROWS = 1000

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

on_ray = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
    pytest.mark.filterwarnings("ignore:unclosed file .*ray-data:ResourceWarning"),  # its logs
]


def fail() -> None:
    raise RuntimeError("killed")


def kill() -> None:
    """Kill rank 1; the others wait for that."""
    if train.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collective.barrier()


def walk(
    save_at: int = 0, end: Callable[[], None] = fail, again: bool = False
) -> Callable[[], list[list[int]]]:
    """A function that goes through one epoch; gives the ids seen before the checkpoint and after.

    Saves at one batch, and ends its first attempt at the next. With `again` it goes through another
    epoch in the end, whose ids come last.
    """

    def function() -> list[list[int]]:
        before, now = [rank["seen"] for rank in saved()], list[int]()
        shard = train.get_dataset_shard("train")
        batches = shard.iter_batches(batch_size=10)
        for step, batch in enumerate(batches, 1):
            now += [int(each) for each in batch["id"]]
            if step == save_at and not before:
                save(seen=now)
            if step == save_at + 1 and save_at and train.get_context().get_attempt() == 0:
                end()
        return [*before, now, *([take(shard, ROWS)[0]] if again else [])]

    return function


def lazy(rows: int = ROWS) -> ray.data.Dataset:
    """A dataset that is computed when it is read, by several tasks."""
    return ray.data.range(rows, override_num_blocks=5, concurrency=1)  # in one process


def fit(
    function: Callable[[], Any], config: RunConfig, num_workers: int = 2, **options: Any
) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=config,
        **{"datasets": {"train": lazy()}, **options},
    ).fit()


def read_several(names: list[str]) -> dict[str, list[int]]:
    """Read the rest of an epoch of several datasets; fail after 17 batches of each at first."""
    ids: dict[str, list[int]] = {name: [] for name in names}
    shards = {name: train.get_dataset_shard(name) for name in names}
    epochs = {name: iter(shard.iter_batches(batch_size=10)) for name, shard in shards.items()}
    if not saved():
        for name, batches in epochs.items():
            for batch in islice(batches, 17):
                ids[name] += map(int, batch["id"])
        save(**ids)
        fail()
    for name, batches in epochs.items():
        for batch in batches:
            ids[name] += map(int, batch["id"])
    return ids


def restarted(function: Callable[[], Any], config: RunConfig, times: int = 1) -> Any:
    """Run a function that fails a number of times on one worker; return its final value."""
    config = replace(config, failure_config=FailureConfig(max_failures=times))
    return run_in_threads(function, num_workers=1, run_config=config).return_value


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def has_aborted(pid: int) -> bool:
    """Return whether a Ray process logged an abort before it ended."""
    (log,) = get_log_directory().glob(f"worker-*-{pid}.err")
    return "SIGABRT" in log.read_text()


class TestShards:
    """Datasets of the trainer."""

    pytestmark = on_ray

    def test_resume_on_more_workers_reads_rows_once(self, run_config: RunConfig) -> None:
        datasets = {"train": lazy(), "table": pa.table({"id": range(ROWS)}), "valid": lazy()}
        config = DataConfig(datasets_to_split=["train", "table"])
        function = partial(read_several, list(datasets))
        options: dict[str, Any] = {"datasets": datasets, "dataset_config": config}
        with pytest.raises(TrainingFailedError, match="killed"):
            fit(function, run_config, 0, **options)
        result = fit(function, run_config, 2, **options)
        for name in ("train", "table"):
            rest = chain(*(rank[name] for rank in result.return_values))
            assert sorted(rest) == list(range(170, ROWS))
        assert [rank["valid"] for rank in result.return_values] == [list(range(170, ROWS))] * 2
        epochs = {epoch.dataset: epoch for epoch in result.data_ledger}
        assert (epochs["train"].is_complete, epochs["train"].row_ranges) == (True, None)
        assert (epochs["table"].repeated_rows, epochs["table"].unread_rows) == ((), ())
        assert all((epoch.num_rows, epoch.is_complete) == (ROWS, True) for epoch in epochs.values())
        assert "'table' epoch 0: 1000 rows" in repr(result.data_ledger)

    def test_restart_after_sigkill_keeps_rows_and_order(self, run_config: RunConfig) -> None:
        config = replace(run_config, failure_config=FailureConfig(max_failures=1))
        ranks = fit(walk(16, kill, again=True), config).return_values
        orders = [before[rank] + after for rank, (*before, after, _) in enumerate(ranks)]
        assert orders == [whole for *_, whole in ranks]
        assert sorted(chain(*orders)) == list(range(ROWS))

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("in_memory", "reads"),
        [
            (False, [(2, 10), (3, 20), (1, ROWS)]),
            (True, [(2, 10), (3, ROWS)]),
        ],
    )
    def test_resume_over_several_world_sizes_reads_each_row_once(
        self,
        in_memory: bool,
        reads: list[tuple[int, int]],
        wait_until_gone: Callable[..., None],
    ) -> None:
        data = lazy().materialize() if in_memory else lazy()
        position: Any = None
        node_id = ray.get_runtime_context().get_node_id()
        seen: list[int] = []
        handing_out: list[int] = []
        for workers, rows in reads:
            shards = make_shards(data, workers, position, node_id=node_id)
            with ThreadPoolExecutor(workers) as pool:  # one thread for each rank
                ranks = list(pool.map(lambda each, n=rows: take(each, n), shards))
            position = ranks[0][1]
            seen += chain(*(ids for ids, _ in ranks))
            handing_out += map(
                pid_of, {each for shard in shards for each in shard.split_coordinators}
            )
            shut_down(shards)  # with rows left, but for the last ones
        assert len(handing_out) == 2
        wait_until_gone(handing_out)
        assert not any(map(has_aborted, handing_out))
        assert len(set(seen)) == len(seen) == ROWS - 2  # 980 rows leave two over for 3 workers
        assert position == {"epoch": 1, "read": []}

    def test_resume_of_shuffled_files_keeps_order_of_the_epoch(self, tmp_path: Path) -> None:
        for file in range(8):
            lines = ["id", *map(str, range(10 * file, 10 * file + 10))]
            (tmp_path / f"{file}.csv").write_text("\n".join(lines))
        shuffle = ray.data.FileShuffleConfig(seed=1)
        files = ray.data.read_csv(str(tmp_path), shuffle=shuffle, override_num_blocks=2)
        (whole,) = make_shards(files, 1)
        first, second, third = (take(whole, ROWS)[0] for _ in range(3))
        assert sorted(first) == sorted(second) == list(range(80))
        assert first != second != third
        (begun,) = make_shards(files, 1, {"epoch": 1, "read": []})
        some, position = take(begun, 30)
        (gone_on,) = make_shards(files, 1, position)
        assert some + take(gone_on, ROWS)[0] == second
        assert take(gone_on, ROWS)[0] == third

    def test_resume_without_preserved_order_restarts_the_epoch(self, run_config: RunConfig) -> None:
        config = DataConfig(execution_options=ray.data.ExecutionOptions())
        with pytest.raises(TrainingFailedError, match="killed"):
            fit(walk(17), run_config, 0, dataset_config=config)
        result = fit(walk(), run_config, 0, dataset_config=config)
        assert sorted(result.return_values[0][-1]) == list(range(ROWS))

    def test_shard_position_counts_all_iteration_methods(self, run_config: RunConfig) -> None:
        def function() -> list[dict[str, Any]]:
            shard: Any = train.get_dataset_shard("train")
            positions = []
            for rows in (
                shard.iter_batches(batch_size=10),
                shard.iter_batches(batch_size=None),
                shard.iter_torch_batches(batch_size=10),
                shard.iter_torch_batches(batch_size=None, collate_fn=lambda _: "anything"),
                shard.iter_batches(batch_size=10, local_shuffle_buffer_size=20),
                shard.iter_rows(),
            ):
                next(iter(rows))
                running = iter(rows)
                next(running)
                positions.append(shard.encode_position())
                running.close()
            return positions

        datasets = {"train": lazy().materialize()}
        positions = fit(function, run_config, num_workers=0, datasets=datasets).return_value
        assert [each["cut_short"] for each in positions] == [1, 3, 5, 7, 9, 11]
        assert [each["epoch"] for each in positions] == [1, 3, 5, 7, 9, 11]
        assert [each["read"] for each in positions] == [
            *([[1, 10]], [[1, 200]], [[1, 10]], [], [], [[1, 1]])
        ]


class TestSources:
    """Positions of integrations: `drawbar.train.backend.register_data_position`."""

    def test_registered_position_is_restored_once(self, run_config: RunConfig) -> None:
        def function() -> list[Any]:
            found = [register_data_position("rows", lambda: {"at": [1, 2]}) for _ in range(2)]
            if not saved():
                save()
                fail()
            return found

        assert restarted(function, run_config) == [{"at": [1, 2]}, None]

    def test_registered_positions_of_same_name_are_numbered(self, run_config: RunConfig) -> None:
        def function() -> list[Any]:
            positions = partial(int, 5), partial(int, 6)
            found = [register_data_position("rows", each, add_index=True) for each in positions]
            if not saved():
                save()
                fail()
            return found

        assert restarted(function, run_config) == [5, 6]

    def test_registered_position_of_unopened_source_is_kept(self, run_config: RunConfig) -> None:
        def function() -> Any:
            attempt = train.get_context().get_attempt()
            found = None if attempt == 1 else register_data_position("rows", lambda: 5)
            if attempt < 2:
                save()
                fail()
            return found

        assert restarted(function, run_config, times=2) == 5

    def test_registered_position_of_deleted_source_is_omitted(self, run_config: RunConfig) -> None:
        def function() -> Any:
            found = register_data_position("rows", lambda: None)
            if not saved():
                save()
                fail()
            return found

        assert restarted(function, run_config) is None

    def test_registered_position_must_be_json(self, run_config: RunConfig) -> None:
        def function() -> None:
            register_data_position("rows", lambda: {"at": {1, 2}})
            with pytest.raises(
                TypeError, match=r"source 'rows' must be JSON-serializable, found \{'at': \{1, 2"
            ):
                save()

        run_in_threads(function, num_workers=1, run_config=run_config)
