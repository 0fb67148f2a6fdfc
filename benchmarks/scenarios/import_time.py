"""Duration of the import in addition to `import ray`, which delays the start of each worker."""

from __future__ import annotations

import subprocess
import sys

from benchmarks._scenario import Goal, Measure, Samples, Scenario, faster_than_ray_train

INTERPRETERS = 5


def _seconds(before: str, module: str) -> list[float]:
    """Import `module` after the statement `before`, each time in a fresh interpreter."""
    code = (
        f"import time; {before}; start = time.perf_counter(); import {module}; "
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(command, check=True, stdout=subprocess.PIPE) for _ in range(INTERPRETERS)
    ]
    return [float(run.stdout) for run in runs]


def _drawbar() -> Samples:
    return {"library": _seconds("import ray", "drawbar.train")}


def _ray_train() -> Samples:
    return {"library": _seconds("import ray", "ray.train")}


def _bare() -> Samples:
    return {"ray": _seconds("pass", "ray")}


SCENARIO = Scenario(
    name="import_time",
    title="Imports in a fresh interpreter",
    note="bare: `import ray` alone, which both libraries need.",
    measures=(
        Measure(
            key="library",
            label="import the library, after import ray",
            goals=(Goal(over="drawbar", at_most=0.15), faster_than_ray_train()),
            sides=("drawbar", "ray.train"),
        ),
        Measure(key="ray", label="import ray", sides=("bare",)),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
