"""Can the cluster ever hold this group of workers, and what is it short of now?

Ray leaves a placement group that can never be placed pending without end. So before one is asked
for, `check_fits` looks at what the nodes have when they are empty and refuses what none of them can
hold. It never refuses what could be placed; where the cluster can grow, it refuses nothing. The
decisions are pure functions of `NodeShape`s; only `node_shapes` and `autoscaling` talk to Ray.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drawbar.train._errors import InsufficientResourcesError
from drawbar.train._scaling import ScalingConfig

# Ray counts resources in ten-thousandths; whole numbers keep 0.3 / 0.1 from being 2.
_UNITS = 10_000
_UNBOUNDED = 10**9
_INTERNAL = re.compile(r"node:|object_store_memory$|.*_group_|bundle_group")
_READ_ONLY_NODE_TYPE = re.compile(r"node_[0-9a-f]{56}")


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """One live node: what it has in all, what is free, and its labels. `memory` is in bytes."""

    node_id: str
    hostname: str
    total: Mapping[str, float]
    available: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def check_cluster(scaling: ScalingConfig) -> None:
    """Refuse workers that the connected Ray cluster can never hold; see `check_fits`."""
    check_fits(
        node_shapes(),
        [scaling.bundle] * scaling.min_workers,
        scaling.placement_strategy,
        scaling.selectors[: scaling.min_workers],
        autoscaling=autoscaling(),
    )


def check_data(scaling: ScalingConfig, lazy: Sequence[str]) -> None:
    """Refuse workers that starve their datasets on the connected cluster; see `check_cpus_left`."""
    if lazy and scaling.max_workers:
        bundles = [scaling.bundle] * scaling.max_workers
        check_cpus_left(node_shapes(), bundles, lazy, autoscaling=autoscaling())


def check_validation(resources: Mapping[str, float]) -> None:
    """Refuse validations that no node of the connected cluster can ever run."""
    nodes = node_shapes()
    if autoscaling() or any(_capacity(node.total, resources) for node in nodes):
        return
    raise InsufficientResourcesError(
        f"one validation needs {_show(resources)}, and no node of this cluster has that, even if "
        "all is free. Ask for less in ValidationConfig.ray_remote_kwargs, or add a larger node"
    )


def check_fits(
    nodes: Sequence[NodeShape],
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    labels: Sequence[Mapping[str, str]] = (),
    *,
    autoscaling: bool,
) -> None:
    """Refuse a group of workers that the cluster can never hold, even when it is empty.

    Args:
        nodes: The live nodes.
        bundles: The resources of each worker; the bundles of a run are all equal.
        strategy: Ray's placement strategy, such as "PACK".
        labels: One label selector per worker, or none at all.
        autoscaling: The cluster can add nodes by itself: nothing is refused.

    Raises:
        InsufficientResourcesError: It can never be placed. The message has the values that were
            asked for and the most that the cluster can give.
    """
    if autoscaling or not bundles:
        return
    if not nodes:
        raise InsufficientResourcesError("the Ray cluster has no live node")
    bundle = {name: amount for name, amount in bundles[0].items() if amount}
    _check_names(nodes, bundle)
    selectors = list(labels) or [{}] * len(bundles)
    distinct = {tuple(sorted(selector.items())): selector for selector in selectors}
    for selector in distinct.values():
        matching = _matching(nodes, [selector])
        _check_selector(nodes, matching, selector)
        _check_one_worker(matching, bundle)
        _check_group(matching, bundle, strategy, selectors.count(selector), selector)
    if len(distinct) > 1:
        every_selector = strategy == "STRICT_PACK"  # one node must then satisfy all of them
        matching = _matching(nodes, distinct.values(), every_selector=every_selector)
        _check_group(matching, bundle, strategy, len(bundles))


def check_cpus_left(
    nodes: Sequence[NodeShape],
    bundles: Sequence[Mapping[str, float]],
    lazy: Sequence[str],
    *,
    autoscaling: bool,
) -> None:
    """Refuse workers that take the CPUs which their datasets are to be computed with.

    Ray Data reads and transforms in tasks of one CPU each, outside the workers' placement group. If
    the workers hold every CPU, the tasks wait for the workers to end, and they for their data.

    Args:
        nodes: The live nodes.
        bundles: The resources of each worker.
        lazy: Names of the datasets that are computed as they are read.
        autoscaling: The cluster can add nodes by itself: nothing is refused.

    Raises:
        InsufficientResourcesError: Less than one CPU is left, even if all else is free.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    left = total - sum(bundle.get("CPU", 0) for bundle in bundles)
    if autoscaling or left >= 1:
        return
    names = ", ".join(f"datasets[{name!r}]" for name in lazy)
    raise InsufficientResourcesError(
        f"{_count(len(bundles), 'worker')} of {_show(bundles[0])} leave CPU={max(left, 0):g} of "
        f"the cluster's CPU={total:g}, but Ray Data needs a CPU of its own to compute {names}: "
        "workers and data would wait for each other for ever. Leave at least one CPU: lower "
        "ScalingConfig.num_workers or resources_per_worker, or add CPUs. A dataset that fits into "
        "memory needs none if it is materialized before fit()"
    )


