"""Run a driver with a tracker that is killed twice and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from drawbar.train import runs

DRIVER = Path(__file__).with_name("driver.py")
LOSS, NAN, ODD = "loss", "nested/nan", 'odd <name>\n"\u2028é%'


def run_killed_twice(storage: Path, tracker: str, **options: Any) -> Path:
    """Run the driver three times and return the run directory."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for start, expected in enumerate((-signal.SIGKILL, -signal.SIGKILL, 0)):
        arguments = [str(storage), tracker, json.dumps(options), str(start)]
        driver = subprocess.run(
            [sys.executable, str(DRIVER), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert driver.returncode == expected, driver.stderr
        assert "has failed" not in driver.stderr
    return storage / "run"


def list_losses(path: Path) -> list[tuple[int, float]]:
    """Return the number and the loss of each report that counts."""
    return [(row["index"], row["loss"]) for row in runs.find_run(path).iter_report_rows()]
