"""A checkpoint between its last report and its commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.staging import Part


@dataclass
class Pending:
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
    manifest: Callable[[list[Part]], Manifest]
    began: float
    name: str
    in_place: bool = False
    places: dict[int, str] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    awaited: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)

    def placed(self) -> str:
        """Give the checkpoint's name by where it lies.

        Raises:
            ValueError: The ranks do not agree on that.
        """
        if len(set(self.places.values())) > 1:
            found = ", ".join(f"{name!r} (rank {rank})" for rank, name in self.places.items())
            raise ValueError(
                "checkpoint_upload_fn must return one place on all ranks, for all of them write "
                f"into one checkpoint; found {found}"
            )
        return next(iter(self.places.values()), self.name)
