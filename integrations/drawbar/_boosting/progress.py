"""Boosting progress stored next to the model in a checkpoint.

A booster stores its trees, but not the evaluations so far, which a resumed run needs. Early
stopping derives its state from them: on resume, the library's callback receives them again.
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
"""Evaluations: dataset to metric to a list with one value per round."""


@dataclass(frozen=True)
class BoostingProgress:
    """Progress before this attempt.

    Args:
        rounds: Number of completed boosting rounds.
        history: Evaluations of these rounds, without the rounds of an initial model.
        details: Additional state of the library. Must be JSON-serializable.
    """

    rounds: int = 0
    history: EvaluationHistory = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def first_recorded_round(self) -> int:
        """First round that is in the history."""
        values = [values for by_metric in self.history.values() for values in by_metric.values()]
        return self.rounds - max(map(len, values), default=0)

    def iter_rounds(self) -> Iterator[EvaluationHistory]:
        """Yield the evaluations of each round in the history, as a history of one round."""
        for number in range(self.rounds - self.first_recorded_round):
            yield {
                dataset: {metric: [values[number]] for metric, values in by_metric.items()}
                for dataset, by_metric in self.history.items()
            }

    def save(self, directory: Path) -> None:
        """Write the progress to a checkpoint directory."""
        (directory / FILENAME).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(checkpoint: Checkpoint) -> BoostingProgress | None:
        """Read the progress from a checkpoint; None for checkpoints that user code saved."""
        with checkpoint.as_directory() as directory:
            path = Path(directory, FILENAME)
            return BoostingProgress(**json.loads(path.read_text())) if path.exists() else None
