"""The probes that Drawbar has: arithmetic, memory, disk, clock, and all-reduce."""

from __future__ import annotations

import importlib.util
import operator
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from drawbar._base.fields import require_type
from drawbar._health.probes import (
    NodeContext,
    NodeProbe,
    OnDemandProbe,
    OnDemandProbeContext,
    Probe,
    ProbeResult,
)

_SIZE = 512
_MEMORY_FRACTION = 0.1
_WRITE_BYTES = 16 * 2**20
_PERIOD_S = 600.0

Rows = list[list[int]]


def builtin_probes() -> list[Probe]:
    """Return one probe of each kind that Drawbar has.

    Returns:
        `ArithmeticProbe`, `MemoryProbe`, `DiskProbe`, `ClockProbe`, and `AllReduceProbe`.

    Example: `HealthPolicy(probe_creator=builtin_probes, preflight=True)`
    """
    return [ArithmeticProbe(), MemoryProbe(), DiskProbe(), ClockProbe(), AllReduceProbe()]


class ArithmeticProbe(NodeProbe):
    """Multiplies matrices of small integers, whose exact product is known.

    It uses numpy and torch if they are installed. Before a start, it also uses each GPU.

    Example: `HealthPolicy(probe_creator=lambda: [ArithmeticProbe()], preflight=True)`
    """

    name = "arithmetic"
    interval_s = _PERIOD_S

    def poll(self, ctx: NodeContext) -> ProbeResult:
        """Compare the products with the exact ones."""
        first, second = _make_rows(7), _make_rows(5)
        exact = _sum_product(first, second)
        products = _multiply(first, second, use_gpus=ctx.is_preflight)
        wrong = [name for name, sums in products if sums != exact]
        detail = f"a product of matrices is wrong on {', '.join(wrong)}" if wrong else "exact"
        return ProbeResult(passed=not wrong, detail=detail)


def _make_rows(factor: int) -> Rows:
    size = range(_SIZE)
    return [[(row * factor + column * 3 + 1) % 16 for column in size] for row in size]


def _sum_product(first: Rows, second: Rows) -> tuple[list[int], list[int]]:
    """Return the sums of the rows and of the columns of the product, computed with integers."""
    row_sums = list(map(sum, second))
    column_sums = [sum(column) for column in zip(*first, strict=True)]
    return (
        [sum(map(operator.mul, row, row_sums)) for row in first],
        [sum(map(operator.mul, column, column_sums)) for column in zip(*second, strict=True)],
    )


def _multiply(
    first: Rows, second: Rows, *, use_gpus: bool
) -> list[tuple[str, tuple[list[int], list[int]]]]:
    """Return the sums of the product, as each installed package and device computes it.

    All sums within the product are below 2**24, so float32 is exact in any order.
    """
    products: list[tuple[str, Any]] = []
    if importlib.util.find_spec("numpy"):
        import numpy as np

        product = np.matmul(np.array(first, np.float32), np.array(second, np.float32))
        products.append(("numpy", product))
    if importlib.util.find_spec("torch"):
        import torch

        indexes = range(torch.cuda.device_count()) if use_gpus else ()
        for device in ("cpu", *(f"cuda:{index}" for index in indexes)):
            left = torch.tensor(first, dtype=torch.float32, device=device)
            right = torch.tensor(second, dtype=torch.float32, device=device)
            products.append((f"torch ({device})", torch.matmul(left, right).cpu()))
    summed = []
    for name, product in products:
        rows = [[int(value) for value in row] for row in product.tolist()]
        summed.append((name, (list(map(sum, rows)), [sum(c) for c in zip(*rows, strict=True)])))
    return summed


class MemoryProbe(NodeProbe):
    """Writes a pattern into free memory and reads it again.

    Args:
        max_bytes: Largest amount of memory in bytes. It uses at most a tenth of the free memory.

    Example: `MemoryProbe(max_bytes=2**30)`
    """

    name = "memory"
    interval_s = _PERIOD_S

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self._max_bytes = require_type("max_bytes", max_bytes, int)

    def poll(self, ctx: NodeContext) -> ProbeResult:
        """Compare the memory with the pattern."""
        num_bytes = min(self._max_bytes, int(_get_free_memory() * _MEMORY_FRACTION))
        for value in (0x55, 0xAA):
            block = bytearray([value]) * num_bytes
            if block.count(value) != num_bytes:
                return ProbeResult(passed=False, detail=f"{num_bytes} bytes were not kept")
        return ProbeResult(metrics={"bytes": num_bytes}, passed=True)


