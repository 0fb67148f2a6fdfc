"""What the controller tells a worker, through the actor's control group. Plain data, no behaviour.

Everything here pickles without any of the user's classes.
"""

from __future__ import annotations

import msgspec

from drawbar.train._metrics import Metrics
from drawbar.train._serialization import Serialized
from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.node_local_storage import FileReply


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Put these files of your offer for checkpoint `index` where a commit can take them.

    `name`: of the checkpoint.
    """

    index: int
    files: tuple[FileEntry, ...]
    name: str


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `index` is committed; `name` is its directory in the run."""

    index: int
    name: str


class CollectiveDone(msgspec.Struct, frozen=True, kw_only=True):
    """The `sequence`-th collective is complete. `payloads` has one entry, or one per rank."""

    sequence: int
    payloads: tuple[Serialized | None, ...]


class CheckpointsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The committed checkpoints that are still kept, oldest first, as (name, metrics, status)."""

    number: int
    checkpoints: tuple[tuple[str, Metrics, ReportedCheckpointStatus], ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Where all ranks stood, in words; their full stacks are below the run's directory."""

    number: int
    text: str


class FileTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The chunk of this number is written."""

    number: int


class Interrupt(msgspec.Struct, frozen=True, kw_only=True):
    """End the function as soon as possible; the reason is for its log.

    `by_user`: it is not that another rank failed, and a program may clean up as on a Ctrl-C.
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
