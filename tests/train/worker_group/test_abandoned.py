"""What a killed host of a run had asked for is there for the next one."""

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


class Told(UserCallback):
    def __init__(self) -> None:
        self.event = threading.Event()

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.event.set()


class Trial:
    """A process that hosts runs, as a trial of Ray Tune whose function calls `fit()`."""

    def start(self, path: Path) -> None:
        """Come back when the run's worker computes."""
        told = Told()
        config = RunConfig(storage_path=path, callbacks=[told])
        self.run = DataParallelTrainer(endless, scaling_config=ALL, run_config=config).start()
        assert told.event.wait(60)

    def fit(self, path: Path) -> str:
        config = RunConfig(storage_path=path)
        trainer = DataParallelTrainer(train.get_context, scaling_config=ALL, run_config=config)
        return trainer.start().wait(timeout=60).path


def endless() -> None:
    train.report({})
    threading.Event().wait()


def test_what_a_killed_task_had_asked_for_is_free_again(tmp_path: Path, pipe: Pipe) -> None:
    def sweep() -> None:
        Trial().start(tmp_path)
        pipe.say("computes")
        threading.Event().wait()

    task = ray.remote(num_cpus=0, max_retries=0)(sweep).remote()
    pipe.hear()
    ray.cancel(task, force=True)
    with pytest.raises(RayError):
        ray.get(task)
    assert Trial().fit(tmp_path)


def test_what_a_killed_actor_had_asked_for_is_free_again(tmp_path: Path) -> None:
    """Ray by itself keeps it until the job ends."""
    trials: list[Any] = [ray.remote(num_cpus=0)(Trial).remote() for _ in range(2)]
    ray.get(trials[0].start.remote(tmp_path))
    ray.kill(trials[0])
    assert ray.get(trials[1].fit.remote(tmp_path))
    ray.kill(trials[1])
