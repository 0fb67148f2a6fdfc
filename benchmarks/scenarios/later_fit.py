"""A later fit() of a driver, and a restart, of a function that imports torch or transformers.

"bare" is Drawbar with `forkserver_preload=[]`, so each worker imports.
The first `fit()` of each library is not measured.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario, faster_than_ray_train

MODULES = {"torch": "torch", "transformers": "transformers.trainer"}
MANY_WORKERS = 6


def _train(library: Library, module: str, folder: Path) -> None:
    """Write the time of the first line after the imports; rank 1 is killed in the first attempt."""
    import importlib

    importlib.import_module(module)
    first_line = time.time()
    import torch.distributed

    rank = library.train.get_context().get_world_rank()
    was_killed = (folder / "killed").exists()
    (folder / f"{'again' if was_killed else 'first'}-{rank}").write_text(repr(first_line))
    library.train.report({"rank": rank})
    torch.distributed.barrier()
    if was_killed:
        return
    if rank == 1:
        (folder / "killed").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)


def _read_last_rank(folder: Path, name: str) -> float:
    return max(float(path.read_text()) for path in folder.glob(f"{name}-*"))


def _function(library: Library, module: str, folder: Path) -> Callable[[], None]:
    def function() -> None:
        _train(library, module, folder)

    return function


def _fits(library: Library, repetitions: int, **settings: Any) -> Samples:
    samples: Samples = {}
    with fresh_cluster() as storage:
        for name, module in MODULES.items():
            for repetition in range(1 + repetitions):
                folder = Path(tempfile.mkdtemp(dir=storage))
                trainer = library.trainer(
                    _function(library, module, folder),
                    storage=storage,
                    torch=True,
                    max_failures=1,
                    **settings,
                )
                start = time.time()
                trainer.fit()
                if repetition == 0:
                    continue  # it reads files that are not in memory yet
                later = _read_last_rank(folder, "first") - start
                killed = float((folder / "killed").read_text())
                samples.setdefault(f"later_{name}", []).append(later)
                restart = _read_last_rank(folder, "again") - killed
                samples.setdefault(f"restart_{name}", []).append(restart)
    return samples


def _import_all() -> tuple[float, float]:
    """Import on many ranks; return the CPU seconds of the machine, and the own memory in MB."""
    import psutil
    import torch.distributed
    import transformers.trainer  # noqa: F401  # its time is measured

    torch.distributed.barrier()
    times = psutil.cpu_times()
    memory = psutil.Process().memory_full_info().uss / 2**20
    torch.distributed.barrier()  # no worker ends before
    return times.user + times.nice + times.system, memory


def _many_workers(**settings: Any) -> Samples:
    import psutil

    samples: Samples = {"cpu": [], "uss": []}
    with fresh_cluster() as storage:
        for repetition in range(3):
            trainer = DRAWBAR.trainer(
                _import_all, storage=storage, torch=True, workers=MANY_WORKERS, **settings
            )
            times = psutil.cpu_times()
            before = times.user + times.nice + times.system
            values = trainer.fit().return_values
            if repetition > 0:
                samples["cpu"].append(max(after for after, _ in values) - before)
                samples["uss"].append(statistics.median(memory for _, memory in values))
    return samples


def _drawbar() -> Samples:
    return {**_fits(DRAWBAR, repetitions=3), **_many_workers()}


def _drawbar_fresh() -> Samples:
    fresh: dict[str, Any] = {"forkserver_preload": []}
    return {**_fits(DRAWBAR, repetitions=3, **fresh), **_many_workers(**fresh)}


def _ray_train() -> Samples:
    return _fits(RAY_TRAIN, repetitions=1)


def _goals(at_most: float) -> tuple[Goal, ...]:
    return (Goal(over="drawbar", under="bare", at_most=at_most), faster_than_ray_train())


SCENARIO = Scenario(
    name="later_fit",
    title="From a later fit(), or a SIGKILL, to the last rank's first line after the imports",
    note="2 workers. bare: Drawbar with forkserver_preload=[], so each worker imports.",
    measures=(
        Measure(key="later_torch", label="later fit(), torch", goals=_goals(0.25)),
        Measure(key="restart_torch", label="restart, torch", goals=_goals(0.25)),
        Measure(key="later_transformers", label="later fit(), transformers", goals=_goals(0.2)),
        Measure(key="restart_transformers", label="restart, transformers", goals=_goals(0.2)),
        Measure(
            key="cpu",
            label=f"CPU time of a later start of {MANY_WORKERS} workers, transformers",
            goals=(Goal(over="drawbar", under="bare", at_most=0.2),),
            sides=("drawbar", "bare"),
        ),
        Measure(
            key="uss",
            label="memory that each of them does not share (USS, MB)",
            unit="",
            goals=(Goal(over="drawbar", under="bare", at_most=0.35),),
            sides=("drawbar", "bare"),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _drawbar_fresh},
    timeout=400,
)
