"""Run the systems of a scenario in turn, several times, each in a new process.

Interleaving (A B C A B C) distributes other load of the machine over all systems, so that the ratio
of their medians stays fair.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._scenario import SIDES, Answer, Samples, Scenario, Side

ROOT = Path(__file__).parents[1]


class SideFailed(Exception):
    """A side's process ended without samples; the message is one line, with where the rest is."""


@dataclass
class Outcome:
    """Samples of one system over all rounds."""

    samples: Samples = field(default_factory=dict)
    rounds: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, samples: Mapping[str, list[float]]) -> None:
        """Add the samples of one round."""
        for key, values in samples.items():
            self.samples.setdefault(key, []).extend(values)


Outcomes = dict[Side, Outcome]
Said = Callable[[str], None]


def run_rounds(scenario: Scenario, rounds: int, logs: Path, say: Said) -> Outcomes:
    """Run a scenario's sides in turn, `rounds` times. A side that fails is noted, not raised."""
    sides = [side for side in SIDES if side in scenario.sides]
    outcomes: Outcomes = {side: Outcome() for side in sides}
    for number in range(1, rounds + 1):
        for side in sides:
            log = logs / f"{scenario.name}.{side}.{number}.log"
            start = time.perf_counter()
            outcome = outcomes[side]
            outcome.rounds += 1
            try:
                outcome.add(run_side(scenario, side, log))
                ending = "done"
            except SideFailed as error:
                outcome.failures.append(str(error))
                ending = f"FAILED: {error}"
            took = time.perf_counter() - start
            say(f"{scenario.name}, round {number}/{rounds}, {side}: {ending} in {took:.0f} s")
    return outcomes


def run_side(scenario: Scenario, side: Side, log: Path) -> Samples:
    """Run one side in a fresh process and give its samples; all it prints goes to `log`.

    Raises:
        SideFailed: It ended with an error, or did not end within `scenario.timeout` seconds.
    """
    command = [sys.executable, "-m", "benchmarks._driver", scenario.name, side]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=scenario.timeout)
        except subprocess.TimeoutExpired:
            raise SideFailed(f"no end after {scenario.timeout:.0f} s; see {log}") from None
        finally:
            _end_session(process)
    if not output:
        raise SideFailed(f"ended with exit code {process.returncode} and no answer; see {log}")
    answer: Answer = json.loads(output)
    if "error" in answer:
        raise SideFailed(f"{answer['error']}; see {log}")
    return answer["samples"]


def _environment() -> dict[str, str]:
    """Return this environment without settings that would change what is compared."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_TRAIN_", "RAY_ADDRESS", "OMP_NUM_THREADS"))
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the driver's process group; Ray's processes end with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
