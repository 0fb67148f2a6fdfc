"""Cost of a report() without checkpoint for the training loop, and its latency to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario, faster_than_ray_train

STEP_SECONDS = 0.02
"""Duration of a step of the loop in which the latency is measured."""


def _loop(library: Library, spaced: int, chunks: int, chunk: int) -> Callable[[], list[float]]:
    """Make the training function: spaced reports for the latency, then bursts for the cost."""

    def function() -> list[float]:
        train = library.train
        for step in range(spaced):
            train.report({"step": step, "loss": 0.5, "sent": time.time()})
            time.sleep(STEP_SECONDS)
        costs = []
        for _ in range(chunks):
            start = time.perf_counter()
            for step in range(chunk):
                train.report({"step": step, "loss": 0.5})
            costs.append((time.perf_counter() - start) / chunk)
        return costs

    return function


def _observer(library: Library, seen: Path) -> Any:
    """Make a callback that appends each report's latency, in seconds, to the file `seen`."""
    base: Any = library.train.UserCallback

    class Observer(base):  # type: ignore[misc]  # mypy cannot know which library's base it is
        def after_report(
            self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
        ) -> None:
            now = time.time()
            if "sent" in metrics[0]:
                with seen.open("a") as stream:
                    print(now - metrics[0]["sent"], file=stream)

    return Observer()


def _time_requests(chunks: int, chunk: int) -> list[float]:
    """Return the seconds that a call of `should_checkpoint()` takes, in several bursts."""

    def function() -> list[float]:
        costs = []
        for _ in range(chunks):
            start = time.perf_counter()
            for _ in range(chunk):
                DRAWBAR.train.should_checkpoint()
            costs.append((time.perf_counter() - start) / chunk)
        return costs

    with fresh_cluster() as storage:
        result = DRAWBAR.trainer(function, storage=storage, callbacks=[]).fit()
        costs: list[float] = result.return_value
    return costs


def _measure(library: Library, **counts: int) -> Samples:
    with fresh_cluster() as storage:
        seen = storage / "seen"
        callbacks = [_observer(library, seen)]
        function = _loop(library, **counts)
        result = library.trainer(function, storage=storage, callbacks=callbacks).fit()
        latencies = [float(line) for line in seen.read_text().split()]
    return {"cost": result.return_value, "latency": latencies}


def _drawbar() -> Samples:
    samples = _measure(DRAWBAR, spaced=50, chunks=10, chunk=1000)
    return {**samples, "request": _time_requests(chunks=10, chunk=10_000)}


def _ray_train() -> Samples:
    # The first two reports find an empty queue; the bursts come after them.
    return _measure(RAY_TRAIN, spaced=3, chunks=4, chunk=1)


SCENARIO = Scenario(
    name="report",
    title="report() of metrics without a checkpoint, 2 workers",
    note=(
        "Drawbar: 10 bursts of 1,000 calls; ray.train: 4 single calls, since each takes as long "
        "as its poll. Latency: from the call to UserCallback.after_report, one report per 20 ms."
    ),
    measures=(
        Measure(
            key="cost",
            label="cost of one call to the loop",
            goals=(faster_than_ray_train(at_least=1000),),
        ),
        Measure(
            key="latency",
            label="until the callback saw it",
            goals=(faster_than_ray_train(),),
        ),
        Measure(
            key="request",
            label="one call of should_checkpoint()",
            goals=(Goal(over="drawbar", at_most=20e-6),),
            sides=("drawbar",),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train},
)
