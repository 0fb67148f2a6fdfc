"""Shards of datasets as the ranks of a run receive them, without a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import pytest

from drawbar._data import cluster_cpus, split, streams, user_datasets
from drawbar._process import driver_env as _driver_env
from drawbar.train import DataConfig
from drawbar.train.backend import set_tune_trial

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def make_shards(
    dataset: Any,
    world_size: int,
    position: Any = None,
    *,
    config: DataConfig | None = None,
    name: str = "train",
    node_id: str = "node",
    materialized: dict[str, Any] | None = None,
) -> list[Any]:
    """Return the shard of each rank.

    Args:
        dataset: Dataset of the trainer.
        world_size: Number of ranks.
        position: Position of a shard from which the ranks resume.
        config: How to split the dataset.
        name: Name of the dataset.
        node_id: Node of all ranks.
        materialized: Materialized datasets of earlier attempts.
    """
    shards = split.make_shards(
        user_datasets.open_datasets({name: dataset}),
        config or DataConfig(),
        [node_id] * world_size,
        {f"dataset:{name}": position} if position else {},
        {} if materialized is None else materialized,
    )
    return [by_name[name] for by_name in shards]


def take(shard: Any, rows: int, **options: Any) -> tuple[list[int], Any]:
    """Read batches until this number of rows or the end; return their ids and the position.

    The position is the one inside the loop: an iteration that ends early counts as an epoch.
    """
    ids: list[int] = []
    for batch in shard.iter_batches(batch_size=10, **options):
        ids += [int(each) for each in batch["id"]]
        if len(ids) == rows:
            return ids, shard.encode_position()
    return ids, shard.encode_position()


def shut_down(shards: Sequence[Any]) -> None:
    """Shut down the streams of the shards, as the end of an attempt does."""
    streams.shut_down_streams([{"train": shard} for shard in shards])


@contextlib.contextmanager
def run_as_tune_trial() -> Iterator[None]:
    """Assign runs to a trial of Ray Tune that waits only 0.1 s for CPUs of ended trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_cpus, "_PLACEMENT_RELEASE_S", 0.1)
        patch.setattr(_driver_env, "_tune_trials", [])
        set_tune_trial(name="trial", id="1", directory="", resources=None)
        yield
