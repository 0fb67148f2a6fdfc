"""Tests of data positions in streams of Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from drawbar import train
from drawbar.torch import prepare_data_loader
from drawbar.train import FailureConfig, RunConfig, collective
from drawbar.train.testing import run_in_threads
from tests.train.rank_data_probe import save, saved


def read_parts(parts: list[range]) -> Iterator[dict[str, int]]:
    for part in parts:
        yield from ({"x": index} for index in part)


def make_stream(kind: str) -> Any:
    """Return a stream of the numbers from 0 to 39, in four shards."""
    cuts = [0, 5, 20, 35, 40] if kind == "uneven" else [0, 10, 20, 30, 40]
    parts = [range(*pair) for pair in pairwise(cuts)]
    stream = datasets.IterableDataset.from_generator(read_parts, gen_kwargs={"parts": parts})
    return stream.shuffle(seed=1, buffer_size=10) if kind == "shuffled" else stream


def train_epochs(kind: str, num_workers: int, *, fails: bool) -> Callable[[], Any]:
    """Return a function that reads three epochs, and fails once in the second one."""

    def function() -> list[Any]:
        context = train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
        state: dict[str, Any] = saved()[rank] if saved() else {"epoch": 0, "history": []}
        history: list[Any] = state["history"]
        stream = split_dataset_by_node(make_stream(kind), rank, size)
        loader = prepare_data_loader(
            DataLoader(stream, 2, collate_fn=list, num_workers=num_workers)
        )
        for epoch in range(state["epoch"], 3):
            if kind != "same_order":
                stream.set_epoch(epoch)
            for step, batch in enumerate(loader):
                history.append([epoch, [row["x"] for row in batch]])
                if (epoch, step) == (1, 2):
                    save(epoch=epoch, history=history)
                if (epoch, step) == (1, 4) and fails and context.get_attempt() == 0:
                    if rank == 0:
                        raise RuntimeError("killed")
                    collective.barrier()
        return history

    return function


@pytest.mark.parametrize(
    ("kind", "size", "num_workers"),
    [
        ("plain", 1, 0),
        ("same_order", 1, 0),
        ("shuffled", 1, 0),
        ("shuffled", 1, 2),
        ("shuffled", 2, 0),
        ("uneven", 2, 0),
    ],
)
def test_stream_resumes_with_rows_of_uninterrupted_run(
    run_config: RunConfig, kind: str, size: int, num_workers: int
) -> None:
    histories = []
    for fails in (False, True):
        config = replace(run_config, name=str(fails), failure_config=FailureConfig(max_failures=1))
        function = train_epochs(kind, num_workers, fails=fails)
        result = run_in_threads(function, num_workers=size, run_config=config)
        histories.append(result.return_values)
    assert histories[0] == histories[1]


def test_stream_of_other_world_size_begins_epoch_again_with_warning(run_config: RunConfig) -> None:
    def function() -> list[int]:
        loader = prepare_data_loader(DataLoader(make_stream("plain"), 2, collate_fn=list))
        if saved():
            return [row["x"] for batch in loader for row in batch]
        for _ in loader:
            save()
            break
        return []

    run_in_threads(function, num_workers=1, run_config=run_config)
    with pytest.warns(UserWarning, match="2 of its rows were consumed with a world size of 1"):
        result = run_in_threads(function, num_workers=2, run_config=run_config)
    assert result.return_values == [[*range(40)]] * 2
