"""Resources and labels of Ray nodes: match selectors, and count the bundles that fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from drawbar._base.wording import format_count

NODE_ID_LABEL = "ray.io/node-id"
"""Ray's node label for the ID of the node."""

# Ray counts resources in ten-thousandths. Integers prevent 0.3 // 0.1 from being 2.
_UNITS_PER_RESOURCE = 10_000
# Ray (2.60) places three workers of 0.3334 CPUs on one CPU, but not two of 0.5001.
_TOLERATED_UNITS = 2
_UNBOUNDED = 10**9


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """A live node: its total and available resources and its labels. `memory` is in bytes."""

    node_id: str
    hostname: str
    total: Mapping[str, float]
    available: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def release(self, bundle: Mapping[str, float], count: int) -> NodeResources:
        """Return the node with as many free bundles more, and nothing but free resources."""
        free = {name: self.available.get(name, 0.0) + count * bundle[name] for name in bundle}
        return replace(self, total={**self.available, **free})


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


def exclude_node(
    selectors: Sequence[Mapping[str, str]], node_id: str
) -> Sequence[Mapping[str, str]]:
    """Add the condition to label selectors that the node is another one.

    Returns:
        The selectors; without a change if one of them already selects nodes by their ID.
    """
    conditions = {selector.get(NODE_ID_LABEL, "!in()") for selector in selectors}
    if not all(condition.startswith("!in(") for condition in conditions):
        return selectors
    ids = {node for condition in conditions for node in condition[4:-1].split(",") if node}
    condition = f"!in({','.join(sorted({*ids, node_id}))})"
    return [{**selector, NODE_ID_LABEL: condition} for selector in selectors]


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
