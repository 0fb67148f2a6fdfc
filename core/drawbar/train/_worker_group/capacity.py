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

from drawbar._base.node_resources import (
    NodeResources,
    count_fitting_bundles,
    format_resources,
    matches_selector,
)
from drawbar._base.wording import format_count
from drawbar._process.errors import InsufficientResourcesError
from drawbar.train._config.scaling_config import ScalingConfig

_INTERNAL_RESOURCES = re.compile(r"node:|object_store_memory$|.*_group_|bundle_group")


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


def has_room(
    nodes: Sequence[NodeResources], scaling: ScalingConfig, used: Mapping[str, int]
) -> bool:
    """Return whether a worker group fits now if its workers are started again.

    Args:
        nodes: Live nodes.
        scaling: Resources, labels, and minimum number of the workers.
        used: Number of running workers of the group on each node, by ID.
    """
    free = [node.release(scaling.bundle, used.get(node.node_id, 0)) for node in nodes]
    try:
        check_group_fits(free, scaling)
    except InsufficientResourcesError:
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
