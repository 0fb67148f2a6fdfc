"""Find files that were moved for a checkpoint that was not committed."""

from __future__ import annotations

import logging
import os

_logger = logging.getLogger("drawbar.train")


class MovedFiles:
    """Directories of moved files that are not committed, by report and rank.

    Attributes:
        remaining: One line for each directory on another node whose files were not committed.
            Emptied by a commit.
    """

    def __init__(self) -> None:
        self._sources: dict[tuple[int, int], tuple[str, str]] = {}
        self.remaining: list[str] = []

    def add(self, index: int, rank: int, *, node: str, directory: str) -> None:
        """Record the directory of the files that a rank moved for report `index`."""
        self._sources[index, rank] = node, directory

    def on_committed(self, index: int) -> None:
        """Remove the entries of a report whose checkpoint is committed."""
        self._sources = {key: source for key, source in self._sources.items() if key[0] != index}
        self.remaining.clear()

    def warn_of_remaining(self) -> None:
        """Log the directories on other nodes whose files were not committed.

        Files on this node are preserved and logged by `_storage/staging.py`.
        """
        for (index, rank), (node, directory) in sorted(self._sources.items()):
            if not os.path.isdir(directory):
                self.remaining.append(
                    f"Rank {rank} on node {node} moved files for report {index}, which were not "
                    f"committed. They are in {directory} on that node."
                )
                _logger.warning("%s", self.remaining[-1])
        self._sources.clear()
