"""What ranks have handed over, until it is committed: where other nodes have the only copy."""

from __future__ import annotations

import logging
import os

_logger = logging.getLogger("drawbar.train")


class HandedOver:
    """Where each rank has what it has handed over for the checkpoint of a report."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[str, str]] = {}
        self.left: list[str] = []
        """What is not committed and lies on other nodes, a line each; emptied by a commit."""

    def note(self, index: int, rank: int, *, node: str, directory: str) -> None:
        """Take note of a rank's files for report `index`."""
        self._places[index, rank] = node, directory

    def committed(self, index: int) -> None:
        """Forget what a checkpoint was made of."""
        self._places = {key: place for key, place in self._places.items() if key[0] != index}
        self.left.clear()

    def tell(self) -> None:
        """Say where the files of an attempt that is over lie, but those of this node.

        Those are set aside (`_storage/staging.py`), which says where.
        """
        for (index, rank), (node, directory) in sorted(self._places.items()):
            if not os.path.isdir(directory):
                text = f"rank {rank} on node {node} has handed over files for report {index} that "
                self.left.append(f"{text}are not committed; they lie there in {directory}")
                _logger.warning("%s", self.left[-1])
        self._places.clear()
