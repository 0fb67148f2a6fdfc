"""Commands from the controller to a rank, as tagged structs, which `codec.py` encodes."""

from __future__ import annotations

import msgspec

from drawbar._base.metrics import Metrics
from drawbar._process.codec import Codec
from drawbar._process.errors import PreemptionInfo
from drawbar._process.serialization import Serialized
from drawbar._recovery.messages import RecoveryCommand
from drawbar._storage.contents import FileEntry
from drawbar._storage.manifest import ReportedCheckpointStatus


class PersistFiles(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Put the assigned files of the rank's offer where the commit can use them.

    The rank calls `UploadTarget.persist`, or the upload function of the user.

    Attributes:
        report_index: Index of the report.
        files: Files to persist.
        checkpoint_name: Name of the checkpoint.
    """

    report_index: int
    files: tuple[FileEntry, ...]
    checkpoint_name: str


class CommitCompleted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint is committed. `checkpoint_name` is its directory in the run."""

    report_index: int
    checkpoint_name: str


class CollectiveResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Collective number `sequence` is complete. `payloads` has one entry, or one per rank."""

    sequence: int
    payloads: tuple[Serialized | None, ...]


class ControllerRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of the controller, the same for all ranks."""

    should_checkpoint: bool = False
    preemption: PreemptionInfo | None = None


class RequestAnnounced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The controller has a request. The rank replies with a `RequestSeen`."""

    request_id: int


class RequestAgreed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks have seen the request. It takes effect at call number `call` on each of them."""

    request_id: int
    call: int
    requests: ControllerRequests


class CheckpointListReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply with the retained committed checkpoints, oldest first, as (name, metrics, status)."""

    request_id: int
    checkpoints: tuple[tuple[str, Metrics, ReportedCheckpointStatus], ...]


class DiagnosisReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply with a description of where all ranks are. The run directory has their stacks."""

    request_id: int
    text: str


FILE_CHUNK_BYTES = 2 * 1024 * 1024
"""Size of a chunk of a file. Later messages of the rank wait until it is sent."""


class FileReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A chunk of a file, or a list of files."""

    request_id: int
    data: bytes = b""
    files: tuple[FileEntry, ...] = ()


class FileChunkAck(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Acknowledge that the chunk of this request is written."""

    request_id: int


class InterruptFunction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the function as soon as possible.

    Attributes:
        reason: Reason, for the rank's log.
        is_user_request: True if the user stopped the run, so that a program may clean up as on
            Ctrl-C. False if another rank failed.
    """

    reason: str
    is_user_request: bool = False


Command = (
    PersistFiles
    | CommitCompleted
    | CollectiveResult
    | RequestAnnounced
    | RequestAgreed
    | CheckpointListReply
    | DiagnosisReply
    | FileChunkAck
    | FileReply
    | RecoveryCommand
    | InterruptFunction
)

COMMANDS = Codec[Command](Command)
