"""A run that waits for room in the cluster: the CPU time that its waiting takes."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks._cluster import NUM_CPUS, fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario

WORKERS = 2
SETTLE_SECONDS = 4.0
WATCHED_SECONDS = 20.0


def _nothing() -> None:
    pass


def _processes() -> list[Any]:
    """Return the driver and all actors of this cluster, without idle workers of Ray."""
    import psutil

    driver = psutil.Process()
    others = driver.children(recursive=True)
    return [driver, *(each for each in others if _is_actor(each))]


def _is_actor(process: Any) -> bool:
    import psutil

    try:
        title = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return title.startswith("ray::") and not title.startswith("ray::IDLE")


def _cpu_seconds() -> float:
    times = [process.cpu_times() for process in _processes()]
    return float(sum(each.user + each.system for each in times))


def _watch(seconds: float) -> float:
    """Return the CPU seconds per second that are used from now on."""
    before, start = _cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    return (_cpu_seconds() - before) / (time.perf_counter() - start)


def _measure(library: Library | None, seconds: float) -> Samples:
    from ray.util.placement_group import placement_group, remove_placement_group

    with fresh_cluster() as storage:
        occupied = placement_group([{"CPU": NUM_CPUS - 1}])  # one worker has room, two have not
        occupied.wait(30)
        fit = None
        if library is not None:
            trainer = library.trainer(_nothing, storage=storage, workers=WORKERS)
            fit = threading.Thread(target=trainer.fit)
            fit.start()
        time.sleep(SETTLE_SECONDS)
        used = _watch(seconds)
        remove_placement_group(occupied)
        if fit is not None:
            fit.join()
    return {"used": [used]}


def _drawbar(seconds: float = WATCHED_SECONDS) -> Samples:
    return _measure(DRAWBAR, seconds)


def _ray_train(seconds: float = WATCHED_SECONDS) -> Samples:
    return _measure(RAY_TRAIN, seconds)


def _bare(seconds: float = WATCHED_SECONDS) -> Samples:
    return _measure(None, seconds)


SCENARIO = Scenario(
    name="waiting",
    title="CPU used by a run of 2 workers that waits for room",
    note="The driver and the run's actors. bare: a driver that is connected to Ray and is idle.",
    measures=(
        Measure(
            key="used",
            label="CPU seconds per second",
            unit="",
            goals=(Goal(over="drawbar", at_most=0.02), Goal(over="drawbar", under="bare")),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
