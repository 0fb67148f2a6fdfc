"""Test of docs/operations/train.sbatch with real Ray and replacements of Slurm's commands.

`ray symmetric-run` refuses to run next to another Ray, and ends all Ray processes that it finds. It
therefore runs in a PID namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar.train.runs import find_run

SCRIPT = Path(__file__).parents[2] / "docs" / "operations" / "train.sbatch"
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
if os.geteuid() != 0:
    NAMESPACE.append("--map-root-user")

TRAIN = """
import os, signal
from drawbar import train

checkpoint = train.get_checkpoint()
first = int(open(f"{checkpoint.path}/step").read()) + 1 if checkpoint else 0
for step in range(first, first + 1 if checkpoint else 10**9):
    with train.checkpoint_dir() as path:
        (path / "step").write_text(str(step))
        train.report({"step": step}, checkpoint=path)
    if step == 0:
        os.kill(int(os.environ["BATCH_SCRIPT"]), signal.SIGUSR1)
"""

SRUN = """#!/bin/bash
export BATCH_SCRIPT=$PPID
while [ "$START_RAY" = no ] && [ "$1" != -- ]; do shift; done
[ "$START_RAY" = no ] && shift
exec "$@"
"""

SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then
    echo localhost
else
    echo "$*" >> calls
fi
"""


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """Return a directory for Ray whose path is short, because it contains sockets."""
    directory = tempfile.mkdtemp(dir="/tmp")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.nightly
def test_sbatch_script_saves_at_the_time_limit_and_resumes(
    tmp_path: Path, ray_directory: str
) -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not create a PID namespace")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, source in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(source)
        (commands / name).chmod(0o700)
    (tmp_path / "train.py").write_text(TRAIN)
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    slurm = {"JOB_NAME": "digits", "JOB_ID": "4242", "JOB_NODELIST": "n1", "NNODES": "1"}
    variables |= {f"SLURM_{name}": value for name, value in slurm.items()}
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables |= {"PATH": path, "STORAGE": str(tmp_path / "runs"), "SLURM_CPUS_PER_TASK": "1"}
    variables |= {
        "HOME": str(tmp_path),
        "RAY_TMPDIR": ray_directory,
        "RAY_gcs_server_port_wait_time_s": "600",
    }

    def submit(**more: str) -> None:
        command = [*NAMESPACE, "bash", str(SCRIPT)]
        process = subprocess.run(
            command, cwd=tmp_path, env=variables | more, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr
        assert "digits-4242  " in process.stdout

    submit()  # sends itself the signal of the time limit
    record = find_run(str(tmp_path / "runs" / "digits-4242"))
    assert record.status == "stopped"
    assert (tmp_path / "calls").read_text() == "requeue 4242\n"
    assert record.metrics is not None
    stopped_at = record.metrics["step"]

    submit(START_RAY="no")  # Slurm starts the requeued job
    record = find_run(str(tmp_path / "runs" / "digits-4242"))
    assert record.status == "finished"
    assert record.metrics == {"step": stopped_at + 1}
    assert (tmp_path / "calls").read_text() == "requeue 4242\n"
