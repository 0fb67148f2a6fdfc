"""The example does what it says, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning.py"


def run(home: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLE), *arguments]
    environment = {**os.environ, "HOME": str(home)}
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_it_learns_and_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert max(map(float, re.findall(r"accuracy ([\d.]+)", first))) > 0.95
    again = run(tmp_path, "--epochs", "9", "--num-workers", "0")
    assert "restarting: from" in again
    assert len(re.findall(r"accuracy", again)) >= 2
    assert Path(again.split()[-1]).exists()
