"""The soak test of frameworks: compare runs that fail with a run that does not.

    python -m benchmarks soak --framework lightning --scenarios 300 --seed 7

The module of a framework has a function `draw`, which draws a `FrameworkScenario`. `FRAMEWORKS`
names it.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks import _soak_lightning
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, RunConfig, ScalingConfig

FIRST_FAILURES = 12  # failures happen at one of these first training steps of an attempt
MAX_FAILURES = 3


@dataclass
class Recorder:
    """Records the rows of each training step, and fails at the planned ones.

    Args:
        failures: The training step at which each attempt fails, counted from its first.

    Attributes:
        rows: Rows by epoch and batch. The batches after the last checkpoint are trained again.
        weights: The weights after the training, which the training function sets.
    """

    failures: tuple[int, ...] = ()
    rows: dict[tuple[int, int], object] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    _attempt: int = -1
    _steps: int = 0

    def start(self) -> None:
        """Start an attempt."""
        self._attempt, self._steps = self._attempt + 1, 0

    def step(self, epoch: int, batch: int, rows: object) -> None:
        """Record a training step, or fail."""
        if (self._steps,) == self.failures[self._attempt : self._attempt + 1]:
            raise RuntimeError("planned failure of the soak test")
        self._steps += 1
        self.rows[epoch, batch] = rows


class FrameworkScenario(Protocol):
    """A training with a framework."""

    def train(self, recorder: Recorder) -> None:
        """Train, call `recorder.step` in each step, and set `recorder.weights` at the end."""
        ...


FRAMEWORKS: dict[str, Callable[[random.Random], FrameworkScenario]] = {
    "lightning": _soak_lightning.draw,
}


def check_framework_scenario(name: str, seed: int, number: int) -> tuple[object, list[str]]:
    """Run a scenario with and without failures.

    Args:
        name: Name of the framework.
        seed: Seed from which the scenarios are drawn.
        number: Number of the scenario.

    Returns:
        A description of the scenario, and a line for each difference.
    """
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    rng = random.Random(f"{name}-{seed}-{number}")
    scenario = FRAMEWORKS[name](rng)
    failures = tuple(rng.randrange(FIRST_FAILURES) for _ in range(rng.randint(1, MAX_FAILURES)))
    try:
        expected, found = _run(scenario, ()), _run(scenario, failures)
    except Exception as error:
        return (scenario, failures), [f"{type(error).__name__}: {error}"]
    differences = [
        f"epoch {epoch}, batch {batch}: {found.rows.get((epoch, batch))} "
        f"instead of {expected.rows.get((epoch, batch))}"
        for epoch, batch in sorted({*expected.rows, *found.rows})
        if found.rows.get((epoch, batch)) != expected.rows.get((epoch, batch))
    ]
    if found.weights != expected.weights:
        differences.append(f"weights {found.weights} instead of {expected.weights}")
    return (scenario, failures), differences


def _run(scenario: FrameworkScenario, failures: tuple[int, ...]) -> Recorder:
    recorder = Recorder(failures)

    def train() -> None:
        recorder.start()
        scenario.train(recorder)

    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(
                storage_path=storage,
                failure_config=FailureConfig(max_failures=len(failures)),
            ),
        ).fit()
    return recorder
