"""Ranks of a worker in its group, and the node and process of a worker."""

from __future__ import annotations

import msgspec


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Node and process of a worker, sent by the actor before ranks are assigned."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[str, ...] = ()
    fork_error: str = ""
    """Why the process was not forked from the fork server, although it was requested."""


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a worker in its group, with torchrun's names."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
