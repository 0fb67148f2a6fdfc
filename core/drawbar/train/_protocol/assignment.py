"""Specification, rank, and assignment of a worker.

The controller pickles assignments, and the ranks unpickle them, because they contain user objects.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar._process.codec import Codec
from drawbar._process.driver_env import DriverEnvironment
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.serialization import Serialized
from drawbar._process.worker_env import make_worker_env
from drawbar._recovery.messages import RanksLost
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.manifest import Validation
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._config.data_source import OpenShards


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification that all workers of a run receive, the same in each attempt.

    Attributes:
        env_vars: Environment variables of the worker process.
        driver_env: Environment of the driver; None if the worker is no separate process.
        metadata: Metadata of the trainer.
        num_cpus: Number of CPUs that the user set; None if not set.
        default_validation: Validation for `report(validation=True)`.
        samplers: Functions that observe the rank while its training function runs.
    """

    env_vars: dict[str, str]
    driver_env: DriverEnvironment | None
    metadata: dict[str, object]
    num_cpus: float | None = None
    default_validation: Validation | None = None
    samplers: tuple[Sampler, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerAssignment:
    """Assignment of one worker for one attempt.

    `first_attempt` is the first attempt of this start of the run. `node_pids` are the processes of
    the run on its node, and `open_shards` returns its shards of the run's `DataSource`, if any.
    `memory_stores` is a reference to the `NodeStores` of its node, if any.
    """

    spec: WorkerSpec
    run_id: str
    run_directory: RunDirectory
    attempt: int
    first_attempt: int = 0
    first_report_index: int
    ranks: Ranks
    resume_checkpoint: Checkpoint | None = None
    gpu_ids: tuple[str, ...] = ()
    node_pids: tuple[int, ...] = ()
    open_shards: OpenShards | Serialized | None = None
    data_positions: dict[str, object] = field(default_factory=dict)
    is_recovered_in_place: bool = False
    replaced: RanksLost | None = None  # the death after which this process replaces a worker
    num_received_reports: int = 0  # number of the next report of the dead process
    memory_stores: Any = None

    @property
    def log_path(self) -> Path:
        """Log of the rank."""
        return self.run_directory.get_log_path(self.ranks.world_rank)

    def make_worker_env(self) -> dict[str, str]:
        """Return the environment variables of the rank, to be set before user code runs."""
        return make_worker_env(self.ranks, self.spec.env_vars, self.spec.num_cpus)


Sampler = Callable[[WorkerAssignment, Callable[[Any], None]], AbstractContextManager[None]]
"""Observes a rank while a block runs: receives its assignment, and a function to send messages."""

WORKER_INFO = Codec[WorkerInfo](WorkerInfo)
