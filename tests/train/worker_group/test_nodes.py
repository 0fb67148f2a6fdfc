"""Nodes are lost, added, and drained during a run: four runs on one cluster, in turn."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drawbar.train import runs
from tests._ray_compat import start_nodes_without_time_limits, wait_for_nodes

DriversFixture = Callable[..., Any]
SHOWN = "shown: "
RAYJOB = Path(__file__).parents[3] / "docs" / "operations" / "rayjob.yaml"


def run_on_cluster(drivers: DriversFixture, main: Callable[[], Any]) -> dict[str, Any]:
    """Run `main` in a separate process and return what `Stage.show` printed, by name."""
    # No time limit here: the timeout of pytest ends the test, and `drivers` kills the process.
    with drivers(main, RAY_ADDRESS="", RAY_gcs_server_port_wait_time_s="600") as driver:
        out, err = driver.communicate()
    assert driver.returncode == 0, err
    lines = out.splitlines()  # Ray prints to stdout too
    return dict(json.loads(line.removeprefix(SHOWN)) for line in lines if line.startswith(SHOWN))


class Stage:
    """A Ray cluster of one-CPU nodes, and runs on it in threads."""

    def __init__(self, folder: Path, nodes: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.folder = folder
        # Without time limits of Ray, which a busy machine may exceed. The first nodes are awaited
        # here, later ones by the run.
        start_nodes_without_time_limits()
        head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, "wait": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        wait_for_nodes(self.cluster)
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()
        wait_for_nodes(self.cluster)
        ray.init(address=self.cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def fit(self, name: str, function: Any, num_workers: Any) -> threading.Thread:
        """Start a run. `self.result` is its result in the end.

        The function receives a pipe, to which it writes lines of two words.
        """
        from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

        fifo = self.folder / f"{name} output"
        os.mkfifo(fifo)
        self._fifo = open(fifo, "r+b", buffering=0)  # noqa: SIM115  # open as long as the process
        trainer = DataParallelTrainer(
            function,
            train_loop_config={"fifo": fifo},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name=name, storage_path=self.folder, forkserver_preload=["http.server"]
            ),
        )

        def run() -> None:
            self.result = trainer.fit()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def receive_node(self, rank: int) -> str:
        """Wait until the training function has written the node ID of a rank, and return it."""
        while True:  # a rank writes again in each attempt
            writer, node_id = self._fifo.readline().decode().split()
            if int(writer) == rank:
                return node_id

    def add_node(self) -> None:
        self.nodes.append(self.cluster.add_node(wait=False, num_cpus=1))

    def lose_node(self, node_id: str) -> None:
        """Kill the node with this ID."""
        lost = next(node for node in self.nodes if node.node_id == node_id)
        self.cluster.remove_node(lost, allow_graceful=False)

    def show(self, *more: Any) -> None:
        """Print return values, world sizes, and outcomes of the attempts, for the tests."""
        attempts = self.result.timeline.attempts
        sizes = [attempt.world_size for attempt in attempts]
        outcomes = [attempt.outcome.split(":")[0] for attempt in attempts]
        shown = [Path(self.result.path).name, [self.result.return_values, sizes, outcomes, *more]]
        print(f"\n{SHOWN}{json.dumps(shown)}", flush=True)

    def end(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here
        os._exit(0)  # Ray takes long to end a process whose cluster has ended


def checkpoint_each_step(
    until: Callable[[int, int], bool],
) -> Callable[[dict[str, Any]], list[int]]:
    """Return a function that saves checkpoints until `until(attempt, world size)` is True."""

    def function(config: dict[str, Any]) -> list[int]:
        import ray

        from drawbar import train

        context = train.get_context()
        checkpoint = train.get_checkpoint()
        step = first = int((Path(checkpoint) / "step").read_text()) if checkpoint else 0
        node = ray.get_runtime_context().get_node_id()
        while True:
            step += 1
            with train.checkpoint_dir() as path:
                if context.get_world_rank() == 0:
                    (path / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
            if step == first + 2:
                config["fifo"].write_text(f"{context.get_world_rank()} {node}\n")
            if until(context.get_attempt(), context.get_world_size()):
                parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
                is_forked = "_fork_server/server.py" in parent
                return [context.get_attempt(), context.get_world_size(), is_forked]

    return function


def fit_line(until: Callable[[int, int], bool]) -> Callable[[dict[str, Any]], None]:
    """Return a function that fits a line with the same global batch for any number of workers.

    Each optimizer step reports its loss, and saves a checkpoint, until `until(attempt, world size)`
    is True or the loss of step `config["num_steps"]` was reported.
    """

    def function(config: dict[str, Any]) -> None:
        import ray
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from drawbar import train
        from drawbar.torch import prepare_data_loader

        context = train.get_context()
        checkpoint = train.get_checkpoint()
        text = (Path(checkpoint) / "state").read_text() if checkpoint else "[0, 0.0, 0.0]"
        step, slope, offset = json.loads(text)
        first = step
        torch.manual_seed(0)  # the order of the rows
        x = torch.arange(60.0, dtype=torch.float64) / 60
        loader = prepare_data_loader(
            DataLoader(TensorDataset(x, 3 * x + x.sin()), batch_size=2, shuffle=True)
        )
        accumulation_steps = context.accumulation_steps(12, 2)
        sums = [0.0, 0.0, 0.0]
        while True:
            for number, (x, y) in enumerate(loader, start=1):
                error = slope * x + offset - y
                sums[0] += float(error.square().sum())
                sums[1] += float((error * x).sum())
                sums[2] += float(error.sum())
                if number % accumulation_steps:
                    continue
                all_sums = train.collective.all_gather(sums)
                loss, to_slope, to_offset = (sum(each) / 12 for each in zip(*all_sums, strict=True))
                slope, offset = slope - 0.1 * to_slope, offset - 0.1 * to_offset
                sums, step = [0.0, 0.0, 0.0], step + 1
                with train.checkpoint_dir() as path:
                    if context.get_world_rank() == 0:
                        (path / "state").write_text(json.dumps([step, slope, offset]))
                    train.report({"step": step, "loss": loss}, checkpoint=path)
                if step == first + 2 and "fifo" in config:
                    node = ray.get_runtime_context().get_node_id()
                    config["fifo"].write_text(f"{context.get_world_rank()} {node}\n")
                if step == config.get("num_steps") or (
                    step >= first + 2 and until(context.get_attempt(), context.get_world_size())
                ):
                    return

    return function


def read_losses(result: Any) -> list[float]:
    """Return the losses of rank 0 by step. If a step was repeated, its last loss counts."""
    frame = result.metrics_dataframe
    frame = frame[frame["rank"] == 0].drop_duplicates("step", keep="last").sort_values("step")
    assert list(frame["step"]) == list(range(1, len(frame) + 1))
    return [float(loss) for loss in frame["loss"]]


def leave_after_a_checkpoint(config: dict[str, Any]) -> Any:
    """Train until a node is drained, and save a checkpoint then."""
    import ray

    from drawbar import train

    context = train.get_context()
    node = ray.get_runtime_context().get_node_id()
    if context.get_attempt() > 0:
        return [context.get_attempt(), node]
    config["fifo"].write_text(f"{context.get_world_rank()} {node}\n")
    while (info := train.get_preemption_info()) is None:
        pass
    assert train.should_checkpoint()
    with train.checkpoint_dir() as path:
        train.report({"ranks": info.preempted_ranks}, checkpoint=path)
    while True:
        train.collective.barrier()


@pytest.fixture(scope="module")
def shown(drivers: DriversFixture, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of the three runs, by name."""
    folder = tmp_path_factory.mktemp("nodes")

    def main() -> None:
        from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

        stage = Stage(folder, nodes=2)

        def grown(attempt: int, size: int) -> bool:
            return attempt > 0 and size == 3

        function = checkpoint_each_step(lambda attempt, size: attempt > 0)
        thread = stage.fit("lost", function, num_workers=2)
        stage.lose_node(stage.receive_node(1))
        stage.add_node()
        thread.join()
        stage.show()

        function = checkpoint_each_step(lambda attempt, size: size == 3)
        thread = stage.fit("elastic", function, num_workers=(1, 3))
        stage.lose_node(stage.receive_node(1))
        for _ in range(2):
            stage.add_node()
        thread.join()
        stage.show()

        thread = stage.fit("curve", fit_line(grown), num_workers=(1, 3))
        stage.lose_node(stage.receive_node(1))
        stage.add_node()
        thread.join()
        losses = read_losses(stage.result)
        undisturbed = DataParallelTrainer(
            fit_line(lambda attempt, size: False),
            train_loop_config={"num_steps": len(losses)},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(storage_path=folder),
        )
        stage.show(losses, read_losses(undisturbed.fit()))

        thread = stage.fit("drained", leave_after_a_checkpoint, num_workers=2)
        node_id = stage.receive_node(1)
        drain(node_id)  # the third node has room
        thread.join()
        announced = read_journal(stage.result, "preemption_announced")
        stage.show(node_id, stage.result.metrics, [each["info"] for each in announced])
        stage.end()

    return run_on_cluster(drivers, main)


