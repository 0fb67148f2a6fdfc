"""Messages from a rank to the controller.

Messages arrive in order on one stream, which `Worker.run` yields. The controller replies with
commands (`commands.py`). All messages are tagged structs, which `codec.py` encodes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from drawbar._base.metrics import Metrics
from drawbar._process.codec import Codec
from drawbar._process.imported_modules import ModulesImported
from drawbar._process.output_lines import OutputLine
from drawbar._process.serialization import Serialized
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.events import ShardEpochEnded
from drawbar._recovery.messages import RecoveryMessage, RecoveryNotice
from drawbar._storage.contents import FileEntry, check_relative_path
from drawbar._storage.manifest import Validation
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode


# Structs instead of dataclasses: there may be thousands of messages per second, and structs are
# created and encoded in a fraction of the time.
class CheckpointOffer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Files that one rank contributes to a checkpoint. It persists those that it is assigned.

    Attributes:
        directory: Current directory of the files.
        files: Their paths and sizes.
        checkpoint_name: Name of the checkpoint's directory in the run.
        should_move: True if the files may be moved. They are deleted after the commit.
    """

    directory: str
    files: tuple[FileEntry, ...]
    checkpoint_name: str
    should_move: bool = False


class StagedOffer(CheckpointOffer, frozen=True, kw_only=True):
    """Files that are in the staging area already, so the commit copies nothing."""


class InPlaceOffer(CheckpointOffer, frozen=True, kw_only=True):
    """Files of a directory that becomes the checkpoint itself."""


class UploadFnOffer(CheckpointOffer, frozen=True, kw_only=True):
    """Files that the user's upload function stores under the name of the checkpoint.

    Involves all ranks, even those without assigned files: the function may write other files or
    call a collective.
    """


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a rank has observed, which does not influence the run.

    Attributes:
        kind: Kind of the observation, such as "rank_times".
        payload: JSON values.
        is_activity: False if a thread sends it, even if the training function hangs.
    """

    kind: str
    payload: dict[str, Any]
    is_activity: bool = True


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of `report()`.

    Attributes:
        index: Number of the report.
        metrics: Reported metrics.
        time: Time of the call, in seconds since the epoch.
        location: Line of the user's code.
        offer: Files for a checkpoint, if any.
        is_blocking: True if the rank is blocked until the checkpoint is committed.
        data_positions: With a checkpoint, positions of the rank's data sources by name.
        validation: Requested validation of the checkpoint.
        is_buffered: True if the message may arrive later, together with others.
        observation: Times of the rank, in some of the reports.
        unread_checkpoint: With rank 0's first checkpoint, name of the checkpoint from which the
            attempt resumes, if the training function has not read it.
    """

    index: int
    metrics: Metrics
    time: float
    location: str
    offer: CheckpointOffer | StagedOffer | InPlaceOffer | UploadFnOffer | None = None
    is_blocking: bool = False
    data_positions: dict[str, object] = {}
    validation: Validation | None = None
    is_buffered: bool = False
    observation: Observation | None = None
    unread_checkpoint: str = ""


class CheckpointWaitStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank is blocked until an earlier asynchronous checkpoint is committed."""

    report_index: int


class FilesPersisted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has put its assigned files where the commit can use them (`UploadTarget.persist`).

    Attributes:
        report_index: Index of the report.
        staging_directory: Staging directory; empty if the files are in place already. `checksums`
            are then known.
        checkpoint_name: Checkpoint name, if a user function has stored the files under this name.
        checksums: Checksums by file path.
    """

    report_index: int
    staging_directory: str
    checkpoint_name: str = ""
    checksums: dict[str, str] = {}


class FileChunk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A chunk of a checkpoint file, from a node with local storage.

    The reply is a `FileChunkAck` with the same `request_id`.
    """

    request_id: int
    checkpoint_name: str
    path: str
    offset: int
    data: bytes

    # The message comes from another node and determines the path of a file on this node.
    def __post_init__(self) -> None:
        check_relative_path(self.checkpoint_name)
        check_relative_path(self.path)


class FileRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request for a chunk of a checkpoint file, or, without a path, for the file list.

    The reply is a `FileReply` with the same `request_id`.
    """

    request_id: int
    checkpoint_name: str
    path: str
    offset: int

    def __post_init__(self) -> None:
        check_relative_path(self.checkpoint_name)
        check_relative_path(self.path or self.checkpoint_name)


