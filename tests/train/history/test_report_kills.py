"""Random kills of a run that reports metrics lose no report.

`python -m benchmarks._report_kills` does the same with 500 kills.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_reports_with_random_kills_are_not_lost(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "benchmarks._report_kills", "--kills=10", "--seed=7"]
    ended = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
