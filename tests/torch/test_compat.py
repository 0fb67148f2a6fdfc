"""Private APIs of torch and others: each test fails when `_compat` needs a change."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist

from drawbar.torch import _compat

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
Pair = namedtuple("Pair", ["x", "y"])  # torch maps its fields


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A default process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def step(model: torch.nn.Module) -> None:
    model(torch.ones(1, 1)).sum().backward()


@pytest.mark.usefixtures("group")
def test_group_activity_counts_collectives_and_groups() -> None:
    model = torch.nn.Linear(1, 1)
    replicated = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    counts: list[Any] = [_compat.count_group_activity()]
    for function in (
        lambda: step(model),
        lambda: step(replicated),
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.new_group([0]),
    ):
        function()
        counts.append(_compat.count_group_activity())
    (before, local, ddp, all_reduce, new_group) = counts
    assert before == local
    assert local[0] < ddp[0] < all_reduce[0]
    assert before[1] == all_reduce[1] == new_group[1] - 1


@pytest.mark.usefixtures("group")
def test_group_after_interrupted_destruction_has_same_name() -> None:
    dist.distributed_c10d._update_default_pg(None)  # what destroys a group begins with it
    _compat.forget_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # public, not in its __all__
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.group_name == "0"


@pytest.mark.usefixtures("group")
def test_abort_ends_default_group() -> None:
    if TORCH_VERSION >= (2, 6):  # with an older version, the group is destroyed
        assert hasattr(dist.distributed_c10d, "_abort_process_group")
    _compat.abort_default_group()
    assert not dist.is_initialized()


def test_map_tensors_reaches_nested_structures() -> None:
    structure = {"a": [torch.ones(1), "text"], "b": Pair(torch.ones(1), 2)}
    mapped: Any = _compat.map_tensors(lambda tensor: tensor + 1, structure)
    assert mapped["a"] == [torch.full((1,), 2.0), "text"]
    assert mapped["b"] == Pair(torch.full((1,), 2.0), 2)


def test_exact_state_of_stream_has_no_shuffle_buffer() -> None:
    def make() -> Any:
        return datasets.Dataset.from_dict({"x": [*range(9)]}).to_iterable_dataset(num_shards=3)

    def double(rows: Any) -> Any:
        return rows

    exact = [make(), make().map(double), make().filter(bool), make().take(3).repeat(2)]
    exact.append(datasets.concatenate_datasets([make(), make()]))
    mixed = datasets.interleave_datasets([make(), make().shuffle(buffer_size=2)])
    inexact = [mixed, make().shuffle(buffer_size=2).map(double), make().with_format("arrow")]
    assert [_compat.has_exact_state(each) for each in exact] == [True] * 5
    assert [_compat.has_exact_state(each) for each in inexact] == [False] * 3
    assert not _compat.has_exact_state(object())


def test_version_of_tensor_counts_changes_in_place() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    versions = [_compat.get_version(tensor)]
    with torch.no_grad():
        tensor[0] = 1
        versions.append(_compat.get_version(tensor))
        tensor.detach().add_(1)
        versions.append(_compat.get_version(tensor))
        tensor.data.add_(1)
        versions.append(_compat.get_version(tensor))
    assert versions == [0, 1, 2, 2]
