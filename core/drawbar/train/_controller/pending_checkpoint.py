"""A checkpoint between its last report and its commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.staging import StagedFiles


@dataclass
class PendingCheckpoint:
    """A checkpoint that ranks still persist.

    Attributes:
        index: Number of its reports.
        manifest: Gives what it consists of, once all parts are there.
        began: When its last report came, on the monotonic clock.
        name: Its name.
        in_place: It is committed where it lies.
        places: Its name by where a function of the user's has put it, by rank.
        parts: What ranks have persisted.
        awaited: What the others are to persist.
    """

    index: int
    make_manifest: Callable[[list[StagedFiles]], Manifest]
    start_time: float
    name: str
    in_place: bool = False
    uploaded_names: dict[int, str] = field(default_factory=dict)
    staged_files: dict[int, StagedFiles] = field(default_factory=dict)
    awaited_files: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)

    def resolve_name(self) -> str:
        """Give the checkpoint's name by where it lies.

        Raises:
            ValueError: The ranks do not agree on that.
        """
        if len(set(self.uploaded_names.values())) > 1:
            found = ", ".join(
                f"{name!r} (rank {rank})" for rank, name in self.uploaded_names.items()
            )
            raise ValueError(
                "checkpoint_upload_fn must return one place on all ranks, for all of them write "
                f"into one checkpoint; found {found}"
            )
        return next(iter(self.uploaded_names.values()), self.name)
