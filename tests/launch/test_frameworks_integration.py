"""Unchanged scripts of each framework have the same losses as with torchrun."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Launch

SCRIPTS = Path(__file__).parents[2] / "examples" / "launch"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # torchrun's default


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("torch_ddp", "torch_ddp"),
        # takes the same steps
        pytest.param("torch_fsdp", "torch_ddp", marks=pytest.mark.nightly),
        pytest.param("lightning_ddp", "lightning_ddp", marks=pytest.mark.nightly),
        pytest.param("transformers_trainer", "transformers_trainer", marks=pytest.mark.nightly),
    ],
)
def test_launch_of_framework_script_has_losses_of_torchrun(
    launch: Launch, name: str, reference: str
) -> None:
    done = launch("", script=(str(SCRIPTS / f"{name}.py"),), **ONE_THREAD)
    assert done.code == 0, done.err
    assert find_losses(done.out) == find_losses(run_torchrun(reference)) != []


@pytest.mark.nightly
def test_launch_of_trl_script_on_one_worker_has_losses_of_python(launch: Launch) -> None:
    script = str(SCRIPTS / "trl_sft.py")
    done = launch("", "--num-workers", "1", script=(script,), **ONE_THREAD)
    assert done.code == 0, done.err
    expected = subprocess.check_output([sys.executable, script], env={**os.environ, **ONE_THREAD})
    assert find_losses(done.out) == find_losses(expected) != []


@pytest.mark.nightly
def test_launch_with_accelerate_config_applies_it(launch: Launch) -> None:
    config = launch.directory / "accelerate.yaml"
    config.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_CPU, use_cpu: true, "
        "mixed_precision: bf16, num_machines: 1, num_processes: 2}"
    )
    script = str(SCRIPTS / "accelerate_loop.py")
    launch.num_workers = None
    done = launch("", "--config_file", str(config), script=(script,), **ONE_THREAD)
    assert done.code == 0, done.err
    expected = run_torchrun("accelerate_loop", ACCELERATE_MIXED_PRECISION="bf16")
    assert find_losses(done.out) == find_losses(expected) != []


@functools.cache
def run_torchrun(name: str, **variables: str) -> bytes:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.check_output(
        [sys.executable, "-m", *launcher, str(SCRIPTS / f"{name}.py")],
        env={**os.environ, **ONE_THREAD, **variables},
    )


def find_losses(output: bytes) -> list[str]:
    return re.findall(r"loss ([\d.]+)", output.decode())
