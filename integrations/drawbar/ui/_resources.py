"""Resource use of each node over time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drawbar.train.runs import ResourceSample
from drawbar.ui._catalog import IndexedRun

_MAX_NODES = 16
_MAX_POINTS = 400

Values = Sequence[float]


def _get_gpu_utilization(sample: ResourceSample) -> float | None:
    return statistics.fmean(g.utilization_percent for g in sample.gpus) if sample.gpus else None


def _get_gpu_memory(sample: ResourceSample) -> float | None:
    return float(sum(gpu.memory_used_bytes for gpu in sample.gpus)) if sample.gpus else None


_CHARTS: tuple[
    tuple[str, str, Callable[[ResourceSample], float | None], Callable[[Values], float]], ...
] = (
    ("CPU", "percent", lambda sample: sample.cpu_percent, statistics.fmean),
    ("Memory of the run", "bytes", lambda sample: sample.rss_bytes, max),
    ("GPU, average", "percent", _get_gpu_utilization, statistics.fmean),
    ("GPU memory", "bytes", _get_gpu_memory, max),
    ("Free disk", "bytes", lambda sample: sample.disk_free_bytes, min),
)
"""Title, unit, value of a sample, and value of several samples that are drawn as one point."""


def describe_resources(run: IndexedRun) -> dict[str, Any]:
    """Return the resource use of each node, in seconds since the start of the run."""
    result: dict[str, Any] = run.compute_once("resources", lambda: _describe(run))
    return result


def _describe(run: IndexedRun) -> dict[str, Any]:
    samples = run.record.read_resources()
    start = run.record.start_time or (samples[0].time if samples else 0.0)
    nodes: dict[str, list[ResourceSample]] = {}
    for sample in samples:
        nodes.setdefault(sample.node, []).append(sample)
    shown = dict(itertools.islice(nodes.items(), _MAX_NODES))
    charts = [
        {"name": name, "unit": unit, "lines": lines, "limit": _describe_limit(name, shown)}
        for name, unit, get_value, combine in _CHARTS
        if (lines := _make_lines(shown, start, get_value, combine))
    ]
    return {"charts": charts, "nodes": list(shown), "num_nodes": len(nodes)}


def _describe_limit(chart: str, nodes: Mapping[str, Sequence[ResourceSample]]) -> str:
    """Return the CPUs or the memory of a node, if they are known and the same for all nodes."""
    last = [samples[-1] for samples in nodes.values()]
    cpus = {sample.num_cpus for sample in last}
    memory = {sample.memory_total_bytes for sample in last}
    if chart == "CPU" and len(cpus) == 1 and (count := cpus.pop()):
        return f"of {count} CPUs"
    if chart == "Memory of the run" and len(memory) == 1 and (nbytes := memory.pop()):
        return f"of {nbytes / 2**30:.0f} GiB"
    return ""


def _make_lines(
    nodes: dict[str, list[ResourceSample]],
    start: float,
    get_value: Callable[[ResourceSample], float | None],
    combine: Callable[[Values], float],
) -> list[dict[str, Any]]:
    lines = []
    for node, samples in nodes.items():
        points = [
            (sample.time - start, value)
            for sample in samples
            if (value := get_value(sample)) is not None
        ]
        size = -(-len(points) // _MAX_POINTS) or 1
        groups = [points[first : first + size] for first in range(0, len(points), size)]
        if groups:
            x = [group[-1][0] for group in groups]
            y = [combine([value for _, value in group]) for group in groups]
            lines.append({"label": node, "x": x, "y": y})
    return lines
