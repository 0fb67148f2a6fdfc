"""Placement group for workers: a new one, or the one around this process.

A process in a placement group that captures child tasks, such as a trial of Ray Tune, already has
the resources of its run. If it requested them again outside of the group, trials that fill the
cluster would wait for each other forever.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Self

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drawbar._base.node_resources import count_fitting_bundles
from drawbar._base.ray_compat import is_worker_process_dead
from drawbar._process.threads import DaemonThreadPool
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._worker_group.cluster import get_ray_worker_id

_RELEASE_TIMEOUT_S = 1.0
_GROUP_NAME_PREFIX = "drawbar-"  # followed by the worker ID of the host and a unique suffix


class Placement:
    """Bundles of a placement group for the workers of a run, by slot."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[int], *, is_owned: bool) -> None:
        self._group = group
        self._bundles = bundles
        self._is_owned = is_owned

    @classmethod
    def create(cls, scaling: ScalingConfig) -> Self:
        """Request a new placement group from Ray."""
        count = scaling.max_workers
        if ray.get_runtime_context().get_actor_id() is not None:
            # The previous trial may have left groups: Ray Tune runs trials one after the other in
            # an actor.
            remove_orphaned_groups()
        group = placement_group(
            # Ray rejects a bundle without resources.
            [scaling.bundle or {"CPU": 0.001}] * count,
            strategy=scaling.placement_strategy,
            bundle_label_selector=scaling.label_selectors or None,
            name=f"{_GROUP_NAME_PREFIX}{get_ray_worker_id()}-{uuid.uuid4().hex}",
        )
        return cls(group, range(count), is_owned=True)

    @classmethod
    def from_current_group(cls, scaling: ScalingConfig) -> Self | None:
        """Return the placement group around this process, if it can hold the workers.

        None if the group does not capture child tasks. Must be called in the thread that Ray uses
        for the task or actor: other threads do not know the group.
        """
        if not ray.is_initialized() or (group := get_current_placement_group()) is None:
            return None
        context = ray.get_runtime_context()
        if not context.should_capture_child_tasks_in_placement_group:
            return None  # such as the group of a run, whose other bundles belong to other ranks
        used = context.get_assigned_resources()  # type: ignore[no-untyped-call]  # it has no types
        count = scaling.max_workers
        bundles = find_free_bundles(group.bundle_specs, used, scaling.bundle, count)
        # All or none: with some workers outside, trials could wait for each other's resources.
        return cls(group, bundles, is_owned=False) if len(bundles) == count else None

    @property
    def is_ready(self) -> bool:
        """True if all bundles are placed on nodes."""
        table: dict[str, object] = placement_group_table(self._group)
        return bool(table["state"] == "CREATED")

    def get_scheduling_strategy(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Return the placement of the worker in a slot. Its child tasks are placed anywhere."""
        # Otherwise child tasks, such as tasks of Ray Data, would have to fit into the bundle that
        # the worker fills, and would wait forever (ray-project/ray#17524).
        return PlacementGroupSchedulingStrategy(
            self._group, self._bundles[slot], placement_group_capture_child_tasks=False
        )

    def release(self) -> None:
        """Release the resources, unless the placement group belongs to another owner.

        If Ray does not reply, they are released when this process ends.
        """
        if self._is_owned:
            # Ray would wait a minute for its control service and then end this process.
            thread = DaemonThreadPool(1, "drawbar-release")
            removal = thread.submit(remove_placement_group, self._group)
            thread.shutdown(wait=False)
            with contextlib.suppress(TimeoutError):
                removal.result(_RELEASE_TIMEOUT_S)


def remove_orphaned_groups() -> None:
    """Remove the placement groups of runs whose host process died.

    Ray keeps the groups of an actor or task until its job ends. Groups of a trial that Ray Tune has
    stopped therefore block the next trial.
    """
    for entry in placement_group_table().values():
        if not entry["name"].startswith(_GROUP_NAME_PREFIX) or entry["state"] == "REMOVED":
            continue
        if is_worker_process_dead(entry["name"].removeprefix(_GROUP_NAME_PREFIX).partition("-")[0]):
            group = ray.PlacementGroupID.from_hex(entry["placement_group_id"])
            remove_placement_group(PlacementGroup(group))


def find_free_bundles(
    bundles: Sequence[Mapping[str, float]],
    used: Mapping[str, float],
    required: Mapping[str, float],
    count: int,
) -> list[int]:
    """Return the index of a free bundle for each worker.

    Args:
        bundles: Resources of the bundles of the group.
        used: Resources that this process uses in the first bundle, in which Ray Tune places it.
        required: Resources of one worker.
        count: Number of workers.

    Returns:
        At most `count` bundle indices; an index occurs once for each worker in the bundle.
    """
    # Copies: Ray returns the same objects to other callers.
    free = [dict(bundle) for bundle in bundles]
    for name, amount in used.items():
        free[0][name] = free[0].get(name, 0) - amount
    room = [min(count_fitting_bundles(bundle, required), count) for bundle in free]
    return [index for index, capacity in enumerate(room) for _ in range(capacity)][:count]
