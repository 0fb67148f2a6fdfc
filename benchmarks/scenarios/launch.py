"""One script under `drawbar launch` and under torchrun: its first line, and its steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._scenario import Goal, Measure, Samples, Scenario

WORKERS = 2
STARTS = 3
SCRIPT = str(Path(__file__).with_name("_launch_script.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
LAUNCH = ["-m", "drawbar.cli", "launch"]


def _run(launcher: Sequence[str], *arguments: str) -> tuple[float, dict[str, Any]]:
    """Run the script; return the seconds to its first line, and its result."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, *launcher, f"--nproc-per-node={WORKERS}", SCRIPT, str(answer)]
        start = time.time()
        subprocess.run([*command, *arguments], check=True)
        result: dict[str, Any] = json.loads(answer.read_text())
        return result["first"] - start, result


def _drawbar(starts: int = STARTS) -> Samples:
    import ray

    samples: Samples = {}
    with fresh_cluster(WORKERS) as storage:
        where = ["--storage-path", str(storage)]
        joined = [*where, "--address", ray.get_runtime_context().gcs_address]
        samples["joined"] = [_run([*LAUNCH, *joined])[0] for _ in range(starts)]
        samples["rate"] = _run([*LAUNCH, *joined], "steps")[1]["rate"]
    with tempfile.TemporaryDirectory() as folder:
        own = ["--standalone", "--storage-path", folder]
        samples["start"] = [_run([*LAUNCH, *own])[0] for _ in range(starts)]
    return samples


def _torchrun() -> Samples:
    starts = [_run(TORCHRUN)[0] for _ in range(STARTS)]
    return {"start": starts, "joined": starts, "rate": _run(TORCHRUN, "steps")[1]["rate"]}


SCENARIO = Scenario(
    name="launch",
    title="A script under drawbar launch and under torchrun, 2 processes",
    note=(
        "bare: torchrun. The first line stands before any import of the script's. Every side "
        "takes its steps with one torch thread per process."
    ),
    measures=(
        Measure(
            key="start",
            label="to the first line, Ray started for it",
            goals=(Goal(over="drawbar", under="bare", at_most=1.5),),
        ),
        Measure(
            key="joined",
            label="to the first line, on a Ray that runs",
            goals=(Goal(over="drawbar", under="bare", at_most=1.5),),
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
