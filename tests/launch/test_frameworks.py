"""Scripts of each framework, as they are: the losses are those under torchrun."""

from __future__ import annotations

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
    "name", ["torch_ddp", "lightning_ddp", "transformers_trainer", "accelerate_loop"]
)
def test_losses_are_those_under_torchrun(launch: Launch, name: str) -> None:
    script = str(SCRIPTS / f"{name}.py")
    ours = launch("", script=(script,), **ONE_THREAD)
    assert ours.code == 0, ours.err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    theirs = subprocess.check_output(
        [*torchrun, "--nproc-per-node", "2", script], env={**os.environ, **ONE_THREAD}
    )
    assert losses(ours.out) == losses(theirs) != []


def losses(output: bytes) -> list[str]:
    return re.findall(r"loss ([\d.]+)", output.decode())
