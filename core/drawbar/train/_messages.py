"""What a worker tells the controller, and what it is told before it begins. Plain data.

`Message`s come in order, on the one stream that `Worker.run` yields; `_orders` is what the
controller gives back. Everything here pickles without any of the user's classes.
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
    """Nodes of this run that are about to be taken away.

    Attributes:
        deadline_ms: Until when they stay, in milliseconds since the epoch; None if it is not known.
        preempted_node_to_ranks: The ranks on each of these nodes, by node id.
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
    """What the controller wants, the same for all ranks."""

    checkpoint: bool = False
    preemption: PreemptionInfo | None = None


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for.

    COMMITTED: every checkpoint that this rank's reports are part of is committed. VALIDATED: the
    validations of these, and of all earlier ones, have ended too.
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What every worker of a run gets, in each attempt the same.

    Attributes:
        environment: Variables for its process.
        surroundings: The driver's; None where the worker is no process of its own.
        metadata: The trainer's.
        cpus: That the user gave it; None if they did not say.
        validation: What `report(validation=True)` means.
    """

    environment: dict[str, str]
    surroundings: DriverEnvironment | None
    metadata: dict[str, object]
    cpus: float | None = None
    validation: Validation | None = None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one worker is told about its attempt. `shards` refers to its datasets, if any."""

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


# Structs, and no dataclasses: there may be thousands of messages per second, and structs are made
# and pickled in a fraction of the time.
class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker landed: said by the actor itself, before ranks are given."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[str, ...] = ()


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place in its group, by the names that torchrun uses."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one rank gives to a checkpoint.

    `directory` is where they are now. `staged` means that they already lie in the run's staging
    area, so that committing them moves no byte. `name` is that of the checkpoint's directory in the
    run. `in_place`: the directory is, or will be, the checkpoint itself. `handed_over`: it may be
    moved, and is deleted once the checkpoint is committed.
    """

    directory: str
    files: tuple[FileEntry, ...]
    staged: bool
    name: str
    in_place: bool = False
    handed_over: bool = False


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """`report()` was called.

    `waits`: the rank stands still until the checkpoint is committed. `positions`: with a
    checkpoint, how far the rank's data has been consumed, by the name of its source. `validation`:
    the checkpoint is to be validated so. `may_wait`: it may arrive later, with others.
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
    """The rank stands still until an earlier, asynchronous checkpoint `index` is committed."""

    index: int


class Persisted(msgspec.Struct, frozen=True, kw_only=True):
    """The rank has put its share of checkpoint `index` into the staging area, at `directory`.

    That is empty if the files lie in their place already; `checksums` are known then. `name` is
    that of the checkpoint by this place, if a function of the user's has put it there.
    """

    index: int
    directory: str
    name: str = ""
    checksums: dict[str, str] = {}


class FileSent(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a file of checkpoint `name`, from a node that does not share the storage.

    Answered by `FileTaken` with this number.
    """

    number: int
    name: str
    path: str
    offset: int
    data: bytes

    # It comes from another node, and says where a file is written on this one.
    def __post_init__(self) -> None:
        check_relative_path(self.name)
        check_relative_path(self.path)


class FileAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The rank asks for a piece of a file of checkpoint `name`, or, without a path, for its files.

    Answered by `FileReply` with this number.
    """

    number: int
    name: str
    path: str
    offset: int

    def __post_init__(self) -> None:
        check_relative_path(self.name)
        check_relative_path(self.path or self.name)


class PassEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The rank has read its part of a dataset to the end, or has left the iteration early.

    Attributes:
        dataset: Name of the dataset.
        epoch: Number of the epoch.
        before: Rows of the epoch that all ranks had read when the attempt began, as encoded by
            `_rows.encode_reads`.
        part: Number of the part.
        parts: Number of parts.
        rows: Rows that this iteration returned; None if they cannot be counted.
        batches: Batches that it returned; 0 if it returned single rows.
        shuffled: Whether it was shuffled.
        ended: Whether it reached the end.
        in_all: Rows of the dataset, if parts are made by row numbers; else None.
        uneven_rows: How rows are shared then.
        empty: "row" or "batch" if a whole iteration returned none.
        index: Number of the rank's next report.
        discarded: Rows that were read of this epoch before it restarted from its beginning, one
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
"""`wishes` asks all ranks at once what the controller wishes of them, so that they agree."""


class CollectiveCalled(msgspec.Struct, frozen=True, kw_only=True):
    """The rank is blocked in a collective call.

    Attributes:
        sequence: Number among all collective calls of the rank in this attempt.
        number: Number among the calls of the user's code, None for calls that Drawbar makes.
        payload: Serialized by the worker.
        where: Line of the user's code, as `file:line in function`.
    """

    sequence: int
    number: int | None
    kind: CollectiveKind
    payload: Serialized | None
    where: str


class CheckpointsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The rank asks for the committed checkpoints; answered by `CheckpointsAnswer` with this
    number.

    `until` says what the answer waits for. None: nothing, not even if the same question was to wait
    before. `timed`: the rank waits for so long only, and then goes on. `where` is the line.
    """

    number: int
    until: CheckpointConsistencyMode | None
    timed: bool = False
    where: str = ""


class Discarded(msgspec.Struct, frozen=True, kw_only=True):
    """The rank says that checkpoint `name` is not needed any more."""

    name: str


class DiagnosisAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The rank asks where all ranks stand; answered by `Diagnosis` with this number."""

    number: int


class FunctionStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the user's function is about to run."""

    time: float


class FunctionRaised(msgspec.Struct, frozen=True, kw_only=True):
    """The user's function has raised; `Failed` follows once the backend has let go of its peers."""

    time: float


class Printed(msgspec.Struct, frozen=True, kw_only=True):
    """A line for the driver's console.

    `transient` marks a state of a line that was redrawn with a carriage return, as tqdm does.
    `record` marks a logged error, which is said besides what the logging has printed of it.
    """

    text: str
    stream: Literal["stdout", "stderr"] = "stdout"
    transient: bool = False
    record: bool = False


class Wrote(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a script, which runs instead of a training function, has written to a stream."""

    data: bytes
    stream: Literal["stdout", "stderr"] = "stdout"


class SignOfLife(msgspec.Struct, frozen=True, kw_only=True):
    """The rank has nothing to say, but does something."""


class Retired(msgspec.Struct, frozen=True, kw_only=True):
    """This process is not to run another attempt."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The function returned `value`, packed; `value_error` says why that is None.

    `remarks` are told if every other rank finishes too.
    """

    time: float
    value: Serialized | None = None
    value_error: str = ""
    remarks: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The function, or its set-up, raised."""

    failure: WorkerFailure


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The function ended because the controller asked it to; the process can run another."""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """Said by the worker group for the worker: the process is dead. `detail` is Ray's account."""

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