def _get_free_memory() -> float:
    try:
        text = Path("/proc/meminfo").read_text()
        return 1024.0 * int(text.partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError, ValueError):  # not Linux
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


class DiskProbe(NodeProbe):
    """Writes a file to the temporary folder, and to the run directory if it is on this node.

    Args:
        min_free_bytes: Free space in bytes that each of them must have.

    Example: `DiskProbe(min_free_bytes=100 * 2**30)`
    """

    name = "disk"
    interval_s = _PERIOD_S

    def __init__(self, min_free_bytes: float = 2**30) -> None:
        self._min_free = require_type("min_free_bytes", min_free_bytes, (int, float))

    def poll(self, ctx: NodeContext) -> ProbeResult:
        """Write the file, and measure the speed and the free space."""
        result = ProbeResult(passed=True)
        for title, folder in (("tmp", tempfile.gettempdir()), ("storage", ctx.storage_path)):
            if "://" in folder or not os.path.isdir(folder):
                continue
            free, speed = shutil.disk_usage(folder).free, _measure_write(folder)
            result.devices[title] = {"free_bytes": free, "bytes_per_s": speed}
            if free < self._min_free:
                result.passed = False
                result.detail += f"{folder} has {free / 2**30:.1f} GiB of free space. "
        return result


def _measure_write(folder: str) -> float:
    """Return the speed in bytes per second. The file is deleted."""
    content = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, prefix=".drawbar-probe-") as file:
        start = time.perf_counter()
        for _ in range(_WRITE_BYTES // len(content)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return _WRITE_BYTES / max(time.perf_counter() - start, 1e-9)


class ClockProbe(NodeProbe):
    """Compares the clock of the node with the clock of the controller.

    Args:
        max_offset_s: Largest difference in seconds. The time of the call does not count.

    Example: `ClockProbe(max_offset_s=1.0)`
    """

    name = "clock"
    interval_s = _PERIOD_S

    def __init__(self, max_offset_s: float = 30.0) -> None:
        self._max_offset = require_type("max_offset_s", max_offset_s, (int, float))

    def poll(self, ctx: NodeContext) -> ProbeResult:
        """Return the time of the node in seconds since the epoch. The controller compares it."""
        return ProbeResult(metrics={"time": time.time()})

    def judge(self, result: ProbeResult, sent: float, received: float) -> ProbeResult:
        """Return the result with the least possible difference between the clocks.

        A slow call only makes the difference smaller, so that a busy node does not fail.

        Args:
            result: Result of `poll`.
            sent: Clock of the controller before the call, in seconds since the epoch.
            received: Clock of the controller after the call.
        """
        if "time" not in result.metrics:
            return result  # the call has failed
        now = result.metrics["time"]
        offset = min(now - sent, 0.0) + max(now - received, 0.0)
        return ProbeResult(
            metrics={"offset_s": offset},
            passed=abs(offset) <= self._max_offset,
            detail=f"the clock differs by {offset:.1f} s from the clock of the controller",
        )


class AllReduceProbe(OnDemandProbe):
    """Runs an all-reduce of torch between pairs of nodes, and checks its result.

    Each node has one partner. The nodes of a pair that fails are tested again, each with a node of
    a pair that has passed, so that only the node with the defect fails. Does nothing without torch.

    Args:
        backend: "gloo" or "nccl".

    Example: `AllReduceProbe(backend="nccl")`
    """

    name = "all-reduce"

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = require_type("backend", backend, str)

    def poll(self, ctx: OnDemandProbeContext) -> ProbeResult:
        """Return whether torch is installed. The pairs run the all-reduce after that."""
        has_torch = importlib.util.find_spec("torch") is not None
        return ProbeResult(passed=None if has_torch else True, detail="torch is not installed")