CollectiveKind = Literal["barrier", "broadcast_from_rank_zero", "all_gather"]
"""Kinds of collectives, by the name of their function."""


class CollectiveCalled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank is blocked in a collective call.

    Attributes:
        sequence: Number among all collective calls of the rank in this attempt.
        number: Number among the calls in user code, None for calls that Drawbar makes.
        kind: Called function.
        payload: Argument, serialized by the worker.
        location: Line of the user's code, as `file:line in function`.
    """

    sequence: int
    number: int | None
    kind: CollectiveKind
    payload: Serialized | None
    location: str


class CheckpointListRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request for the committed checkpoints. The reply is a `CheckpointListReply`.

    Attributes:
        request_id: ID of the request, which the reply repeats.
        consistency_mode: Condition that the reply waits for. None replies immediately and cancels
            the wait of an earlier request with the same `request_id`.
        has_timeout: True if the rank waits with a timeout.
        location: Line of the user's code.
    """

    request_id: int
    consistency_mode: CheckpointConsistencyMode | None
    has_timeout: bool = False
    location: str = ""


class RequestSeen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `RequestAnnounced`. Call number `call` of the rank waits for `RequestAgreed`.

    Attributes:
        longest_interval: Longest time in seconds between two calls of the rank so far.
        is_saving: Whether the rank is in `checkpoint_dir()` or `report()`, or a call has returned
            True.
    """

    request_id: int
    call: int
    longest_interval: float = 0.0
    is_saving: bool = False


class CheckpointDiscarded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank no longer needs a checkpoint."""

    checkpoint_name: str


class DiagnosisRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request for the locations of all ranks. The reply is a `DiagnosisReply`."""

    request_id: int


class RollbackRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function calls `rollback()` and waits until it is interrupted. There is no reply."""

    reason: str
    skip: int
    to: int
    report_index: int
    data_positions: dict[str, object]
    failure: WorkerFailure


class FunctionImported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has imported the user's function, and sets up the backend next."""


class FunctionStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The user's function is about to start."""

    time: float


class ProgramStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The user's function runs a program in another process."""

    pid: int


class FunctionFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The user's function raised an exception. `RankFailed` follows the backend's shutdown."""

    time: float


class OutputBytes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes that a program, which runs in place of a training function, wrote to a stream."""

    data: bytes
    stream: Literal["stdout", "stderr"] = "stdout"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Heartbeat of a rank that has no other message but is active."""


class ProcessRetired(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This process must not run another attempt."""


class RankFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function returned.

    Attributes:
        time: Time of the return, in seconds since the epoch.
        return_value: Serialized return value.
        serialization_error: Reason why `return_value` is None, if it could not be serialized.
        final_notices: Notices that are shown if all other ranks finish too.
    """

    time: float
    return_value: Serialized | None = None
    serialization_error: str = ""
    final_notices: tuple[str, ...] = ()


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function or its setup raised an exception."""

    failure: WorkerFailure


class RankInterrupted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function ended at the controller's request. The process can run another attempt."""


class WorkerDied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker process died; created by the worker group. `detail` is Ray's description."""

    detail: str
    time: float
    is_preempted: bool = False


Message = (
    Report
    | CheckpointWaitStarted
    | FilesPersisted
    | FileChunk
    | FileRequest
    | CollectiveCalled
    | CheckpointListRequest
    | RequestSeen
    | CheckpointDiscarded
    | RollbackRequested
    | Observation
    | ShardEpochEnded
    | DiagnosisRequest
    | FunctionImported
    | FunctionStarted
    | ProgramStarted
    | ModulesImported
    | FunctionFailed
    | OutputLine
    | OutputBytes
    | Heartbeat
    | ProcessRetired
    | RecoveryMessage
    | RankFinished
    | RankFailed
    | RankInterrupted
)
"""Messages that a rank sends."""

MESSAGES = Codec[Message](Message)
MESSAGE_BATCHES = Codec[list[Message]](list[Message])

GroupMessage = Message | WorkerDied | RecoveryNotice
"""Messages that the controller receives from a worker group, or about a rank."""

FINAL_MESSAGE_TYPES = (RankFinished, RankFailed, RankInterrupted)
"""Types of the last message of a rank in an attempt."""
