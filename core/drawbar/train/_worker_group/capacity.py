"""Check whether a cluster can hold a worker group and describe the missing resources.

Ray leaves a placement group that can never be placed pending forever and reports nothing
(ray-project/ray#18835). Before a group is requested, `check_group_fits` therefore checks what the
empty nodes can hold, and rejects a group that can never be placed. It never rejects a group that
could be placed. Pure functions: `cluster.py` queries Ray, and skips the checks if the cluster can
grow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drawbar._base.wording import format_count
from drawbar._process.errors import InsufficientResourcesError
from drawbar.train._config.scaling_config import ScalingConfig

# Ray counts resources in ten-thousandths. Integers prevent 0.3 // 0.1 from being 2.
_UNITS_PER_RESOURCE = 10_000
# Ray (2.60) places three workers of 0.3334 CPUs on one CPU, but not two of 0.5001.
_TOLERATED_UNITS = 2
_UNBOUNDED = 10**9
_INTERNAL_RESOURCES = re.compile(r"node:|object_store_memory$|.*_group_|bundle_group")


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """A live node: its total and available resources and its labels. `memory` is in bytes."""

    node_id: str
    hostname: str
    total: Mapping[str, float]
    available: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def check_group_fits(nodes: Sequence[NodeResources], scaling: ScalingConfig) -> None:
    """Reject a worker group that these nodes can never hold, even when they are idle.

    Args:
        nodes: Live nodes.
        scaling: Resources and minimum number of the workers.

    Raises:
        InsufficientResourcesError: The group can never be placed. The message contains the
            requested values and the most that the cluster can provide.
    """
    num_workers, strategy = scaling.min_workers, scaling.placement_strategy
    if not num_workers:
        return
    if not nodes:
        raise InsufficientResourcesError("the Ray cluster has no live node")
    bundle = scaling.bundle
    _check_names(nodes, bundle)
    labels = scaling.label_selectors[:num_workers]
    requested = Counter(tuple(sorted(selector.items())) for selector in labels)
    selectors = requested or Counter({(): num_workers})
    for items, count in selectors.items():
        selector = dict(items)
        matching = _filter_nodes(nodes, [selector])
        _check_selector(nodes, matching, selector)
        _check_one_worker(matching, bundle, selector)
        _check_group(matching, bundle, strategy, count, selector)
    if len(selectors) > 1:
        every_selector = strategy == "STRICT_PACK"  # then one node must satisfy all of them
        matching = _filter_nodes(nodes, [*map(dict, selectors)], every_selector=every_selector)
        _check_group(matching, bundle, strategy, num_workers)


def check_cpus_for_datasets(
    nodes: Sequence[NodeResources], scaling: ScalingConfig, streamed_datasets: Sequence[str]
) -> None:
    """Reject workers that take the CPUs with which their datasets are computed.

    Ray Data reads and transforms in tasks of one CPU each, outside the placement group of the
    workers. If the workers hold every CPU, the tasks wait for the workers to end, and the workers
    wait for their data.

    Args:
        nodes: Live nodes.
        scaling: Resources and maximum number of the workers.
        streamed_datasets: Names of the datasets that are computed while they are read.

    Raises:
        InsufficientResourcesError: Less than one CPU remains, even if everything else is free.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    remaining = total - scaling.total_resources.get("CPU", 0)
    if remaining < 1:
        workers = format_count(scaling.max_workers, "worker")
        usage = f"{workers} of {format_resources(scaling.bundle)} leave CPU={max(remaining, 0):g}"
        raise _make_no_cpu_error(usage, total, streamed_datasets, "Lower")


