"""From where the workers landed to their ranks.

Ranks are contiguous per node, since frameworks take `rank - local_rank` for the node's first rank,
and within a node they follow the GPUs, so that local rank i uses the i-th GPU. A node is a Ray node
*id*: two Ray nodes may share a host and an address. The slot, which is the worker's bundle in the
placement group, outlives the process in it; so a worker replaced in its slot, on the same node and
GPUs, leaves every rank as it was.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drawbar.train._messages import Ranks, WorkerInfo


def assign_ranks(workers: Sequence[WorkerInfo]) -> list[Ranks]:
    """Give each worker its ranks.

    Args:
        workers: Index i is the worker in slot i.

    Returns:
        At index i the ranks of the worker in slot i. Nodes are numbered in the order in which the
        slots first name them; within a node, workers go by their lowest GPU id, those without GPUs
        by slot.
    """
    nodes: dict[str, list[int]] = {}
    for slot, worker in enumerate(workers):
        nodes.setdefault(worker.node_id, []).append(slot)
    ranks: dict[int, Ranks] = {}
    for node_rank, slots in enumerate(nodes.values()):
        slots.sort(key=lambda slot: (_get_lowest_gpu(workers[slot]), slot))
        for local_rank, slot in enumerate(slots):
            ranks[slot] = Ranks(
                world_rank=len(ranks),
                world_size=len(workers),
                local_rank=local_rank,
                local_world_size=len(slots),
                node_rank=node_rank,
                num_nodes=len(nodes),
            )
    return [ranks[slot] for slot in range(len(workers))]


def sort_by_rank(workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]) -> list[WorkerInfo]:
    """Put workers, given with their ranks, into rank order."""
    pairs = zip(workers, ranks, strict=True)
    return [worker for worker, _ in sorted(pairs, key=lambda pair: pair[1].world_rank)]


def get_gpu_sort_key(gpu_id: str) -> tuple[int, int, str]:
    """Sort key of a GPU id: numbers by value ("2" before "10"), then UUIDs by text."""
    return (0, int(gpu_id), "") if gpu_id.isdecimal() else (1, 0, gpu_id)


def _get_lowest_gpu(worker: WorkerInfo) -> tuple[int, int, str]:
    return min(map(get_gpu_sort_key, worker.gpu_ids), default=(2, 0, ""))


def get_local_gpu_ids(count: int, local_rank: int = 0) -> tuple[str, ...]:
    """Give the ids of a local rank's share of the GPUs that this process sees.

    That is `count` of them, or as many as there are; rank 0 has the first ones.
    """
    # CUDA is not asked: it would take memory on every GPU that it looks at.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = Path("/dev").glob("nvidia[0-9]*")
        ids = sorted((each.name.removeprefix("nvidia") for each in devices), key=int)
    else:
        ids = [each.strip() for each in visible.split(",") if each.strip()]
    return tuple(ids[local_rank * count : (local_rank + 1) * count])


def format_visible_devices(workers_on_node: Sequence[WorkerInfo]) -> str:
    """Give CUDA_VISIBLE_DEVICES for the workers of one node: all their GPUs, "" if they have none.

    Each worker sees the GPUs of all, so that local rank i uses the i-th device and NCCL can reach a
    neighbour's memory directly.
    """
    gpu_ids = {gpu_id for worker in workers_on_node for gpu_id in worker.gpu_ids}
    return ",".join(sorted(gpu_ids, key=get_gpu_sort_key))
