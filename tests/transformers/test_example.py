"""The example does what it says, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_gpt.py"


def run(home: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "HOME": str(home)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_it_learns_and_goes_on(tmp_path: Path) -> None:
    first = run(tmp_path, "--steps", "50")
    assert float(re.findall(r"'eval_loss': ([\d.]+)", first)[-1]) < 4
    assert "class datetime(" in first
    again = run(tmp_path, "--steps", "60")
    assert "'step': 60" in again
