"""Commands from the controller to a rank, sent through the actor's control group.

Commands are plain data that can be pickled without user classes.
"""

from __future__ import annotations

import msgspec

from drawbar.train._metrics import Metrics
from drawbar.train._serialization import Serialized
from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.node_local_storage import FileReply


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Persist the assigned files of the rank's offer for checkpoint `index` in the staging area.

    Attributes:
        index: Number of the report.
        files: Files to persist.
        name: Name of the checkpoint.
    """

    index: int
    files: tuple[FileEntry, ...]
    name: str


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `index` is committed. `name` is its directory in the run."""

    index: int
    name: str


class CollectiveDone(msgspec.Struct, frozen=True, kw_only=True):
    """Collective number `sequence` is complete. `payloads` has one entry, or one per rank."""

    sequence: int
    payloads: tuple[Serialized | None, ...]


class CheckpointsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Reply with the retained committed checkpoints, oldest first, as (name, metrics, status)."""

    number: int
    checkpoints: tuple[tuple[str, Metrics, ReportedCheckpointStatus], ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Reply with a description of where all ranks are. The run directory has their stacks."""

    number: int
    text: str


class FileTaken(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledge that the chunk of this number is written."""

    number: int


class Interrupt(msgspec.Struct, frozen=True, kw_only=True):
    """End the function as soon as possible.

    Attributes:
        reason: Reason, for the rank's log.
        by_user: True if the user stopped the run, so that a program may clean up as on Ctrl-C.
            False if another rank failed.
    """

    reason: str
    by_user: bool = False


Order = (
    Persist
    | Committed
    | CollectiveDone
    | CheckpointsAnswer
    | Diagnosis
    | FileTaken
    | FileReply
    | Interrupt
)
