"""Scripts under `drawbar launch` and under torchrun: their first lines, and their steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._cluster import fresh_cluster
from benchmarks._scenario import Goal, Measure, Samples, Scenario

WORKERS = 2
STARTS = 5
RANKS = 8
SCRIPT = str(Path(__file__).with_name("_launch_script.py"))
IMPORT_SCRIPT = str(Path(__file__).with_name("_import_script.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
LAUNCH = ["-m", "drawbar.cli", "launch"]


class Run(NamedTuple):
    """Seconds from the start of a command to the script's first line and to the command's end.

    Attributes:
        first: Seconds to the first line of rank 0.
        end: Seconds to the end of the command.
        result: Result of the script.
    """

    first: float
    end: float
    result: dict[str, Any]


def _run(launcher: Sequence[str], *arguments: str) -> Run:
    """Run the script under a launcher."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, *launcher, f"--nproc-per-node={WORKERS}", SCRIPT, str(answer)]
        start = time.time()
        subprocess.run([*command, *arguments], check=True)
        end = time.time()
        result: dict[str, Any] = json.loads(answer.read_text())
        return Run(result["first"] - start, end - start, result)


def _start(launcher: Sequence[str], starts: int) -> Samples:
    runs = [_run(launcher) for _ in range(starts)]
    return {"start": [run.first for run in runs], "end": [run.end for run in runs]}


def _import_torch(launcher: Sequence[str]) -> float:
    """Return the seconds until the last of 8 ranks has imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        command = [*launcher, f"--nproc-per-node={RANKS}", IMPORT_SCRIPT, folder]
        subprocess.run([sys.executable, *command], check=True)
        times = [float(path.read_text().split()[0]) for path in Path(folder).iterdir()]
    assert len(times) == RANKS
    return max(times) - start


def _drawbar(starts: int = STARTS) -> Samples:
    import ray

    with tempfile.TemporaryDirectory() as folder:
        local = [*LAUNCH, "--storage-path", folder]
        samples = _start(local, starts)
        samples["rate"] = _run(local, "steps").result["rate"]
        samples["imports"] = [_import_torch(local) for _ in range(starts)]
        samples["standalone"] = _start([*local, "--standalone"], starts)["start"]
    with fresh_cluster(WORKERS) as storage:
        where = ["--storage-path", str(storage)]
        joined = [*where, "--address", ray.get_runtime_context().gcs_address]
        samples["joined"] = _start([*LAUNCH, *joined], starts)["start"]
    return samples


def _torchrun() -> Samples:
    samples = _start(TORCHRUN, STARTS)
    samples["standalone"] = samples["joined"] = samples["start"]
    samples["rate"] = _run(TORCHRUN, "steps").result["rate"]
    samples["imports"] = [_import_torch(TORCHRUN) for _ in range(STARTS)]
    return samples


SCENARIO = Scenario(
    name="launch",
    title="A script under drawbar launch and under torchrun, 2 processes",
    note=(
        "bare: torchrun. The first line is before all imports of the script. Every side "
        "takes its steps with one torch thread per process."
    ),
    measures=(
        Measure(
            key="start",
            label="to the first line",
            goals=(Goal(over="drawbar", under="bare", at_most=1.2),),
        ),
        Measure(
            key="end",
            label="to the end",
            goals=(Goal(over="drawbar", under="bare", at_most=1.2),),
        ),
        Measure(
            key="imports",
            label=f"to the first line of {RANKS} ranks after their import of torch",
            goals=(Goal(over="drawbar", under="bare", at_most=0.4),),
        ),
        Measure(
            key="joined",
            label="to the first line, on a running Ray",
            goals=(Goal(over="drawbar", under="bare", at_most=1.5),),
        ),
        Measure(
            key="standalone",
            label="to the first line, with a new Ray (--standalone)",
            goals=(Goal(over="drawbar", under="bare"),),
        ),
        Measure(
            key="rate",
            label="DDP steps per second",
            unit="1/s",
            goals=(Goal(over="drawbar", under="bare", at_least=0.97),),
        ),
    ),
    sides={"drawbar": _drawbar, "bare": _torchrun},
)
