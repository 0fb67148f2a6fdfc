"""Can the cluster ever hold this group of workers, and what is it short of now?

Ray leaves a placement group that can never be placed pending without end, and tells nobody
(ray-project/ray#18835). So before one is asked for, `check_group_fits` looks at what the nodes
have when
they are empty and refuses what none of them can hold. It never refuses what could be placed; where
the cluster can grow, it refuses nothing. Pure: `cluster.py` asks Ray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drawbar.train._errors import InsufficientResourcesError

# Ray counts resources in ten-thousandths; whole numbers keep 0.3 / 0.1 from being 2.
_UNITS_PER_RESOURCE = 10_000
_UNBOUNDED = 10**9
_INTERNAL_RESOURCES = re.compile(r"node:|object_store_memory$|.*_group_|bundle_group")


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """One live node: what it has in all, what is free, and its labels. `memory` is in bytes."""

    node_id: str
    hostname: str
    total: Mapping[str, float]
    available: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def check_group_fits(
    nodes: Sequence[NodeResources],
    bundle: Mapping[str, float],
    num_workers: int,
    strategy: str,
    labels: Sequence[Mapping[str, str]] = (),
    *,
    autoscaling: bool,
) -> None:
    """Refuse a group of workers that the cluster can never hold, even when it is empty.

    Args:
        nodes: The live nodes.
        bundle: The resources of each worker.
        workers: How many there are to be.
        strategy: Ray's placement strategy, such as "PACK".
        labels: One label selector per worker, or none at all.
        autoscaling: The cluster can add nodes by itself: nothing is refused.

    Raises:
        InsufficientResourcesError: It can never be placed. The message has the values that were
            asked for and the most that the cluster can give.
    """
    # What the nodes that can still come will hold, Ray does not tell.
    if autoscaling or not num_workers:
        return
    if not nodes:
        raise InsufficientResourcesError("the Ray cluster has no live node")
    bundle = {name: amount for name, amount in bundle.items() if amount}
    _check_names(nodes, bundle)
    asked = Counter(tuple(sorted(each.items())) for each in labels)
    selectors = asked or Counter({(): num_workers})
    for items, count in selectors.items():
        selector = dict(items)
        matching = _filter_nodes(nodes, [selector])
        _check_selector(nodes, matching, selector)
        _check_one_worker(matching, bundle)
        _check_group(matching, bundle, strategy, count, selector)
    if len(selectors) > 1:
        every_selector = strategy == "STRICT_PACK"  # one node must then satisfy all of them
        matching = _filter_nodes(nodes, [*map(dict, selectors)], every_selector=every_selector)
        _check_group(matching, bundle, strategy, num_workers)


def check_cpus_for_datasets(
    nodes: Sequence[NodeResources],
    bundle: Mapping[str, float],
    num_workers: int,
    lazy: Sequence[str],
    *,
    autoscaling: bool,
) -> None:
    """Refuse workers that take the CPUs which their datasets are to be computed with.

    Ray Data reads and transforms in tasks of one CPU each, outside the workers' placement group. If
    the workers hold every CPU, the tasks wait for the workers to end, and they for their data.

    Args:
        nodes: The live nodes.
        bundle: The resources of each worker.
        workers: How many there are to be.
        lazy: Names of the datasets that are computed as they are read.
        autoscaling: The cluster can add nodes by itself: nothing is refused.

    Raises:
        InsufficientResourcesError: Less than one CPU is left, even if all else is free.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    left = total - num_workers * bundle.get("CPU", 0)
    if autoscaling or left >= 1:
        return
    names = ", ".join(f"datasets[{name!r}]" for name in lazy)
    raise InsufficientResourcesError(
        f"{_format_count(num_workers, 'worker')} of {format_resources(bundle)} leave "
        f"CPU={max(left, 0):g} of "
        f"the cluster's CPU={total:g}, but Ray Data needs a CPU of its own to compute {names}: "
        "workers and data would wait for each other for ever. Leave at least one CPU: lower "
        "ScalingConfig.num_workers or resources_per_worker, or add CPUs. A dataset that fits into "
        "memory needs none if it is materialized before fit()"
    )


