"""Ranks follow nodes, then GPUs, and do not change when a worker is replaced."""

import msgspec
import pytest

from drawbar.train._protocol.assignment import Ranks, WorkerInfo
from drawbar.train._worker_group.ranks import assign_ranks


def worker(node_id: str, *gpu_ids: str, pid: int = 1) -> WorkerInfo:
    return WorkerInfo(
        node_id=node_id, node_ip="10.0.0.1", hostname="host", pid=pid, gpu_ids=gpu_ids
    )


@pytest.mark.parametrize(
    ("workers", "world_ranks"),
    [
        pytest.param([], [], id="none"),
        pytest.param([worker("a"), worker("a")], [0, 1], id="by slot"),
        pytest.param([worker("a"), worker("b"), worker("a")], [0, 2, 1], id="contiguous per node"),
        pytest.param([worker("b"), worker("a")], [0, 1], id="nodes by first slot, not by name"),
        pytest.param([worker("a", "10"), worker("a", "2")], [1, 0], id="GPU ids are numbers"),
        pytest.param(
            [worker("a", "7", "3"), worker("a", "4", "5")], [0, 1], id="by the lowest GPU"
        ),
        pytest.param([worker("a", "GPU-b"), worker("a", "GPU-a")], [1, 0], id="GPU ids are UUIDs"),
        pytest.param([worker("a"), worker("a", "0")], [1, 0], id="GPUs before none"),
        pytest.param([worker("a", "0"), worker("a", "0")], [0, 1], id="a shared GPU: by slot"),
    ],
)
def test_assign_ranks_sorts_by_node_and_gpu(
    workers: list[WorkerInfo], world_ranks: list[int]
) -> None:
    assert [ranks.world_rank for ranks in assign_ranks(workers)] == world_ranks


def test_assign_ranks_sets_all_six_ranks() -> None:
    ranks = assign_ranks([worker("a"), worker("b"), worker("a")])
    assert ranks[2] == Ranks(
        world_rank=1, world_size=3, local_rank=1, local_world_size=2, node_rank=0, num_nodes=2
    )
    assert ranks[1] == Ranks(
        world_rank=2, world_size=3, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2
    )


@pytest.mark.parametrize("slot", range(4))
def test_assign_ranks_after_replacement_is_unchanged(slot: int) -> None:
    workers = [worker("b", "1"), worker("a", "0"), worker("b", "0"), worker("a", "1")]
    before = assign_ranks(workers)
    workers[slot] = msgspec.structs.replace(workers[slot], pid=99)
    assert assign_ranks(workers) == before
