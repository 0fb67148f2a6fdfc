"""The example does what it says, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/lightgbm_trees.py"


def test_lightgbm_learns_and_shows_it(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, str(EXAMPLE), "--rounds", "30"],
        env={**os.environ, "HOME": str(tmp_path)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert float(re.findall(r"'validation-multi_error': ([\d.]+)", output)[0]) < 0.06
    figure = tmp_path / "drawbar_results/digits-trees/learning.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
