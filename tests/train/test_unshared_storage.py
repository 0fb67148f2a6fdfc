"""Two nodes with a storage path that they do not share: a mount namespace of its own for one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import ray

from drawbar import train
from drawbar.train import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A folder that a second node will not share."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace of its own needs the right to make one")
    (tmp_path / "storage").mkdir()
    return tmp_path / "storage"


def two_nodes(path: Path) -> Iterator[None]:
    """Start Ray here, and a second node that has an empty folder of its own at `path`."""
    ray.init(num_cpus=1, include_dashboard=False)
    script = Path(sys.executable).with_name("ray")
    address = ray.get_runtime_context().gcs_address
    own = f"mount -t tmpfs none {path} && mount -t tmpfs none /tmp/ray"  # `ray start` leaves a file
    command = f"{own} && exec {script} start --address={address} --num-cpus=1"
    node = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{command} --block"], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len([each for each in ray.nodes() if each["Alive"]]) < 2:  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, "the second node does not come up"
    yield
    node.terminate()
    node.wait()


def big(rank: int) -> bytes:
    return bytes([rank + 1]) * 20_000_000


def function() -> list[str]:
    rank = train.get_context().get_world_rank()
    newest = train.get_checkpoint()
    if newest is not None:
        return sorted(each.name for each in Path(newest).rglob("part_*"))
    with train.checkpoint_dir() as path:
        (path / "deep").mkdir()
        (path / "deep" / f"part_{rank}").write_bytes(big(rank))
        (path / f"empty_{rank}").touch()
        train.report({}, checkpoint=path)
    if rank == 1:
        os._exit(1)
    return []


def fit(path: Path) -> Result:
    failures = FailureConfig(max_failures=1)
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(name="run", storage_path=path, failure_config=failures),
    ).fit()


def test_checkpoints_travel_both_ways(hidden: Path, drivers: Drivers) -> None:
    def main() -> None:
        for _ in two_nodes(hidden):
            result: Any = fit(hidden)
            print("found", result.return_values)

    with drivers(main, RAY_ADDRESS="local") as driver:
        out, err = driver.communicate(timeout=150)
    assert "does not share" in err, err
    parts = ["part_0", "part_1"]
    assert f"found {[parts, parts]}" in out, err
    checkpoint = Result.from_path(hidden / "run").checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert [(Path(checkpoint) / "deep" / f"part_{r}").read_bytes() for r in (0, 1)] == [
        big(0),
        big(1),
    ]
