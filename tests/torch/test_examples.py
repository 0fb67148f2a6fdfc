"""The examples do what they say, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, home: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    environment = {**os.environ, "HOME": str(home)}
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_quickstart(tmp_path: Path) -> None:
    output = run("quickstart.py", tmp_path)
    assert float(re.findall(r"'loss': ([\d.e-]+)", output)[0]) < 0.5
    assert str(tmp_path / "drawbar_results") in output


def test_pytorch_learns_and_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    first = run("pytorch.py", tmp_path)
    assert float(re.findall(r"'accuracy': ([\d.]+)", first)[0]) > 0.95
    assert (tmp_path / "drawbar_results/digits/curves.png").read_bytes().startswith(b"\x89PNG")
    again = run("pytorch.py", tmp_path, "--epochs", "13", "--num-workers", "0")
    assert "'epoch': 12" in again
    assert "checkpoint_000012" in again
