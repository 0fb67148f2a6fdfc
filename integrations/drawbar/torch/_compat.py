"""Private APIs of torch, Accelerate, DeepSpeed, and Hugging Face's datasets.

They were read in torch 2.4 to 2.15, Accelerate 1.0 to 1.15, DeepSpeed 0.16 to 0.19, and datasets
5.2.

No other file of this package uses them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from drawbar.train.backend import import_private

tree_map_only = import_private("torch.utils._pytree", "tree_map_only")

_GROUP_DICTS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
    "pg_coalesce_state",
)
"""Attributes of `_world` in which torch keeps its groups."""


def count_group_activity() -> tuple[int, int] | None:
    """Count the collectives of the default process group, and all process groups.

    torch counts them but has no public access. None if the group's backend does not count its
    collectives, or if this version of torch does not have the API.
    """
    group: Any = dist.group.WORLD
    c10d: Any = dist.distributed_c10d
    try:
        return int(group._get_sequence_number_for_group()), len(c10d._world.pg_map)
    except (AttributeError, RuntimeError):
        return None


class Group(NamedTuple):
    """Process group of this process.

    Attributes:
        name: Name, which is the same on all of its ranks.
        description: Description by the user or by torch.
        ranks: World ranks; empty if the group has all ranks.
        backends: Names of its backends.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    backends: Collection[str]


def get_groups() -> list[Group]:
    """Return all process groups that have this rank. torch has no public list of them.

    Raises:
        AttributeError: This version of torch does not have the API.
        KeyError: A group has just been destroyed.
        ValueError: The default group has just been destroyed.
    """
    groups = []
    c10d: Any = dist.distributed_c10d
    for group, name in list(c10d._world.pg_names.items()):
        ranks = tuple(c10d._world.pg_group_ranks[group])
        devices = c10d._world.pg_backend_config[group].split(",")  # such as "cpu:gloo,cuda:nccl"
        groups.append(
            Group(
                name=name,
                description=group.group_desc,
                ranks=() if len(ranks) == dist.get_world_size() else ranks,
                backends=dict.fromkeys(device.rpartition(":")[2] for device in devices),
            )
        )
    return groups


def dump_flight_recorders() -> list[bytes]:
    """Return the entries of torch's flight recorders as JSON: of NCCL, and of other backends.

    Returns:
        A document for each recorder. Empty if this version of torch has none.
    """
    module: Any = importlib.import_module("torch._C._distributed_c10d")
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return [bytes(getattr(module, name)()) for name in names if hasattr(module, name)]


def abort_default_group() -> None:
    """Destroy the default process group without waiting for NCCL collectives of other ranks.

    `destroy_process_group()` would wait for them. It is called if torch cannot abort a group.
    """
    abort: Callable[[], None] = getattr(
        dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group
    )
    abort()


def forget_groups() -> None:
    """Remove the registered groups, so that the next default group is as in a new process.

    An interrupt can end `init_process_group()` and `destroy_process_group()` at any line. Then
    torch may have no default group, but still the name of a group, and raises an error for the next
    group with this name. It also counts groups to name them, also one whose creation fails, and
    does not start again then. Ranks that give a group different names wait for each other until the
    time limit.
    """
    c10d: Any = dist.distributed_c10d
    world: Any = getattr(c10d, "_world", None)
    for name in _GROUP_DICTS:
        getattr(world, name, {}).clear()
    if hasattr(c10d, "_unregister_all_process_groups"):
        c10d._unregister_all_process_groups()
    if hasattr(world, "group_count"):
        world.group_count = 0


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: object) -> object:
    """Apply a function to the tensors of a structure, also in registered classes of users.

    torch has no public function for its structures before `torch.utils.pytree`.
    """
    mapped: object = tree_map_only(torch.Tensor, function, structure)
    return mapped


def get_accelerate_states() -> list[dict[str, object]]:
    """Return the shared dicts of Accelerate's singletons; [] if it was not imported.

    `AcceleratorState._reset_state` clears them, but cannot restore them.
    """
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [cast("Any", getattr(module, name))._shared_state for name in names] if module else []


def has_exact_state(stream: Any) -> bool:
    """Return whether the `state_dict` of a Hugging Face stream is exact.

    The state lacks the rows in shuffle buffers, and rows of batched maps of formatted tables. There
    is no public access to the steps of a stream.

    Args:
        stream: The stream.

    Returns:
        True if it is exact; False also if the steps of the stream are unknown.

    Example:
        >>> has_exact_state(dataset.to_iterable_dataset())
    """
    formatting = getattr(stream, "_formatting", None)
    steps = [getattr(stream, "_ex_iterable", None)]
    for step in steps:
        if step is None or type(step).__name__ == "BufferShuffledExamplesIterable":
            return False
        if hasattr(step, "ex_iterable"):
            steps.append(step.ex_iterable)
        steps += getattr(step, "ex_iterables", [])
    return formatting is None or not formatting.is_table


def disable_deepspeed_shm() -> None:
    """Prevent DeepSpeed from compiling its shared-memory all-reduce; gloo is used instead.

    DeepSpeed would compile it when it first sees a process group on CPUs. This needs a compiler and
    takes about a minute. If it is interrupted, every later run waits for the stale lock without a
    message.

    Example:
        ```python
        if args.deepspeed:
            disable_deepspeed_shm()
        ```
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def get_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place. Changes of `tensor.data` do not count.

    Example:
        >>> get_version(torch.zeros(1).add_(1))
        1
    """
    return int(tensor._version)
