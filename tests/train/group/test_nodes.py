"""Nodes come, go and are drained while a run goes on: each test has a cluster of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DriversFixture = Callable[..., Any]
SHOWN = "shown: "


def run_on_cluster(drivers: DriversFixture, main: Callable[[], Any]) -> Any:
    """Run a driver of its own; gives what it shows, see `Stage.show`."""
    with drivers(main, RAY_ADDRESS="") as driver:
        try:
            out, err = driver.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            driver.kill()
            out, err = driver.communicate()
            pytest.fail(f"the driver hangs:\n{out}\n{err}")
    assert driver.returncode == 0, err
    (shown,) = [line for line in out.splitlines() if line.startswith(SHOWN)]  # Ray prints there too
    return json.loads(shown.removeprefix(SHOWN))


class Stage:
    """A Ray cluster of one-CPU nodes, and one run on it in a thread."""

    def __init__(self, folder: Path, nodes: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.said = folder / "said"
        os.mkfifo(self.said)
        self._ear = open(self.said, "r+b", buffering=0)  # noqa: SIM115  # open as long as the process
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(nodes)]
        ray.init(address=self.cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        self.cluster.wait_for_nodes()

    def fit(self, function: Any, num_workers: Any, **failure: Any) -> threading.Thread:
        """Begin the run; its result, or its error, is found in `self.result` in the end."""
        from drawbar.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

        trainer = DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name="run", storage_path=self.folder, failure_config=FailureConfig(**failure)
            ),
        )

        def run() -> None:
            self.result = trainer.fit()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def hear(self, count: int) -> dict[str, str]:
        """Wait for lines of two words from the training function."""
        lines = [self._ear.readline().decode().split() for _ in range(count)]
        return {word: value for word, value in lines}

    def node_of(self, node_id: str) -> Any:
        """Give the node with this id."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def show(self, *more: Any) -> None:
        """Print what a test compares: return values, world sizes and outcomes of the attempts."""
        import ray

        attempts = self.result.timeline.attempts
        sizes = [attempt.world_size for attempt in attempts]
        outcomes = [attempt.outcome.split(":")[0] for attempt in attempts]
        shown = json.dumps([self.result.return_values, sizes, outcomes, *more])
        print(f"\n{SHOWN}{shown}", flush=True)
        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here
        os._exit(0)  # Ray's own end of a process whose cluster is gone takes long


def checkpoint_each_step(said: Path, until: Callable[[int, int], bool]) -> Callable[[], list[int]]:
    """Make a function that checkpoints for ever, until `until(step, world size)`."""

    def function() -> list[int]:
        import ray

        from drawbar import train

        context = train.get_context()
        checkpoint = train.get_checkpoint()
        step = int((Path(checkpoint) / "step").read_text()) if checkpoint else 0
        node = ray.get_runtime_context().get_node_id()
        while True:
            step += 1
            with train.checkpoint_dir() as path:
                if context.get_world_rank() == 0:
                    (path / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
            if step == 2:
                said.write_text(f"{context.get_world_rank()} {node}\n")
            done = train.collective.all_gather(until(step, context.get_world_size()))
            if all(done):
                return [context.get_attempt(), context.get_world_size()]

    return function


def test_a_lost_node_is_replaced_by_one_that_joins(drivers: DriversFixture, tmp_path: Path) -> None:
    def main() -> None:
        stage = Stage(tmp_path, nodes=2)
        moved = tmp_path / "moved"
        function = checkpoint_each_step(stage.said, lambda step, size: moved.exists())
        thread = stage.fit(function, num_workers=2)
        homes = stage.hear(2)
        stage.cluster.remove_node(stage.node_of(homes["1"]), allow_graceful=False)
        stage.cluster.add_node(num_cpus=1)
        moved.touch()
        thread.join()
        stage.show()

    values, sizes, outcomes = run_on_cluster(drivers, main)
    # Until Ray counts the node as dead, a replacement may be sent there and fail to start.
    assert values[0] == values[1] == [len(sizes) - 1, 2]
    assert sizes[0] == sizes[-1] == 2
    assert outcomes == ["failed"] * (len(sizes) - 1) + ["finished"]


def test_an_elastic_group_shrinks_and_grows(drivers: DriversFixture, tmp_path: Path) -> None:
    def main() -> None:
        stage = Stage(tmp_path, nodes=2)
        back = tmp_path / "back"
        function = checkpoint_each_step(stage.said, lambda step, size: back.exists() and size == 3)
        thread = stage.fit(function, num_workers=(1, 3))
        homes = stage.hear(2)
        stage.cluster.remove_node(stage.node_of(homes["1"]), allow_graceful=False)
        for _ in range(2):
            stage.cluster.add_node(num_cpus=1)
        back.touch()
        thread.join()
        stage.show()

    values, sizes, outcomes = run_on_cluster(drivers, main)
    assert [size for _, size in values] == [3, 3, 3]
    assert sizes[0] == 2
    assert sizes[-1] == 3
    assert outcomes[-1] == "finished"


def test_a_drained_node_is_left_after_a_checkpoint(drivers: DriversFixture, tmp_path: Path) -> None:
    def main() -> None:
        stage = Stage(tmp_path, nodes=2)
        stage_said = stage.said

        def function() -> Any:
            import ray

            from drawbar import train

            context = train.get_context()
            node = ray.get_runtime_context().get_node_id()
            if context.get_attempt() > 0:
                return [context.get_attempt(), node]
            stage_said.write_text(f"{context.get_world_rank()} {node}\n")
            while (info := train.get_preemption_info()) is None:
                pass
            assert train.checkpoint_requested()
            with train.checkpoint_dir() as path:
                train.report({"ranks": info.preempted_ranks}, checkpoint=path)
            while True:
                train.collective.barrier()

        thread = stage.fit(function, num_workers=2)
        homes = stage.hear(2)
        stage.cluster.add_node(num_cpus=1)
        drain(homes["1"])
        thread.join()
        stage.show(homes["1"], stage.result.metrics)

    values, sizes, outcomes, drained, metrics = run_on_cluster(drivers, main)
    assert [attempt for attempt, _ in values] == [1, 1]
    assert drained not in [node for _, node in values]
    assert metrics == {"ranks": [1]}
    assert sizes == [2, 2]
    assert outcomes == ["failed", "finished"]


def drain(node_id: str) -> None:
    """Tell Ray that a node is to be taken away in ten minutes."""
    import time

    import ray
    from ray.core.generated import autoscaler_pb2

    generated: Any = autoscaler_pb2
    client: Any = ray._private.worker.global_worker
    reason = generated.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + 600) * 1000)
    accepted, why = client.gcs_client.drain_node(node_id, reason, "a test", deadline)
    assert accepted, why
