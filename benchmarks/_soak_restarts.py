"""Compare interrupted runs of a framework with uninterrupted ones, step by step.

A framework has a module with two functions:

- `draw(rng)` returns the settings of a random scenario, a dict. With `"ranks": 2`, the scenario
  runs on two Ray workers, of which one is killed by SIGKILL. Otherwise it runs in this process.
- `train(settings, steps)` is the training function. It calls `steps.add(key, value)` for each step,
  with a key that is equal after a restart, and `steps.save()` after each checkpoint.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks._soak_run import HANG_SECONDS, STOP
from drawbar.torch import TorchTrainer
from drawbar.train import (
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    get_context,
)

MAX_STOPS = 3


@dataclass
class Steps:
    """Steps of one rank in one attempt.

    Attributes:
        stop: Number of steps after which the rank fails; None to run to the end.
        path: File that contains these steps after each change, also after a SIGKILL.
        is_killed: Whether the rank fails by SIGKILL, instead of by an exception.
        values: The values of each step by its key: samples and losses.
        num_saved: Number of steps of this attempt in its newest checkpoint.
    """

    stop: int | None
    path: Path
    is_killed: bool = False
    values: dict[Any, Any] = field(default_factory=dict)
    num_saved: int = 0

    def add(self, key: Any, value: Any) -> None:
        """Add a step that is complete."""
        if key in self.values:
            raise AssertionError(f"step {key} was repeated within an attempt")
        self.values[key] = value
        self.write()

    def save(self, rest: int = 0) -> None:
        """Count all steps as saved, except the last `rest` ones."""
        self.num_saved = len(self.values) - rest
        self.write()

    def write(self) -> None:
        """Write the file."""
        self.path.write_bytes(pickle.dumps((self.values, self.num_saved)))

    @classmethod
    def read(cls, path: Path) -> Steps:
        """Return the steps in a file."""
        values, num_saved = pickle.loads(path.read_bytes())
        return cls(None, path, values=values, num_saved=num_saved)

    def stop_if_planned(self) -> None:
        """Fail after the planned number of steps."""
        if len(self.values) == self.stop:
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
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
    num_steps = len(complete[0].values)
    count = rng.randint(1, MAX_STOPS)
    stops = [rng.randint(1, max(1, 2 * num_steps // count)) for _ in range(count)]
    is_resumed = [rng.random() < 0.3 for _ in stops]
    attempts, resumed_weights = _fit(framework, settings, stops, is_resumed)
    violations: list[str] = []
    for rank, steps in enumerate(complete):
        violations += _compare(steps, [attempt[rank] for attempt in attempts], rank)
    if weights != resumed_weights:
        violations.append(f"the weights are {resumed_weights} instead of {weights}")
    return violations, f"settings {settings}, stops {stops}, is_resumed {is_resumed}"


def _fit(
    framework: Framework, settings: dict[str, Any], stops: list[int], is_resumed: list[bool]
) -> tuple[list[list[Steps]], object]:
    """Train until an attempt is not stopped.

    After a failure, the run either restarts by itself or is resumed by another `fit()`.

    Returns:
        The steps of each attempt and rank, and the weights.
    """
    ranks = settings.get("ranks", 1)
    with tempfile.TemporaryDirectory(prefix="drawbar-soak-") as folder:
        settings = {**settings, "folder": folder}
        train = partial(_train, framework.train, settings, stops)
        begun = 0
        while True:
            restarts = next((n for n, each in enumerate(is_resumed[begun:]) if each), len(stops))
            run_config = RunConfig(
                name="run",
                storage_path=folder,
                failure_config=FailureConfig(max_failures=restarts, hang_timeout=HANG_SECONDS),
                logging_config=LoggingConfig("ERROR"),
            )
            trainer = TorchTrainer(
                train,
                scaling_config=ScalingConfig(num_workers=ranks if ranks > 1 else 0),
                run_config=run_config,
            )
            try:
                weights = trainer.fit().return_value
            except TrainingFailedError as error:
                if (STOP if ranks == 1 else "SIGKILL") not in str(error):
                    raise
                begun = len(_read_steps(folder, ranks))
            else:
                return _read_steps(folder, ranks), weights


def _train(
    function: Callable[[dict[str, Any], Steps], object], settings: dict[str, Any], stops: list[int]
) -> object:
    """Train in one rank of an attempt; which rank is killed depends on the attempt."""
    rank, world_size = get_context().get_world_rank(), get_context().get_world_size()
    folder = Path(settings["folder"])
    number = len(list(folder.glob(f"*.{rank}.steps")))
    stop = stops[number] if number < len(stops) and number % world_size == rank else None
    steps = Steps(stop, folder / f"{number}.{rank}.steps", is_killed=world_size > 1)
    steps.write()
    return function(settings, steps)


def _read_steps(folder: str, ranks: int) -> list[list[Steps]]:
    """Return the steps of each attempt and rank."""
    number = len(list(Path(folder).glob("*.0.steps")))
    attempts = []
    for attempt in range(number):
        paths = [Path(folder) / f"{attempt}.{rank}.steps" for rank in range(ranks)]
        attempts.append([Steps.read(path) for path in paths])
        # A rank that was not killed may wait for a checkpoint that is never committed.
        num_saved = min(each.num_saved for each in attempts[-1])
        for steps in attempts[-1]:
            steps.num_saved = num_saved
    return attempts


def _compare(complete: Steps, attempts: list[Steps], rank: int) -> Iterator[str]:
    """Compare the steps of all attempts of a rank with an uninterrupted run."""
    keys, begin = list(complete.values), 0
    for number, attempt in enumerate(attempts):
        name = f"attempt {number} of rank {rank}"
        expected = keys[begin : begin + len(attempt.values)]
        if list(attempt.values) != expected:
            yield f"{name} has steps {list(attempt.values)} instead of {expected}"
            return
        for key, value in attempt.values.items():
            if value != complete.values[key]:
                yield f"{name}, step {key}: {value} instead of {complete.values[key]}"
        if number == len(attempts) - 1 and begin + len(expected) != len(keys):
            yield f"the steps {keys[begin + len(expected) :]} are missing"
        begin += attempt.num_saved
