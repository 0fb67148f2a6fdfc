"""How far a training has come: a file beside the model in each checkpoint.

A booster knows its trees and nothing of how they were found. To go on as if nothing had happened, a
resumed run also needs the evaluations so far and what early stopping has seen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drawbar.train import Checkpoint

FILENAME = "progress.json"

History = dict[str, dict[str, list[float]]]
"""The evaluations: dataset to metric to one value per round."""


@dataclass(frozen=True)
class Progress:
    """What was done before this attempt.

    Args:
        rounds: Number of boosting rounds done.
        history: The evaluations of these rounds.
        early_stopping: What the library's early stopping needs to go on; JSON-able.
    """

    rounds: int = 0
    history: History = field(default_factory=dict)
    early_stopping: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        (folder / FILENAME).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(checkpoint: Checkpoint) -> Progress | None:
        """Read it from a checkpoint; None if that has none, as one that the user's code made."""
        with checkpoint.as_directory() as folder:
            path = Path(folder, FILENAME)
            return Progress(**json.loads(path.read_text())) if path.exists() else None