def check_unreserved_cpus(
    nodes: Sequence[NodeResources], reserved: float, streamed_datasets: Sequence[str]
) -> None:
    """Reject workers if the placement groups of all runs leave no CPU for their datasets.

    Each run may leave a CPU, but all of them together none. Then their workers wait for data, and
    the data waits for a CPU that is never released.

    Args:
        nodes: Live nodes.
        reserved: CPUs in placement groups, including the groups of these workers.
        streamed_datasets: Names of the datasets that are computed while they are read.

    Raises:
        InsufficientResourcesError: Less than one CPU is outside placement groups.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    if total - reserved < 1:
        groups = "placement groups of these workers and of other runs or trials"
        usage = f"{groups} hold CPU={reserved:g}"
        option = "tune.TuneConfig(max_concurrent_trials=...)"
        remedy = f"Run fewer trials or runs at a time ({option}), lower"
        raise _make_no_cpu_error(usage, total, streamed_datasets, remedy)


def _make_no_cpu_error(
    usage: str, total: float, streamed_datasets: Sequence[str], remedy: str
) -> InsufficientResourcesError:
    names = ", ".join(f"datasets[{name!r}]" for name in streamed_datasets)
    return InsufficientResourcesError(
        f"{usage} of the cluster's CPU={total:g}, but Ray Data needs at least one CPU to execute "
        f"{names}. The workers would wait for their data forever. {remedy} "
        "ScalingConfig.num_workers or resources_per_worker, add CPUs, or materialize datasets "
        "that fit into memory before fit()"
    )


def describe_missing_resources(
    nodes: Sequence[NodeResources], bundle: Mapping[str, float], num_workers: int
) -> str:
    """Return one line that describes which resources are missing now.

    For example "waiting for CPU=4 (2 workers of CPU=2); free are CPU=3 on 2 nodes, room for 1
    worker".
    """
    required = {name: amount * num_workers for name, amount in bundle.items()}
    free = {name: sum(node.available.get(name, 0) for node in nodes) for name in bundle}
    room = min(sum(count_fitting_bundles(node.available, bundle) for node in nodes), num_workers)
    suffix = ": Ray is placing or starting them" if room == num_workers else ""
    return (
        f"waiting for {format_resources(required)} ({format_count(num_workers, 'worker')} of "
        f"{format_resources(bundle)}); free are {format_resources(free)} on "
        f"{format_count(len(nodes), 'node')}, room for {format_count(room, 'worker')}{suffix}"
    )


def describe_starting_workers(num_ready: int, num_workers: int) -> str:
    """Return one line about workers that are placed but not ready yet."""
    return f"starting {format_count(num_workers, 'worker')}, {num_ready} of them are ready"


def matches_selector(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether the labels of a node satisfy a Ray label selector.

    A selector's value is "x", "!x", "in(x, y)" or "!in(x, y)"; a node without the label satisfies
    the negative forms (https://docs.ray.io/en/latest/ray-core/scheduling/labels.html).
    """
    for key, condition in selector.items():
        positive = condition.removeprefix("!")
        listed = re.fullmatch(r"in\((.*)\)", positive)
        values = [v.strip() for v in listed[1].split(",")] if listed else [positive]
        if (labels.get(key) in values) != (positive == condition):
            return False
    return True


def _check_names(nodes: Sequence[NodeResources], bundle: Mapping[str, float]) -> None:
    known = {name for node in nodes for name, amount in node.total.items() if amount}
    for name in bundle:
        if name not in known:
            # Resources that Ray adds for each node and placement group are not listed.
            listed = ", ".join(
                sorted(name for name in known if not _INTERNAL_RESOURCES.match(name))
            )
            raise InsufficientResourcesError(
                f"one worker needs {format_resources(bundle)}, but no node of this cluster has the "
                f"resource {name!r}. Available resources: {listed}"
            )


def _check_selector(
    nodes: Sequence[NodeResources], matching: Sequence[NodeResources], selector: Mapping[str, str]
) -> None:
    if matching:
        return
    existing = [
        f"{key}: "
        + (", ".join(sorted({n.labels[key] for n in nodes if key in n.labels})) or "none")
        for key in selector
    ]
    raise InsufficientResourcesError(
        f"ScalingConfig.label_selector={dict(selector)!r} matches none of the cluster's "
        f"{format_count(len(nodes), 'node')}. Existing values: {'; '.join(existing)}"
    )


