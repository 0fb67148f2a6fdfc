"""Specification, rank, and assignment of a worker.

The controller pickles assignments, and the ranks unpickle them, because they contain user objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from drawbar.train._driver_env import DriverEnvironment
from drawbar.train._protocol.codec import Codec
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.manifest import Validation
from drawbar.train._storage.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification that all workers of a run receive, the same in each attempt.

    Attributes:
        env_vars: Environment variables of the worker process.
        driver_env: Environment of the driver; None if the worker is no separate process.
        metadata: Metadata of the trainer.
        num_cpus: Number of CPUs that the user set; None if not set.
        default_validation: Validation for `report(validation=True)`.
    """

    env_vars: dict[str, str]
    driver_env: DriverEnvironment | None
    metadata: dict[str, object]
    num_cpus: float | None = None
    default_validation: Validation | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerAssignment:
    """Assignment of one worker for one attempt.

    `node_pids` are the processes of the run on its node, and `dataset_shards` refers to its
    datasets, if any.
    """

    spec: WorkerSpec
    run_id: str
    run_directory: RunDirectory
    attempt: int
    first_report_index: int
    ranks: Ranks
    resume_checkpoint: Checkpoint | None = None
    gpu_ids: tuple[str, ...] = ()
    node_pids: tuple[int, ...] = ()
    dataset_shards: object = None
    data_positions: dict[str, object] = field(default_factory=dict)


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Node and process of a worker, sent by the actor before ranks are assigned."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[str, ...] = ()
    fork_error: str = ""
    """Why the process was not forked from the fork server, although it was requested."""


WORKER_INFO = Codec[WorkerInfo](WorkerInfo)


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a worker in its group, with torchrun's names."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
