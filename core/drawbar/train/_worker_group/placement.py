"""Where workers lie: in a placement group of their run's own, or in the one that they come from.

A process that Ray has placed in a group which takes child tasks, such as a trial of Ray Tune, has
the resources of its run there already. Asking for them once more, outside, would have trials that
fill the cluster wait for each other for ever.
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

from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._threads import DaemonThreadPool
from drawbar.train._worker_group.capacity import count_fitting_bundles
from drawbar.train._worker_group.cluster import get_ray_worker_id, is_process_dead

_RELEASE_TIMEOUT_S = 1.0
_GROUP_NAME_PREFIX = "drawbar-"  # the host's id follows, and what makes the name the group's alone


class Placement:
    """The bundles of one placement group that the workers of a run get, by slot."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[int], *, is_owned: bool) -> None:
        self._group = group
        self._bundles = bundles
        self._own = is_owned

    @classmethod
    def create(cls, scaling: ScalingConfig) -> Self:
        """Ask Ray for a group of the run's own."""
        count = scaling.max_workers
        if ray.get_runtime_context().get_actor_id() is not None:
            # by the actor before this one: a sweep starts trial after trial
            remove_orphaned_groups()
        group = placement_group(
            # Ray refuses a bundle without any resource.
            [scaling.bundle or {"CPU": 0.001}] * count,
            strategy=scaling.placement_strategy,
            bundle_label_selector=scaling.label_selectors or None,
            name=f"{_GROUP_NAME_PREFIX}{get_ray_worker_id()}-{uuid.uuid4().hex}",
        )
        return cls(group, range(count), is_owned=True)

    @classmethod
    def from_current_group(cls, scaling: ScalingConfig) -> Self | None:
        """Give the group that this process lies in, if it takes child tasks and holds the workers.

        To be called in the thread that Ray calls: others of a task do not know its group.
        """
        if not ray.is_initialized() or (group := get_current_placement_group()) is None:
            return None
        context = ray.get_runtime_context()
        taken = context.get_assigned_resources()  # type: ignore[no-untyped-call]  # it has no types
        count = scaling.max_workers
        bundles = find_free_bundles(group.bundle_specs, taken, scaling.bundle, count)
        # All of them or none: with some outside, trials could wait for what others of them hold.
        return cls(group, bundles, is_owned=False) if len(bundles) == count else None

    @property
    def is_ready(self) -> bool:
        """Whether all bundles have their nodes."""
        table: dict[str, object] = placement_group_table(self._group)
        return bool(table["state"] == "CREATED")

    def get_scheduling_strategy(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Say where the worker of a slot lies. What it starts itself goes anywhere."""
        # Else what the function starts, such as tasks of Ray Data, would have to fit into the
        # bundle that its worker fills, and wait for ever (ray-project/ray#17524).
        return PlacementGroupSchedulingStrategy(
            self._group, self._bundles[slot], placement_group_capture_child_tasks=False
        )

    def release(self) -> None:
        """Let go of the resources, unless they are somebody else's.

        Where Ray does not answer, they go with this process.
        """
        if self._own:
            # Ray would wait a minute for its control service, and then end this very process.
            thread = DaemonThreadPool(1, "drawbar-give-up")
            removing = thread.submit(remove_placement_group, self._group)
            thread.shutdown(wait=False)
            with contextlib.suppress(TimeoutError):
                removing.result(_RELEASE_TIMEOUT_S)


def remove_orphaned_groups() -> None:
    """Remove the groups of runs that have gone with the process which hosted them.

    Ray keeps what an actor or a task has asked for until its job ends: what a trial that Ray Tune
    has stopped held is nobody's, and the next one waits for it.
    """
    for each in placement_group_table().values():
        if not each["name"].startswith(_GROUP_NAME_PREFIX) or each["state"] == "REMOVED":
            continue
        if is_process_dead(each["name"].removeprefix(_GROUP_NAME_PREFIX).partition("-")[0]):
            group = ray.PlacementGroupID.from_hex(each["placement_group_id"])
            remove_placement_group(PlacementGroup(group))


def find_free_bundles(
    bundles: Sequence[Mapping[str, float]],
    used: Mapping[str, float],
    required: Mapping[str, float],
    count: int,
) -> list[int]:
    """Number the bundles that workers can get: one number for each, for `count` at the most.

    Args:
        bundles: Those of the group.
        taken: What the asking process has of the first one, where Ray Tune puts it.
        wanted: What a worker needs.
        count: How many workers there are.
    """
    # Copies: they belong to Ray, which gives the same ones to the next who asks.
    left = [dict(bundle) for bundle in bundles]
    for name, amount in used.items():
        left[0][name] = left[0].get(name, 0) - amount
    room = [min(count_fitting_bundles(bundle, required), count) for bundle in left]
    return [number for number, holds in enumerate(room) for _ in range(holds)][:count]
