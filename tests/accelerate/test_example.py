"""The example does what it says, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_digits.py"


def run(home: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "HOME": str(home)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_it_learns_and_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert float(re.findall(r"'accuracy': ([\d.]+)", first)[0]) > 0.93
    again = run(tmp_path, "--epochs", "13", "--num-workers", "1")
    assert "'epoch': 12" in again
    assert "checkpoint_000012" in again
