"""Measure the resource use of this node, and send samples to the controller.

The process of the lowest local rank takes the samples of its node, in a daemon thread. It reads
`/proc` and, if `nvidia-ml-py` is installed, NVML.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from drawbar._observe.resources import GpuSample, ResourceSample
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.messages import Observation

SAMPLE_SECONDS = 10.0

FIRST_SAMPLE_SECONDS = 1.0
"""Time until the first sample. It doubles up to `SAMPLE_SECONDS`, so that short runs have some."""

_logger = logging.getLogger("drawbar.train")


@contextlib.contextmanager
def sample_resources(
    assignment: WorkerAssignment, send: Callable[[Observation], None]
) -> Iterator[None]:
    """Send resource samples while the block runs, if this is the lowest local rank.

    Args:
        assignment: Assignment of this rank.
        send: Callback that sends samples to the controller. It is not called after the block.
    """
    if assignment.ranks.local_rank != 0:
        yield
        return
    sampler = ResourceSampler(assignment)
    stopped = threading.Event()
    send_lock = threading.Lock()

    def send_samples() -> None:
        seconds = FIRST_SAMPLE_SECONDS
        try:
            while not stopped.wait(seconds):
                seconds = min(2 * max(seconds, 1.0), SAMPLE_SECONDS)
                sample = sampler.take()
                with send_lock:
                    if stopped.is_set():
                        return
                    payload = msgspec.to_builtins(sample)
                    send(Observation(kind="resources", payload=payload, is_activity=False))
        # Samples must never fail a run: the connection may be closed, or an NVML call may fail.
        except Exception as error:
            _logger.debug("sampling of resources on this node has stopped: %r", error)

    threading.Thread(target=send_samples, name="drawbar-resources", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        # The final message of the rank follows, so wait until a sample has been sent. Do not wait
        # for a sample that is being measured.
        with send_lock:
            pass


class ResourceSampler:
    """Measure the resource use of this node.

    Args:
        assignment: Assignment of the rank whose process takes the samples.
    """

    def __init__(self, assignment: WorkerAssignment) -> None:
        self._assignment = assignment
        self._pids = {os.getpid(), *assignment.node_pids}
        self._path = assignment.run_directory.local_path
        self._cpu_times = _read_cpu_times()
        self._gpus: _Gpus | None = None

    def take(self) -> ResourceSample:
        """Return a sample. Values that cannot be measured are None."""
        if self._gpus is None:
            self._gpus = _Gpus()
        ranks = self._assignment.ranks
        memory = _measure_memory(self._pids)
        disk = _measure_disk(self._path)
        return ResourceSample(
            time=time.time(),
            attempt=self._assignment.attempt,
            rank=ranks.world_rank,
            node_rank=ranks.node_rank,
            node=os.uname().nodename,
            cpu_percent=self._measure_cpu(),
            num_cpus=os.cpu_count(),
            rss_bytes=memory.rss_bytes if memory else None,
            num_processes=memory.num_processes if memory else None,
            memory_total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            disk_free_bytes=disk[0] if disk else None,
            disk_total_bytes=disk[1] if disk else None,
            gpus=self._gpus.measure(),
        )

    def _measure_cpu(self) -> float | None:
        """Return the use of all CPUs since the last call, in percent."""
        previous, current = self._cpu_times, _read_cpu_times()
        self._cpu_times = current
        if previous is None or current is None or current.total <= previous.total:
            return None
        busy = (current.busy - previous.busy) / (current.total - previous.total)
        return round(100 * min(max(busy, 0.0), 1.0), 1)


class _CpuTimes(NamedTuple):
    busy: int
    total: int


def _read_cpu_times() -> _CpuTimes | None:
    """Return the CPU times of this node in clock ticks; None without `/proc`."""
    try:
        with open("/proc/stat") as file:
            # user, nice, system, idle, iowait, irq, softirq, steal; guest times are in user
            values = [int(value) for value in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(values[3:5])
    return _CpuTimes(sum(values) - idle, sum(values))


class _Memory(NamedTuple):
    rss_bytes: int
    num_processes: int


def _measure_memory(pids: Collection[int]) -> _Memory | None:
    """Return the memory of processes and their descendants; None without `/proc`."""
    children: dict[int, list[int]] = {}
    rss_pages: dict[int, int] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return None
    for name in filter(str.isdecimal, names):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
            stat = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
            # Fields of proc(5), counted from the state, which is field 3.
            children.setdefault(int(stat[1]), []).append(int(name))
            rss_pages[int(name)] = int(stat[21])
    counted: set[int] = set()
    pending = [pid for pid in pids if pid in rss_pages]
    while pending:
        pid = pending.pop()
        if pid not in counted:
            counted.add(pid)
            pending += children.get(pid, ())
    if not counted:
        return None
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return _Memory(sum(rss_pages[pid] for pid in counted) * page_bytes, len(counted))


def _measure_disk(path: Path) -> tuple[int, int] | None:
    """Return the free and the total bytes of a filesystem; None if the path does not exist."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize


class _Gpus:
    """NVIDIA GPUs of this node; none if NVML is not available."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception as error:  # not installed, or no driver
            _logger.debug("GPUs are not sampled: %r", error)

    def measure(self) -> list[GpuSample]:
        """Return a sample of each GPU that can be read."""
        samples = []
        for index, handle in enumerate(self._handles):
            # Some GPUs, such as MIG instances, do not support all of these calls.
            with contextlib.suppress(Exception):
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                samples.append(
                    GpuSample(
                        index=index,
                        utilization_percent=self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                        memory_used_bytes=memory.used,
                        memory_total_bytes=memory.total,
                    )
                )
        return samples