def missing(nodes: Sequence[NodeShape], bundles: Sequence[Mapping[str, float]]) -> str:
    """Say in one line what is lacking now.

    Such as "waiting for CPU=4 (2 workers of CPU=2); free are CPU=3 on 2 nodes, room for 1 worker".
    """
    bundle = bundles[0] if bundles else {}
    wanted = {name: amount * len(bundles) for name, amount in bundle.items()}
    free = {name: sum(node.available.get(name, 0) for node in nodes) for name in bundle}
    room = min(sum(_capacity(node.available, bundle) for node in nodes), len(bundles))
    enough = ": Ray is placing or starting them" if room == len(bundles) else ""
    return (
        f"waiting for {_show(wanted)} ({_count(len(bundles), 'worker')} of {_show(bundle)}); "
        f"free are {_show(free)} on {_count(len(nodes), 'node')}, room for {_count(room, 'worker')}"
        f"{enough}"
    )


def starting(up: int, count: int) -> str:
    """Say in one line that workers which have their place are not up yet."""
    return f"the processes of {_count(count, 'worker')} are starting, {up} of them are up"


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
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


def node_shapes() -> list[NodeShape]:
    """Ask the connected Ray for its live nodes. Ray Client cannot: it does not see what is free."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        NodeShape(
            node_id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
            labels=node.get("Labels", {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def draining_nodes() -> dict[str, int]:
    """Ask the connected Ray which nodes are to be taken away: id to deadline.

    The deadline is in milliseconds since the epoch, 0 if none is known. There is no public call.
    """
    from ray._private.state import state

    draining: dict[str, int] = state.get_draining_nodes()
    return draining


def node_is_safe(node_id: str) -> bool:
    """Whether a node is alive and is not to be taken away.

    Ray takes some 15 s to count a node as dead whose raylet vanished; so the raylet is called too.
    """
    import ray

    nodes = {node["NodeID"]: node for node in ray.nodes()}  # type: ignore[no-untyped-call]
    node = nodes.get(node_id)
    if node is None or not node["Alive"] or node_id in draining_nodes():
        return False
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def autoscaling() -> bool:
    """Whether the connected Ray cluster has an autoscaler that could add nodes.

    There is no public call for this. It is true if the cluster's configuration has a group of nodes
    that may grow; if autoscaler v2 runs and Ray nodes carry the node group that it gave them; or if
    the status of autoscaler v1 names node types, where a cluster without one shows a `node_<id>`
    for each node.
    """
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get

    config = state.get_cluster_config()
    if config is not None and any(
        group.max_count == -1 or group.max_count > group.min_count
        for group in config.node_group_configs
    ):
        return True
    if _internal_kv_get(b"__autoscaler_v2_enabled", namespace=b"__autoscaler") == b"1":
        return any("ray.io/node-group" in node.labels for node in node_shapes())
    return names_node_types(_internal_kv_get(b"__autoscaling_status") or b"{}")


def names_node_types(status: bytes) -> bool:
    """Whether this status of autoscaler v1, JSON, names types of nodes that it can launch."""
    node_types = json.loads(status).get("autoscaler_report", {}).get("active_nodes", {})
    return any(not _READ_ONLY_NODE_TYPE.fullmatch(node_type) for node_type in node_types)


def _check_names(nodes: Sequence[NodeShape], bundle: Mapping[str, float]) -> None:
    known = {name for node in nodes for name, amount in node.total.items() if amount}
    for name in bundle:
        if name not in known:
            shown = ", ".join(sorted(known for known in known if not _INTERNAL.match(known)))
            raise InsufficientResourcesError(
                f"one worker needs {_show(bundle)}, and no node of this cluster has the resource "
                f"{name!r}; its resources are: {shown}"
            )


def _check_selector(
    nodes: Sequence[NodeShape], matching: Sequence[NodeShape], selector: Mapping[str, str]
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
        f"{_count(len(nodes), 'node')}; the values that exist are {'; '.join(found)}"
    )


def _check_one_worker(nodes: Sequence[NodeShape], bundle: Mapping[str, float]) -> None:
    if any(_capacity(node.total, bundle) for node in nodes):
        return
    largest = max(
        nodes, key=lambda node: min(node.total.get(name, 0) / bundle[name] for name in bundle)
    )
    has = {name: largest.total.get(name, 0) for name in bundle}
    raise InsufficientResourcesError(
        f"one worker needs {_show(bundle)}; the largest node (host {largest.hostname}, "
        f"of {_count(len(nodes), 'suitable node')}) has {_show(has)}. Ask for less in "
        "ScalingConfig.resources_per_worker, or add a larger node"
    )


def _check_group(
    nodes: Sequence[NodeShape],
    bundle: Mapping[str, float],
    strategy: str,
    workers: int,
    selector: Mapping[str, str] | None = None,
) -> None:
    room = [_capacity(node.total, bundle) for node in nodes]
    if strategy == "STRICT_PACK":
        most, where = max(room, default=0), "on one node"
    elif strategy == "STRICT_SPREAD":
        most, where = sum(1 for capacity in room if capacity), "with a node for each"
    else:
        most, where = sum(room), "on the whole cluster"
    if workers <= most:
        return
    asked = f"{_count(workers, 'worker')} of {_show(bundle)}"
    if selector:
        asked += f" with label_selector={dict(selector)!r}"
    each = ", ".join(f"{node.hostname}: {n}" for node, n in list(zip(nodes, room, strict=True))[:8])
    raise InsufficientResourcesError(
        f"{asked} never fit with placement_strategy={strategy!r}: at most {most} do {where}, even "
        f"if all is free (workers per host: {each or 'none'}{', ...' if len(nodes) > 8 else ''}). "
        "Lower ScalingConfig.num_workers or resources_per_worker, or add nodes"
    )


def _matching(
    nodes: Sequence[NodeShape],
    selectors: Iterable[Mapping[str, str]],
    *,
    every_selector: bool = False,
) -> list[NodeShape]:
    decide = all if every_selector else any
    wanted = list(selectors)
    return [node for node in nodes if decide(matches(node.labels, s) for s in wanted)]


def _capacity(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many such bundles the resources hold. A fraction of a GPU never spans two of them."""
    most = _UNBOUNDED
    for name, amount in bundle.items():
        need, has = round(amount * _UNITS), round(resources.get(name, 0) * _UNITS)
        if not need:
            continue
        if name == "GPU" and need < _UNITS:
            most = min(most, has // _UNITS * (_UNITS // need))
        else:
            most = min(most, has // need)
    return most


def _show(resources: Mapping[str, float]) -> str:
    """Write resources as "CPU=4, memory=16.0 GiB"."""
    shown = (
        f"{name}={amount / 2**30:.1f} GiB" if name == "memory" else f"{name}={amount:g}"
        for name, amount in resources.items()
    )
    return ", ".join(shown) or "no resources"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
