"""Resource samples of the nodes of a run."""

from __future__ import annotations

import msgspec


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one GPU of a node, by all processes.

    Attributes:
        index: Number of the GPU, as in `nvidia-smi`.
        utilization_percent: Share of the last sampling period in which a kernel was running, 0 to
            100.
        memory_used_bytes: Used memory in bytes.
        memory_total_bytes: Total memory in bytes.

    Example:
        Print the use of all GPUs in the last sample of a run:

            sample = runs.find_run("experiment").read_resources()[-1]
            for gpu in sample.gpus:
                print(gpu.index, gpu.utilization_percent, gpu.memory_used_bytes)
    """

    index: int
    utilization_percent: float
    memory_used_bytes: int
    memory_total_bytes: int


class ResourceSample(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Resource use of one node of a run at one time.

    A value is None if it cannot be measured, for example on a system without `/proc`.

    Attributes:
        time: Time of the sample, in seconds since the epoch, by the clock of the node.
        attempt: Number of the attempt.
        rank: Lowest rank on the node, whose process takes the samples.
        node_rank: Number of the node in the attempt.
        node: Hostname of the node.
        cpu_percent: Use of all CPUs of the node by all its processes since the last sample, 0 to
            100.
        num_cpus: Number of CPUs of the node.
        rss_bytes: Resident memory of the run's processes on the node and of their children, in
            bytes. Memory that several processes share is counted for each of them.
        num_processes: Number of these processes.
        memory_total_bytes: Memory of the node in bytes.
        disk_free_bytes: Free space for the run directory, in bytes, as the node sees it. For a
            remote run, this is the work directory.
        disk_total_bytes: Size of that filesystem in bytes.
        gpus: GPUs of the node. Empty without NVIDIA GPUs, or if `nvidia-ml-py` is not installed.

    Example:
        Print the memory that the processes of a run used:

            for sample in runs.find_run("experiment").read_resources():
                print(sample.node, sample.time, sample.rss_bytes)
    """

    time: float
    attempt: int
    rank: int
    node_rank: int
    node: str
    cpu_percent: float | None = None
    num_cpus: int | None = None
    rss_bytes: int | None = None
    num_processes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    gpus: list[GpuSample] = []
