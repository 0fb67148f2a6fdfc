"""Assign ranks to workers by node and GPU.

Ranks are contiguous per node, because frameworks compute `rank - local_rank` as the first rank of a
node. Within a node they follow the GPUs, so that local rank i uses the i-th GPU. Nodes are
distinguished by their Ray node ID, because two Ray nodes may share a host and an address. A slot is
the index of a worker's bundle in the placement group and outlives the process in it. A worker that
is replaced in its slot, on the same node and GPUs, therefore leaves all ranks unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.worker_env import get_visible_gpu_ids


def assign_ranks(workers: Sequence[WorkerInfo]) -> list[Ranks]:
    """Assign ranks to the workers.

    Args:
        workers: Workers, by slot.

    Returns:
        Ranks, by slot. Nodes are numbered in the order of their first slots. Within a node, workers
        are sorted by their lowest GPU ID, or by slot if they have no GPU.
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


def rank_workers(workers: Sequence[WorkerInfo]) -> list[tuple[WorkerInfo, Ranks]]:
    """Assign ranks to the workers, and return them with their ranks, in rank order."""
    pairs = zip(workers, assign_ranks(workers), strict=True)
    return sorted(pairs, key=lambda pair: pair[1].world_rank)


def get_gpu_sort_key(gpu_id: str) -> tuple[int, int, str]:
    """Return the sort key of a GPU ID: numbers by value ("2" before "10"), then UUIDs."""
    return (0, int(gpu_id), "") if gpu_id.isdecimal() else (1, 0, gpu_id)


def _get_lowest_gpu(worker: WorkerInfo) -> tuple[int, int, str]:
    return min(map(get_gpu_sort_key, worker.gpu_ids), default=(2, 0, ""))


def get_local_gpu_ids(count: int, local_rank: int = 0) -> tuple[str, ...]:
    """Return the IDs of the GPUs of a local rank, among those visible to this process.

    Args:
        count: Number of GPUs per rank. If there are too few, fewer are returned.
        local_rank: Local rank; rank 0 gets the first GPUs.
    """
    return get_visible_gpu_ids()[local_rank * count : (local_rank + 1) * count]


def assign_local_gpus(gpus_per_worker: float, num_workers: int) -> list[tuple[str, ...]]:
    """Return the GPU IDs of each rank, among those visible to this process.

    Args:
        gpus_per_worker: GPUs of each rank. Ranks with less than one GPU share one.
        num_workers: Number of ranks.
    """
    if not 0 < gpus_per_worker < 1:
        return [get_local_gpu_ids(math.ceil(gpus_per_worker), rank) for rank in range(num_workers)]
    ranks_per_gpu = int(1 / gpus_per_worker)
    return [get_local_gpu_ids(1, rank // ranks_per_gpu) for rank in range(num_workers)]


def format_visible_devices(workers_on_node: Sequence[WorkerInfo]) -> str:
    """Return CUDA_VISIBLE_DEVICES for the workers of one node, "" if they have no GPUs.

    All workers see the GPUs of all, so that local rank i uses the i-th device and NCCL can access
    the memory of other ranks directly.
    """
    gpu_ids = {gpu_id for worker in workers_on_node for gpu_id in worker.gpu_ids}
    return ",".join(sorted(gpu_ids, key=get_gpu_sort_key))
