"""Compare interrupted runs of a framework with uninterrupted ones, step by step.

A framework has a module with two functions:

- `draw(rng)` returns the settings of a random scenario, a dict.
- `train(settings, steps)` is the training function. It calls `steps.add(key, value)` for each step,
  with a key that is equal after a restart, and `steps.save()` after each checkpoint.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from benchmarks._soak_run import HANG_SECONDS, STOP
from drawbar.torch import TorchTrainer
from drawbar.train import (
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)

MAX_STOPS = 3


@dataclass
class Steps:
    """Steps of one attempt.

    Attributes:
        stop: Number of steps after which the attempt fails; None to run to the end.
        values: The values of each step by its key: samples and losses.
        num_saved: Number of steps of this attempt in its newest checkpoint; None without one.
    """

    stop: int | None
    values: dict[Any, Any] = field(default_factory=dict)
    num_saved: int | None = None

    def add(self, key: Any, value: Any) -> None:
        """Add a step that is complete."""
        if key in self.values:
            raise AssertionError(f"step {key} was repeated within an attempt")
        self.values[key] = value

    def save(self) -> None:
        """Count all steps as saved."""
        self.num_saved = len(self.values)

    def stop_if_planned(self) -> None:
        """Fail after the planned number of steps."""
        if len(self.values) == self.stop:
            raise RuntimeError(STOP)


class Framework(Protocol):
    """Module with the scenarios of a framework."""

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Return the settings of a random scenario."""
        ...

    def train(self, settings: dict[str, Any], steps: Steps) -> object:
        """Train, and return the weights."""
        ...


def check_restarts(framework: Framework, seed: int, number: int) -> tuple[list[str], str]:
    """Run a random scenario with failures and without.

    Args:
        framework: Module of the framework.
        seed: Seed of the soak test.
        number: Number of the scenario.

    Returns:
        A line for each violation, and a description of the scenario.
    """
    rng = random.Random(f"{seed}/{number}")
    settings = framework.draw(rng)
    (complete,), weights = _fit(framework, settings, [], is_resumed=[])
    count = rng.randint(1, MAX_STOPS)
    stops = [rng.randint(1, max(1, 2 * len(complete.values) // count)) for _ in range(count)]
    is_resumed = [rng.random() < 0.3 for _ in stops]
    attempts, resumed_weights = _fit(framework, settings, stops, is_resumed)
    violations = list(_compare(complete, attempts))
    if weights != resumed_weights:
        violations.append(f"the weights are {resumed_weights} instead of {weights}")
    return violations, f"settings {settings}, stops {stops}, is_resumed {is_resumed}"


def _fit(
    framework: Framework, settings: dict[str, Any], stops: list[int], is_resumed: list[bool]
) -> tuple[list[Steps], object]:
    """Train until an attempt is not stopped; return the steps of each attempt and the weights.

    After a failure, the run either restarts by itself or is resumed by another `fit()`.
    """
    attempts: list[Steps] = []

    def train() -> object:
        number = len(attempts)
        attempts.append(Steps(stops[number] if number < len(stops) else None))
        return framework.train(settings, attempts[-1])

    with tempfile.TemporaryDirectory(prefix="drawbar-soak-") as folder:
        settings = {**settings, "folder": folder}
        while True:
            begun = len(attempts)
            restarts = next((n for n, each in enumerate(is_resumed[begun:]) if each), len(stops))
            run_config = RunConfig(
                name="run",
                storage_path=folder,
                failure_config=FailureConfig(max_failures=restarts, hang_timeout=HANG_SECONDS),
                logging_config=LoggingConfig("ERROR"),
            )
            trainer = TorchTrainer(
                partial(train), scaling_config=ScalingConfig(num_workers=0), run_config=run_config
            )
            try:
                return attempts, trainer.fit().return_value
            except TrainingFailedError as error:
                if STOP not in str(error):
                    raise


def _compare(complete: Steps, attempts: list[Steps]) -> Iterator[str]:
    """Compare the steps of all attempts with an uninterrupted run."""
    keys, begin = list(complete.values), 0
    for number, attempt in enumerate(attempts):
        expected = keys[begin : begin + len(attempt.values)]
        if list(attempt.values) != expected:
            yield f"attempt {number} has steps {list(attempt.values)} instead of {expected}"
            return
        for key, value in attempt.values.items():
            if value != complete.values[key]:
                yield f"attempt {number}, step {key}: {value} instead of {complete.values[key]}"
        if number == len(attempts) - 1 and begin + len(expected) != len(keys):
            yield f"the steps {keys[begin + len(expected) :]} are missing"
        begin += attempt.num_saved or 0
