"""Checkpoint between its last report and its commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.staging import StagedFiles


@dataclass
class PendingCheckpoint:
    """Checkpoint whose files are being persisted.

    Attributes:
        index: Index of its reports.
        make_manifest: Returns its manifest when all files are staged.
        start_time: Time of its last report on the monotonic clock.
        name: Name of the checkpoint.
        staging_directory: Directory for the files of ranks with node-local storage.
        in_place: Whether its files are committed where they are.
        uploaded_names: Name that the user's upload function returned, by rank.
        staged_files: Files that have been persisted, by rank.
        awaited_files: Files that are not persisted yet, by rank.
        transferring_ranks: Ranks that have sent chunks of their files.
    """

    index: int
    make_manifest: Callable[[list[StagedFiles]], Manifest]
    start_time: float
    name: str
    staging_directory: Path
    in_place: bool = False
    uploaded_names: dict[int, str] = field(default_factory=dict)
    staged_files: dict[int, StagedFiles] = field(default_factory=dict)
    awaited_files: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)
    transferring_ranks: set[int] = field(default_factory=set)

    def resolve_name(self) -> str:
        """Return the name of the uploaded checkpoint, or its own name if it was not uploaded.

        Raises:
            ValueError: The upload function returned different names on the ranks.
        """
        if len(set(self.uploaded_names.values())) > 1:
            names = ", ".join(
                f"{name!r} (rank {rank})" for rank, name in self.uploaded_names.items()
            )
            raise ValueError(
                f"checkpoint_upload_fn must return the same path on all ranks, found {names}. "
                "Upload the files of all ranks to one directory"
            )
        return next(iter(self.uploaded_names.values()), self.name)