def check_unreserved_cpus(
    nodes: Sequence[NodeResources], reserved: float, lazy: Sequence[str], *, autoscaling: bool
) -> None:
    """Refuse workers beside whom placement groups of others leave no CPU for their datasets.

    Each run may leave a CPU of the cluster, and all of them together none: then their workers wait
    for data, and the data for a CPU that nobody gives back.

    Args:
        nodes: The live nodes.
        reserved: The CPUs that placement groups hold, those of these workers included.
        lazy: Names of the datasets that are computed as they are read.
        autoscaling: The cluster can add nodes by itself: nothing is refused.

    Raises:
        InsufficientResourcesError: Less than one CPU is outside them.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    if autoscaling or total - reserved >= 1:
        return
    names = ", ".join(f"datasets[{name!r}]" for name in lazy)
    raise InsufficientResourcesError(
        f"placement groups hold CPU={reserved:g} of the cluster's CPU={total:g}, those of these "
        f"workers and of other runs or trials, but Ray Data needs a CPU of its own to compute "
        f"{names}: workers and data would wait for each other for ever. Leave at least one CPU: "
        "run fewer at a time (a sweep by tune.TuneConfig(max_concurrent_trials=...)), lower "
        "ScalingConfig.num_workers or resources_per_worker, or add CPUs. A dataset that fits into "
        "memory needs none if it is materialized before fit()"
    )


def describe_missing_resources(
    nodes: Sequence[NodeResources], bundle: Mapping[str, float], num_workers: int
) -> str:
    """Say in one line what is lacking now.

    Such as "waiting for CPU=4 (2 workers of CPU=2); free are CPU=3 on 2 nodes, room for 1 worker".
    """
    wanted = {name: amount * num_workers for name, amount in bundle.items()}
    free = {name: sum(node.available.get(name, 0) for node in nodes) for name in bundle}
    room = min(sum(count_fitting_bundles(node.available, bundle) for node in nodes), num_workers)
    enough = ": Ray is placing or starting them" if room == num_workers else ""
    return (
        f"waiting for {format_resources(wanted)} ({_format_count(num_workers, 'worker')} of "
        f"{format_resources(bundle)}); "
        f"free are {format_resources(free)} on {_format_count(len(nodes), 'node')}, room for "
        f"{_format_count(room, 'worker')}"
        f"{enough}"
    )


def describe_starting_workers(up: int, count: int) -> str:
    """Say in one line that workers which have their place are not up yet."""
    return f"the processes of {_format_count(count, 'worker')} are starting, {up} of them are up"


def matches_selector(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels satisfy a Ray label selector.

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
            # Ray has resources of its own for each node and placement group, which nobody asks for.
            listed = ", ".join(
                sorted(known for known in known if not _INTERNAL_RESOURCES.match(known))
            )
            raise InsufficientResourcesError(
                f"one worker needs {format_resources(bundle)}, and no node of this cluster has "
                "the resource "
                f"{name!r}; its resources are: {listed}"
            )


def _check_selector(
    nodes: Sequence[NodeResources], matching: Sequence[NodeResources], selector: Mapping[str, str]
) -> None:
    if matching:
        return
    found = [
        f"{key}: "
        + (", ".join(sorted({n.labels[key] for n in nodes if key in n.labels})) or "none")
        for key in selector
    ]
    raise InsufficientResourcesError(
        f"ScalingConfig.label_selector={dict(selector)!r} matches none of the cluster's "
        f"{_format_count(len(nodes), 'node')}; the values that exist are {'; '.join(found)}"
    )


def _check_one_worker(nodes: Sequence[NodeResources], bundle: Mapping[str, float]) -> None:
    if any(count_fitting_bundles(node.total, bundle) for node in nodes):
        return
    # The one that comes nearest by what it has least of, which is what to ask less of.
    largest = max(
        nodes, key=lambda node: min(node.total.get(name, 0) / bundle[name] for name in bundle)
    )
    has = {name: largest.total.get(name, 0) for name in bundle}
    raise InsufficientResourcesError(
        f"one worker needs {format_resources(bundle)}; the largest node (host {largest.hostname}, "
        f"of {_format_count(len(nodes), 'suitable node')}) has {format_resources(has)}. Ask for "
        "less in "
        "ScalingConfig.resources_per_worker, or add a larger node"
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
        most, where = max(room, default=0), "on one node"
    elif strategy == "STRICT_SPREAD":
        most, where = sum(1 for capacity in room if capacity), "with a node for each"
    else:
        most, where = sum(room), "on the whole cluster"
    if num_workers <= most:
        return
    asked = f"{_format_count(num_workers, 'worker')} of {format_resources(bundle)}"
    if selector:
        asked += f" with label_selector={dict(selector)!r}"
    each = ", ".join(f"{node.hostname}: {n}" for node, n in list(zip(nodes, room, strict=True))[:8])
    raise InsufficientResourcesError(
        f"{asked} never fit with placement_strategy={strategy!r}: at most {most} do {where}, even "
        f"if all is free (workers per host: {each or 'none'}{', ...' if len(nodes) > 8 else ''}). "
        "Lower ScalingConfig.num_workers or resources_per_worker, or add nodes"
    )


def _filter_nodes(
    nodes: Sequence[NodeResources],
    selectors: Iterable[Mapping[str, str]],
    *,
    every_selector: bool = False,
) -> list[NodeResources]:
    decide = all if every_selector else any
    wanted = list(selectors)
    return [node for node in nodes if decide(matches_selector(node.labels, s) for s in wanted)]


def count_fitting_bundles(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many such bundles the resources hold. A fraction of a GPU never spans two of them."""
    most = _UNBOUNDED
    for name, amount in bundle.items():
        need, has = (
            round(amount * _UNITS_PER_RESOURCE),
            round(resources.get(name, 0) * _UNITS_PER_RESOURCE),
        )
        if not need:
            continue
        # Ray gives a fraction on one GPU: what is left of two of them does not add up.
        if name == "GPU" and need < _UNITS_PER_RESOURCE:
            most = min(most, has // _UNITS_PER_RESOURCE * (_UNITS_PER_RESOURCE // need))
        else:
            most = min(most, has // need)
    return most


def format_resources(resources: Mapping[str, float]) -> str:
    """Write resources as "CPU=4, memory=16.0 GiB"."""
    shown = (
        f"{name}={amount / 2**30:.1f} GiB" if name == "memory" else f"{name}={amount:g}"
        for name, amount in resources.items()
    )
    return ", ".join(shown) or "no resources"


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
