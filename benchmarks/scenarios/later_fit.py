"""A later fit() of a driver, and a restart, of a function that imports torch or transformers.

"bare" is Drawbar with `forkserver_preload=[]`, so each worker imports.
The first `fit()` of each library is not measured.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario, faster_than_ray_train

MODULES = {"torch": "torch", "transformers": "transformers.trainer"}


def _function(library: Library, module: str, killed: Path) -> Callable[[], float]:
    def function() -> float:
        """Return the time of the first line after the imports; rank 1 is killed once."""
        import importlib

        importlib.import_module(module)
        first_line = time.time()
        import torch.distributed

        torch.distributed.barrier()
        if library.train.get_context().get_world_rank() == 1 and not killed.exists():
            killed.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        library.train.report({"first_line": first_line})
        return first_line

    return function


def _measure(library: Library, *, should_fork: bool = True) -> Samples:
    samples: Samples = {}
    with fresh_cluster() as storage:
        for name, module in MODULES.items():
            preload: Any = {} if should_fork else {"forkserver_preload": []}
            for repetition in range(3):
                # The first repetition is not measured: it reads files that are not in memory yet.
                killed = storage / f"{name}_{repetition}"
                function = _function(library, module, killed)
                trainer = library.trainer(
                    function, storage=storage, torch=True, max_failures=1, **preload
                )
                killed.touch()
                start = time.time()
                later = trainer.fit().return_value - start
                killed.unlink()
                trainer = library.trainer(
                    function, storage=storage, torch=True, max_failures=1, **preload
                )
                restarted = trainer.fit().return_value
                restart = restarted - float(killed.read_text())
                if repetition > 0:
                    samples.setdefault(f"later_{name}", []).append(later)
                    samples.setdefault(f"restart_{name}", []).append(restart)
    return samples


def _drawbar() -> Samples:
    return _measure(DRAWBAR)


def _drawbar_fresh() -> Samples:
    return _measure(DRAWBAR, should_fork=False)


def _ray_train() -> Samples:
    return _measure(RAY_TRAIN)


def _goals(at_most: float) -> tuple[Goal, ...]:
    return (Goal(over="drawbar", under="bare", at_most=at_most), faster_than_ray_train())


SCENARIO = Scenario(
    name="later_fit",
    title="From a later fit(), or a SIGKILL, to the first line after the imports, 2 workers",
    note="bare: Drawbar with forkserver_preload=[], so each worker imports.",
    measures=(
        Measure(key="later_torch", label="later fit(), torch", goals=_goals(0.25)),
        Measure(key="restart_torch", label="restart, torch", goals=_goals(0.25)),
        Measure(key="later_transformers", label="later fit(), transformers", goals=_goals(0.2)),
        Measure(key="restart_transformers", label="restart, transformers", goals=_goals(0.2)),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _drawbar_fresh},
)
