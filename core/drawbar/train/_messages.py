"""Messages from a rank to the controller, and what a worker is started with.

Messages arrive in order on one stream, which `Worker.run` yields. The controller replies with
commands (`_orders.py`). Everything in this module can be pickled without user classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec

from drawbar.train._driver_env import DriverEnvironment
from drawbar.train._errors import WorkerFailure
from drawbar.train._metrics import Metrics
from drawbar.train._row_positions import UnevenRows
from drawbar.train._serialization import Serialized
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.contents import FileEntry, check_relative_path
from drawbar.train._storage.manifest import Validation
from drawbar.train._storage.run_directory import RunDirectory


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes of the run that will be preempted.

    Attributes:
        deadline_ms: Time at which the nodes stop, in milliseconds since the epoch; None if unknown.
        preempted_node_to_ranks: Ranks on these nodes, by node id.

    Example:
        info = train.get_preemption_info()
        if info is not None:
            print(f"ranks {info.preempted_ranks} stop at {info.deadline_ms}")
    """

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]] = field(default_factory=dict)

    @property
    def preempted_node_ids(self) -> list[str]:
        """Ids of the nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Ranks on these nodes, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


@dataclass(frozen=True)
class Wishes:
    """Requests of the controller, the same for all ranks."""

    checkpoint: bool = False
    preemption: PreemptionInfo | None = None


class CheckpointConsistencyMode(Enum):
    """Mode of `get_all_reported_checkpoints`: what it waits for.

    COMMITTED waits until every checkpoint of this rank's reports is committed. VALIDATED also waits
    until the validations of these and all earlier checkpoints have ended.

    Example:
        checkpoints = train.get_all_reported_checkpoints(
            consistency_mode=train.CheckpointConsistencyMode.VALIDATED
        )
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification that all workers of a run receive, the same in each attempt.

    Attributes:
        environment: Environment variables of the worker process.
        surroundings: Environment of the driver; None if the worker is no separate process.
        metadata: Metadata of the trainer.
        cpus: Number of CPUs that the user set; None if not set.
        validation: Validation for `report(validation=True)`.
    """

    environment: dict[str, str]
    surroundings: DriverEnvironment | None
    metadata: dict[str, object]
    cpus: float | None = None
    validation: Validation | None = None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Assignment of one worker for one attempt. `shards` refers to its datasets, if any."""

    spec: WorkerSpec
    run_id: str
    directory: RunDirectory
    attempt: int
    first_index: int
    ranks: Ranks
    checkpoint: Checkpoint | None = None
    gpu_ids: tuple[str, ...] = ()
    shards: object = None
    positions: dict[str, object] = field(default_factory=dict)


# Structs instead of dataclasses: there may be thousands of messages per second, and structs are
# created and pickled in a fraction of the time.
class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Node and process of a worker, sent by the actor before ranks are assigned."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[str, ...] = ()


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a worker in its group, with torchrun's names."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Files that one rank contributes to a checkpoint.

    Attributes:
        directory: Current directory of the files.
        files: Their paths and sizes.
        staged: True if the files already are in the staging area, so the commit copies nothing.
        name: Name of the checkpoint's directory in the run.
        in_place: True if the directory is, or will be, the checkpoint itself.
        handed_over: True if the files may be moved. They are deleted after the commit.
    """

    directory: str
    files: tuple[FileEntry, ...]
    staged: bool
    name: str
    in_place: bool = False
    handed_over: bool = False


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `report()`.

    Attributes:
        index: Number of the report.
        metrics: Reported metrics.
        time: Time of the call, in seconds since the epoch.
        where: Line of the user's code.
        offer: Files for a checkpoint, if any.
        waits: True if the rank is blocked until the checkpoint is committed.
        positions: With a checkpoint, positions of the rank's data sources by name.
        validation: Requested validation of the checkpoint.
        may_wait: True if the message may arrive later, together with others.
    """

    index: int
    metrics: Metrics
    time: float
    where: str
    offer: Offer | None = None
    waits: bool = False
    positions: dict[str, object] = {}
    validation: Validation | None = None
    may_wait: bool = False


class WaitsForCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The rank is blocked until an earlier asynchronous checkpoint `index` is committed."""

    index: int


class Persisted(msgspec.Struct, frozen=True, kw_only=True):
    """The rank has put its assigned files of checkpoint `index` into the staging area.

    Attributes:
        index: Number of the report.
        directory: Staging directory; empty if the files are in place already. `checksums` are then
            known.
        name: Checkpoint name, if a user function has stored the files under this name.
        checksums: Checksums by file path.
    """

    index: int
    directory: str
    name: str = ""
    checksums: dict[str, str] = {}


class FileSent(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a file of checkpoint `name`, from a node with local storage.

    The reply is `FileTaken` with the same number.
    """

    number: int
    name: str
    path: str
    offset: int
    data: bytes

    # The message comes from another node and determines the path of a file on this node.
    def __post_init__(self) -> None:
        check_relative_path(self.name)
        check_relative_path(self.path)


class FileAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a chunk of a file of checkpoint `name`, or, without a path, for its file list.

    The reply is `FileReply` with the same number.
    """

    number: int
    name: str
    path: str
    offset: int

    def __post_init__(self) -> None:
        check_relative_path(self.name)
        check_relative_path(self.path or self.name)


class PassEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The rank has completed an epoch of a dataset, or has left the iteration early.

    Attributes:
        dataset: Name of the dataset.
        epoch: Number of the epoch.
        before: Rows of the epoch that all ranks had read when the attempt began, as encoded by
            `_row_positions.encode_reads`.
        part: Index of the shard.
        parts: Number of shards.
        rows: Rows that this iteration returned; None if they cannot be counted.
        batches: Batches that it returned; 0 if it returned single rows.
        shuffled: Whether the rows were shuffled.
        ended: Whether the iteration was completed.
        in_all: Rows of the dataset if it is split by row number, else None.
        uneven_rows: How the dataset is split by row number.
        empty: "row" or "batch" if a complete iteration returned none.
        index: Number of the rank's next report.
        discarded: Rows of this epoch that were read before it restarted from its beginning, one
            entry like `before` for each of its restarts.
    """

    dataset: str
    epoch: int
    before: list[Any]
    part: int
    parts: int
    rows: int | None
    batches: int
    shuffled: bool
    ended: bool
    in_all: int | None
    uneven_rows: UnevenRows
    empty: str = ""
    index: int = 0
    discarded: list[Any] = []


CollectiveKind = Literal["barrier", "broadcast_from_rank_zero", "all_gather", "wishes"]
"""Kinds of collectives. "wishes" requests the controller's requests for all ranks at once."""


class CollectiveCalled(msgspec.Struct, frozen=True, kw_only=True):
    """The rank is blocked in a collective call.

    Attributes:
        sequence: Number among all collective calls of the rank in this attempt.
        number: Number among the calls in user code, None for calls that Drawbar makes.
        kind: Called function.
        payload: Argument, serialized by the worker.
        where: Line of the user's code, as `file:line in function`.
    """

    sequence: int
    number: int | None
    kind: CollectiveKind
    payload: Serialized | None
    where: str


class CheckpointsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the committed checkpoints. The reply is `CheckpointsAnswer` with this number.

    Attributes:
        number: Number of the request.
        until: Condition that the reply waits for. None replies immediately and cancels the wait of
            an earlier request with the same number.
        timed: True if the rank waits with a timeout.
        where: Line of the user's code.
    """

    number: int
    until: CheckpointConsistencyMode | None
    timed: bool = False
    where: str = ""


class Discarded(msgspec.Struct, frozen=True, kw_only=True):
    """The rank no longer needs checkpoint `name`."""

    name: str


class DiagnosisAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the locations of all ranks. The reply is `Diagnosis` with this number."""

    number: int


class FunctionStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The user's function is about to start."""

    time: float


class FunctionRaised(msgspec.Struct, frozen=True, kw_only=True):
    """The user's function raised an exception. `Failed` follows when the backend has shut down."""

    time: float


class Printed(msgspec.Struct, frozen=True, kw_only=True):
    """A line for the driver's console.

    Attributes:
        text: The line.
        stream: Stream to which the line was written.
        transient: True if the line was redrawn with a carriage return, as tqdm does.
        record: True for a logged error, which is sent in addition to the printed line.
    """

    text: str
    stream: Literal["stdout", "stderr"] = "stdout"
    transient: bool = False
    record: bool = False


class Wrote(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a program, which runs in place of a training function, wrote to a stream."""

    data: bytes
    stream: Literal["stdout", "stderr"] = "stdout"


class SignOfLife(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a rank that has no other message but is active."""


class Retired(msgspec.Struct, frozen=True, kw_only=True):
    """This process must not run another attempt."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The function returned.

    Attributes:
        time: Time of the return, in seconds since the epoch.
        value: Serialized return value.
        value_error: Reason why `value` is None, if it could not be serialized.
        remarks: Notices that are shown if all other ranks finish too.
    """

    time: float
    value: Serialized | None = None
    value_error: str = ""
    remarks: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The function or its setup raised an exception."""

    failure: WorkerFailure


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The function ended at the controller's request. The process can run another attempt."""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """The worker process died; created by the worker group. `detail` is Ray's description."""

    detail: str
    time: float
    preempted: bool = False


Message = (
    Reported
    | WaitsForCheckpoint
    | Persisted
    | FileSent
    | FileAsked
    | CollectiveCalled
    | CheckpointsAsked
    | Discarded
    | PassEnded
    | DiagnosisAsked
    | FunctionStarted
    | FunctionRaised
    | Printed
    | Wrote
    | SignOfLife
    | Retired
    | Finished
    | Failed
    | Interrupted
    | Gone
)