@pytest.mark.nightly
def test_lost_node_is_replaced_by_joining_node(shown: dict[str, Any]) -> None:
    values, sizes, outcomes = shown["lost"]
    # Until Ray marks the node as dead, a replacement may be scheduled there and fail to start.
    assert values[0] == values[1] == [len(sizes) - 1, 2, True]
    assert sizes[0] == sizes[-1] == 2
    assert len(sizes) > 1
    assert outcomes == ["failed"] * (len(sizes) - 1) + ["finished"]


@pytest.mark.nightly
def test_elastic_group_shrinks_and_grows(shown: dict[str, Any]) -> None:
    values, sizes, outcomes = shown["elastic"]
    assert [size for _, size, _ in values] == [3, 3, 3]
    assert all(is_forked for _, _, is_forked in values)
    assert 2 in sizes
    assert sizes[-1] == 3
    assert outcomes[-1] == "finished"


@pytest.mark.nightly
def test_elastic_group_keeps_loss_curve(shown: dict[str, Any]) -> None:
    _, sizes, _, losses, undisturbed = shown["curve"]
    assert 2 in sizes
    assert sizes[-1] == 3
    assert losses == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.nightly
def test_drained_node_is_left_after_checkpoint(shown: dict[str, Any]) -> None:
    values, sizes, outcomes, drained, metrics, (announced,) = shown["drained"]
    assert [attempt for attempt, _ in values] == [1, 1]
    assert drained not in [node for _, node in values]
    assert metrics == {"ranks": [1]}
    assert sizes == [2, 2]
    assert outcomes == ["failed", "finished"]
    assert announced["preempted_node_to_ranks"] == {drained: [1]}
    assert announced["deadline_ms"] > 0


def read_journal(result: Any, event: str) -> list[dict[str, Any]]:
    return [each for each in runs.find_run(result.path).list_events() if each["event"] == event]


def drain(node_id: str) -> None:
    """Start a drain of the node with the command in the manifest for Kubernetes."""
    import ray

    pod = yaml.safe_load(RAYJOB.read_text())["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    (container,) = pod["template"]["spec"]["containers"]
    hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    program, *options = shlex.split(hook.partition("||")[0].replace("\\\n", " "))
    ray_command = Path(sys.executable).with_name(program)
    place = ["--address", ray.get_runtime_context().gcs_address, "--node-id", node_id]
    subprocess.run([ray_command, *options, *place], check=True, capture_output=True)
    (worker,) = re.findall("grep -qs '(.*?)'", hook)  # the hook waits until there is none
    commands = [path.read_bytes().decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert any(re.search(worker, command) for command in commands)
