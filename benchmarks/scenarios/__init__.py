"""The scenarios, in the order in which they run. Add one by adding its file to this list."""

from __future__ import annotations

from benchmarks._scenario import Scenario
from benchmarks.scenarios import (
    chaos,
    checkpoint,
    ddp_steps,
    empty_fit,
    exception,
    first_line,
    import_time,
    lightning_steps,
    many_workers,
    report,
    worker_killed,
)

SCENARIOS: list[Scenario] = [
    import_time.SCENARIO,
    empty_fit.SCENARIO,
    first_line.SCENARIO,
    report.SCENARIO,
    checkpoint.SCENARIO,
    exception.SCENARIO,
    worker_killed.SCENARIO,
    ddp_steps.SCENARIO,
    lightning_steps.SCENARIO,
    many_workers.SCENARIO,
    chaos.SCENARIO,
]
