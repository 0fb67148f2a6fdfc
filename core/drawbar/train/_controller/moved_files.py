"""What ranks have handed over, until it is committed: where other nodes have the only copy."""

from __future__ import annotations

import logging
import os

_logger = logging.getLogger("drawbar.train")


class MovedFiles:
    """Where each rank has what it has handed over for the checkpoint of a report."""

    def __init__(self) -> None:
        self._sources: dict[tuple[int, int], tuple[str, str]] = {}
        self.remaining: list[str] = []
        """What is not committed and lies on other nodes, a line each; emptied by a commit."""

    def add(self, index: int, rank: int, *, node: str, directory: str) -> None:
        """Take note of a rank's files for report `index`."""
        self._sources[index, rank] = node, directory

    def on_committed(self, index: int) -> None:
        """Forget what a checkpoint was made of."""
        self._sources = {key: place for key, place in self._sources.items() if key[0] != index}
        self.remaining.clear()

    def warn_of_remaining(self) -> None:
        """Say where the files of an attempt that is over lie, but those of this node.

        Those are set aside (`_storage/staging.py`), which says where.
        """
        for (index, rank), (node, directory) in sorted(self._sources.items()):
            if not os.path.isdir(directory):
                text = f"rank {rank} on node {node} has handed over files for report {index} that "
                self.remaining.append(f"{text}are not committed; they lie there in {directory}")
                _logger.warning("%s", self.remaining[-1])
        self._sources.clear()
