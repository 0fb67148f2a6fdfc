"""Thirty injected faults are recognized, and no deterministic one is retried more than once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks._fault_kinds import FAULTS


def test_faults_are_thirty_of_ten_kinds() -> None:
    assert set(Counter(fault.kind for fault in FAULTS).values()) == {3}
    assert len(FAULTS) == 30


@pytest.mark.alone  # a cluster of three nodes
@pytest.mark.nightly
def test_injected_faults_are_classified_right(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "benchmarks", "faults", f"--results={tmp_path}"]
    ended = subprocess.run(
        command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