def _check_one_worker(
    nodes: Sequence[NodeResources], bundle: Mapping[str, float], selector: Mapping[str, str]
) -> None:
    if any(count_fitting_bundles(node.total, bundle) for node in nodes):
        return
    # Report the node with the largest fraction of its scarcest resource.
    largest = max(
        nodes, key=lambda node: min(node.total.get(name, 0) / bundle[name] for name in bundle)
    )
    has = {name: largest.total.get(name, 0) for name in bundle}
    matching = " that match ScalingConfig.label_selector" if selector else ""
    raise InsufficientResourcesError(
        f"one worker needs {format_resources(bundle)}, but the largest node (host "
        f"{largest.hostname}, of {format_count(len(nodes), 'node')}{matching}) has "
        f"{format_resources(has)}. Lower ScalingConfig.resources_per_worker, or add a larger node"
    )


def _check_group(
    nodes: Sequence[NodeResources],
    bundle: Mapping[str, float],
    strategy: str,
    num_workers: int,
    selector: Mapping[str, str] | None = None,
) -> None:
    room = [count_fitting_bundles(node.total, bundle) for node in nodes]
    if strategy == "STRICT_PACK":
        most, scope = max(room, default=0), "on one node"
    elif strategy == "STRICT_SPREAD":
        most, scope = sum(1 for capacity in room if capacity), "with one worker per node"
    else:
        most, scope = sum(room), "on the whole cluster"
    if num_workers <= most:
        return
    request = f"{format_count(num_workers, 'worker')} of {format_resources(bundle)}"
    if selector:
        request += f" with label_selector={dict(selector)!r}"
    per_host = ", ".join(
        f"{node.hostname}: {n}" for node, n in list(zip(nodes, room, strict=True))[:8]
    )
    raise InsufficientResourcesError(
        f"{request} cannot fit with placement_strategy={strategy!r}: at most {most} fit {scope}, "
        f"even if the cluster is idle (workers per host: {per_host or 'none'}"
        f"{', ...' if len(nodes) > 8 else ''}). "
        "Lower ScalingConfig.num_workers or resources_per_worker, or add nodes"
    )


def _filter_nodes(
    nodes: Sequence[NodeResources],
    selectors: Iterable[Mapping[str, str]],
    *,
    every_selector: bool = False,
) -> list[NodeResources]:
    decide = all if every_selector else any
    required = list(selectors)
    return [node for node in nodes if decide(matches_selector(node.labels, s) for s in required)]


def count_fitting_bundles(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many bundles the resources hold. A fraction of a GPU is always on one GPU."""
    most = _UNBOUNDED
    for name, amount in bundle.items():
        need, has = (
            round(amount * _UNITS_PER_RESOURCE),
            round(resources.get(name, 0) * _UNITS_PER_RESOURCE),
        )
        if not need:
            continue
        # Ray places a fraction on one GPU, so the remainders of two GPUs do not add up.
        if name == "GPU" and need < _UNITS_PER_RESOURCE:
            most = min(most, has // _UNITS_PER_RESOURCE * (_UNITS_PER_RESOURCE // need))
        elif need < _UNITS_PER_RESOURCE // 2:
            most = min(most, (has + _TOLERATED_UNITS) // need)
        else:
            most = min(most, has // need)
    return most


def format_resources(resources: Mapping[str, float]) -> str:
    """Format resources as in "CPU=4, memory=16.0 GiB"."""
    formatted = (
        f"{name}={amount / 2**30:.1f} GiB" if name == "memory" else f"{name}={amount:g}"
        for name, amount in resources.items()
    )
    return ", ".join(formatted) or "no resources"
