"""The scenarios of `make bench` run, in small; what does not depend on the machine is compared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks._scenario import Samples
from benchmarks.scenarios import SCENARIOS


def measure(scenario: str, **size: float) -> Samples:
    """Run Drawbar's side of a scenario in a process of its own, as the benchmarks do."""
    arguments = ", ".join(f"{name}={value}" for name, value in size.items())
    code = (
        f"import json; from benchmarks.scenarios import {scenario} as scenario; "
        f"print(); print(json.dumps(scenario._drawbar({arguments})))"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    samples: Samples = json.loads(out.splitlines()[-1])
    (chosen,) = [each for each in SCENARIOS if each.name == scenario]
    wanted = {measure.key for measure in chosen.measures if "drawbar" in measure.sides}
    assert samples.keys() == wanted
    assert all(samples.values())
    return samples


def test_every_scenario_has_a_name_of_its_own() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)


def test_no_byte_of_a_checkpoint_is_written_twice() -> None:
    for way, ratios in measure("bytes_written", share=8_000_000).items():
        assert ratios[0] <= 1.05, way


@pytest.mark.alone  # measures idleness
@pytest.mark.nightly
def test_waiting_takes_no_cpu() -> None:
    assert measure("waiting", seconds=3)["used"][0] < 0.2  # far more if anything polled


@pytest.mark.parametrize(
    ("scenario", "size"),
    [("async_report", {"nbytes": 1000}), ("save_async", {"nbytes": 1000}), ("resize", {})],
)
@pytest.mark.nightly
def test_it_runs(scenario: str, size: dict[str, float]) -> None:
    measure(scenario, **size)
