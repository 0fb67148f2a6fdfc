"""How far a training has come: a file beside the model in each checkpoint.

A booster knows its trees and nothing of how they were found. To go on as if nothing had happened, a
resumed run also needs the evaluations so far. What early stopping has seen follows from these: the
library's own callback is shown them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drawbar.train import Checkpoint

FILENAME = "progress.json"

EvaluationHistory = dict[str, dict[str, Any]]
"""The evaluations: dataset to metric to a list of one value per round."""


@dataclass(frozen=True)
class BoostingProgress:
    """What was done before this attempt.

    Args:
        rounds: Number of boosting rounds done.
        history: The evaluations of these rounds, without those before what the training began with.
        details: What else the library must know; JSON-able.
    """

    rounds: int = 0
    history: EvaluationHistory = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def first_recorded_round(self) -> int:
        """The first round that the history knows."""
        values = [each for by_metric in self.history.values() for each in by_metric.values()]
        return self.rounds - max(map(len, values), default=0)

    def iter_rounds(self) -> Iterator[EvaluationHistory]:
        """Give the evaluations of each round from `first` on, as a history of one round."""
        for number in range(self.rounds - self.first_recorded_round):
            yield {
                dataset: {metric: [values[number]] for metric, values in by_metric.items()}
                for dataset, by_metric in self.history.items()
            }

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        (folder / FILENAME).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(checkpoint: Checkpoint) -> BoostingProgress | None:
        """Read it from a checkpoint; None if that has none, as one that the user's code made."""
        with checkpoint.as_directory() as folder:
            path = Path(folder, FILENAME)
            return BoostingProgress(**json.loads(path.read_text())) if path.exists() else None
