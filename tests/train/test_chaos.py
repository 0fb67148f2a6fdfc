"""Random kills of workers, nodes, and drivers lose no committed checkpoint.

`make bench` does the same with a hundred kills.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._chaos import draw

KILLS = 10


@pytest.mark.alone  # processes of a killed driver must exit within 5 s
def test_chaos_with_random_kills_loses_nothing_committed(pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--chaos-seed")
    command = [sys.executable, "-m", "benchmarks._chaos", f"--kills={KILLS}", f"--seed={seed}"]
    ended = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, (
        f"pytest tests/train/test_chaos.py --chaos-seed={seed}\n{ended.stdout}"
    )


def test_chaos_plan_is_determined_by_its_seed() -> None:
    assert draw(7, 30) == draw(7, 30) != draw(8, 30)
    victims = [kill.victim for kill in draw(7, 30)]
    for ten in (victims[:10], victims[10:20], victims[20:]):
        assert sorted(ten) == ["driver"] * 2 + ["node"] * 2 + ["worker"] * 6
