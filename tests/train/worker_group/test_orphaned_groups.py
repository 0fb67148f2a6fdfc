"""Placement groups of a killed host are released for the next run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.exceptions import RayError

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, UserCallback

if TYPE_CHECKING:
    from tests.train.conftest import Pipe

pytestmark = pytest.mark.usefixtures("ray_cluster")

ALL = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 8})


class SetsEvent(UserCallback):
    def __init__(self) -> None:
        self.event = threading.Event()

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.event.set()


class Trial:
    """Host process of runs, like a trial of Ray Tune whose function calls `fit()`."""

    def start(self, path: Path) -> None:
        """Start a run and return when its worker has reported."""
        callback = SetsEvent()
        config = RunConfig(storage_path=path, callbacks=[callback])
        self.run = DataParallelTrainer(endless, scaling_config=ALL, run_config=config).start()
        assert callback.event.wait(300)

    def fit(self, path: Path) -> str:
        config = RunConfig(storage_path=path)
        trainer = DataParallelTrainer(train.get_context, scaling_config=ALL, run_config=config)
        return trainer.start().wait(timeout=300).path


def endless() -> None:
    train.report({})
    threading.Event().wait()


@pytest.mark.nightly
def test_placement_group_of_killed_task_is_removed(tmp_path: Path, pipe: Pipe) -> None:
    def sweep() -> None:
        Trial().start(tmp_path)
        pipe.send("computes")
        threading.Event().wait()

    task = ray.remote(num_cpus=0, max_retries=0)(sweep).remote()
    pipe.receive()
    ray.cancel(task, force=True)
    with pytest.raises(RayError):
        ray.get(task)
    assert Trial().fit(tmp_path)


def test_placement_group_of_killed_actor_is_removed(tmp_path: Path) -> None:
    """Ray itself keeps the group until the job ends."""
    trials: list[Any] = [ray.remote(num_cpus=0)(Trial).remote() for _ in range(2)]
    ray.get(trials[0].start.remote(tmp_path))
    ray.kill(trials[0])
    assert ray.get(trials[1].fit.remote(tmp_path))
    ray.kill(trials[1])
