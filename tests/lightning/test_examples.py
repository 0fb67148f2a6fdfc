"""The examples do what they say, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_lightning_from_driver(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, str(EXAMPLES / "lightning_from_driver.py")],
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert float(re.findall(r"accuracy: ([\d.]+)", output)[0]) > 0.9
    assert Path(re.findall(r"best checkpoint: (.*)", output)[0]).is_relative_to(tmp_path)
    assert "the weights are here: 0 is a 0" in output


def test_lightning_learns_and_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(EXAMPLES / "lightning_digits.py"), *arguments]
        environment = {**os.environ, "HOME": str(tmp_path)}
        return subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    first = run()
    assert max(map(float, re.findall(r"accuracy ([\d.]+)", first))) > 0.95
    again = run("--epochs", "9", "--num-workers", "0")
    assert "last-step=229" in again  # 8 epochs of 23 steps, and one of 45 on one worker
    assert Path(again.split()[-1]).exists()
