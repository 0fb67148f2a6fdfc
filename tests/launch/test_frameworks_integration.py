"""Scripts of each framework, as they are: the losses are those under torchrun."""

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
    ("name", "same"),
    [
        ("torch_ddp", "torch_ddp"),
        ("torch_fsdp", "torch_ddp"),  # it takes the same steps
        ("lightning_ddp", "lightning_ddp"),
        ("transformers_trainer", "transformers_trainer"),
        ("trl_sft", "trl_sft"),
    ],
)
def test_losses_are_those_under_torchrun(launch: Launch, name: str, same: str) -> None:
    done = launch("", script=(str(SCRIPTS / f"{name}.py"),), **ONE_THREAD)
    assert done.code == 0, done.err
    assert losses(done.out) == losses(under_torchrun(same)) != []


def test_an_accelerator_finds_what_accelerate_config_has_written(launch: Launch) -> None:
    config = launch.folder / "accelerate.yaml"
    config.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_CPU, use_cpu: true, "
        "mixed_precision: bf16, num_machines: 1, num_processes: 2}"
    )
    script = str(SCRIPTS / "accelerate_loop.py")
    done = launch("", "--accelerate-config", str(config), script=(script,), **ONE_THREAD)
    assert done.code == 0, done.err
    theirs = under_torchrun("accelerate_loop", ACCELERATE_MIXED_PRECISION="bf16")
    assert losses(done.out) == losses(theirs) != []


@functools.cache
def under_torchrun(name: str, **variables: str) -> bytes:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.check_output(
        [sys.executable, "-m", *launcher, str(SCRIPTS / f"{name}.py")],
        env={**os.environ, **ONE_THREAD, **variables},
    )


def losses(output: bytes) -> list[str]:
    return re.findall(r"loss ([\d.]+)", output.decode())
