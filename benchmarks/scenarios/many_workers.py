"""Reports per second that one controller writes to the journal for 256 workers.

The workers are threads of this process, so that the controller's share can be seen without 256
processes; threads and controller share one interpreter, so the number is a lower bound.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from benchmarks._scenario import Measure, Samples, Scenario

WORKERS = 256
REPORTS = 100


def _report_often() -> None:
    from drawbar.train import report

    for step in range(REPORTS):
        report({"step": step, "loss": 0.5})


def _nothing() -> None:
    pass


def _seconds(function: Callable[[], None]) -> float:
    """Run it on all workers; give the seconds from the call to the `Result`."""
    from drawbar.train import RunConfig
    from drawbar.train.testing import run_in_threads

    with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as storage:
        config = RunConfig(storage_path=storage)
        start = time.perf_counter()
        run_in_threads(function, num_workers=WORKERS, run_config=config)
        return time.perf_counter() - start


def _drawbar() -> Samples:
    empty = [_seconds(_nothing) for _ in range(3)]
    full = [_seconds(_report_often) for _ in range(3)]
    return {"empty": empty, "rate": [WORKERS * REPORTS / seconds for seconds in full]}


SCENARIO = Scenario(
    name="many_workers",
    title="One controller with 256 simulated workers, 100 reports each",
    note="The workers are threads without Ray. Each report is a line of the run's journal.",
    measures=(
        Measure(key="rate", label="reports, start and end of the run included", unit="1/s"),
        Measure(key="empty", label="run of an empty function"),
    ),
    sides={"drawbar": _drawbar},
)
