"""A hundred kills of workers, nodes and drivers: how soon the run makes checkpoints again."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from benchmarks._chaos import unleash
from benchmarks._scenario import Measure, Samples, Scenario

KILLS = 100


def _drawbar(kills: int = KILLS) -> Samples:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as folder:
        recovered = unleash(Path(folder), seed=seed, kills=kills, hazards=())
    return {victim: seconds for victim, seconds in recovered.items()}


SCENARIO = Scenario(
    name="chaos",
    title=f"{KILLS} SIGKILLs of workers, nodes and drivers, 4 workers on 3 nodes",
    note=(
        "After each kill the run's directory is checked; what is lost, or outlives the run, fails "
        "the scenario. The log has the seed."
    ),
    measures=(
        Measure(key="worker", label="from a worker's death to the next committed checkpoint"),
        Measure(key="node", label="from a node's death to the next committed checkpoint"),
        Measure(key="driver", label="from a driver's death, with a new driver, to the next one"),
    ),
    sides={"drawbar": _drawbar},
    timeout=900.0,
)
