"""Nodes are lost, and the restart reads the checkpoint from the memory of a peer node."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from drawbar import train
from drawbar.train import (
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    runs,
)
from tests._ray_compat import start_nodes_without_time_limits, wait_for_nodes

DriversFixture = Callable[..., Any]
NUM_WORKERS = 2
PART_BYTES = 20_000_003  # several chunks
REPLICATION = CheckpointConfig(memory_replication=True)
SHOWN = "shown: "


def make_part(rank: int, step: int) -> bytes:
    return random.Random(f"{rank} {step}").randbytes(PART_BYTES)


def save_parts(config: dict[str, Any]) -> list[bool]:
    """Save checkpoints with a part of each rank, and wait to be killed.

    After a restart, return whether each part has the saved content.
    """
    rank = train.get_context().get_world_rank()
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        step = int(checkpoint.path[-6:])
        with checkpoint.as_directory() as directory:
            parts = [Path(directory, f"part_{other}").read_bytes() for other in range(NUM_WORKERS)]
        return [part == make_part(other, step) for other, part in enumerate(parts)]
    save_part(rank, 0)
    save_part(rank, 1)
    wait_for_copy(f"part_{rank}", "0/1")
    if config["kills_first"]:
        send_node(config)
        open(config["pipes"][rank]).close()  # waits until the stores have been killed
        wait_for_copy()
        save_part(rank, 2)
        wait_for_copy(f"part_{rank}", "0/2")
    end_save(config)
    return []


def save_dtensors(config: dict[str, Any]) -> list[bool]:
    """Save DTensors, as `save_parts` does."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from drawbar.torch import load_state, save_async

    rank = train.get_context().get_world_rank()
    mesh = init_device_mesh("cpu", (NUM_WORKERS,))

    def make_state(step: int) -> dict[str, Any]:
        weights = torch.full((1000,), 10.0 * rank + step)
        return {"weights": DTensor.from_local(weights, mesh, [Shard(0)]), "step": step}

    state = load_state(lambda: make_state(0))
    if state is not None:
        expected = make_state(1)["weights"].to_local()
        return [state["step"] == 1, torch.equal(state["weights"].to_local(), expected)]
    for step in range(2):
        save_async(make_state(step))
        train.get_all_reported_checkpoints()
    wait_for_copy(f"__{rank}_0.distcp", "0/1")
    end_save(config)
    return []


def send_node(config: dict[str, Any]) -> None:
    """Send the node of each rank to the driver when all ranks call this."""
    import ray

    train.collective.barrier()
    with open(config["pipe"], "a") as pipe:
        rank = train.get_context().get_world_rank()
        print(rank, ray.get_runtime_context().get_node_id(), file=pipe)


def end_save(config: dict[str, Any]) -> None:
    """Wait to be killed. Before that, overwrite the stored files, if the scenario does so."""
    checkpoint = train.get_checkpoint()
    assert checkpoint is not None
    train.collective.barrier()
    if config["is_overwritten"] and train.get_context().get_world_rank() == 0:
        assert checkpoint.manifest is not None
        for file in checkpoint.manifest.files:
            Path(checkpoint.path, file.path).write_bytes(bytes(file.size))
    send_node(config)
    threading.Event().wait()


def save_part(rank: int, step: int) -> None:
    from drawbar.train.backend import MemoryFiles, report_async

    def save(files: MemoryFiles) -> None:
        with files.open(f"part_{rank}") as file:
            file.write(make_part(rank, step))

    report_async({"step": step}, save)
    train.get_all_reported_checkpoints()  # waits for the commit


def wait_for_copy(path: str = "", name: str = "0/0") -> None:
    """Wait until the peer has a file of this rank, or only until the stores run again."""
    import ray
    from ray.exceptions import RayActorError

    from drawbar.train._worker.active_session import current_session

    stores = ray.get(current_session("wait_for_copy").assignment.memory_stores)
    while True:
        with contextlib.suppress(RayActorError):
            ray.get(stores.own.list_files.remote(name))
            files = ray.get(stores.peer.list_files.remote(name))
            if not path or path in files:
                return


@dataclass
class Scenario:
    """Run, and the failure after its second checkpoint.

    Attributes:
        lost_ranks: Ranks whose nodes are lost.
        before: What happens before, with the memory stores of the cluster.
        is_overwritten: Whether the files in the storage are overwritten with zeros.
        kills_first: Whether the stores are killed before the last checkpoint.
        function: Training function.
    """

    lost_ranks: tuple[int, ...]
    before: Callable[[list[psutil.Process]], None] = lambda stores: None
    is_overwritten: bool = False
    kills_first: bool = False
    function: Callable[[dict[str, Any]], list[bool]] = save_parts


def corrupt(stores: list[psutil.Process]) -> None:
    """Change the first byte of each copy."""
    for store in stores:
        for link in Path(f"/proc/{store.pid}/fd").iterdir():
            if os.readlink(link).startswith("/memfd:drawbar-replica"):
                with link.open("r+b") as file:
                    first = file.read(1)[0]
                    file.seek(0)
                    file.write(bytes([first ^ 1]))


def kill(stores: list[psutil.Process]) -> None:
    for store in stores:
        store.send_signal(signal.SIGKILL)
    psutil.wait_procs(stores)


SCENARIOS = {
    "node": Scenario((1,), is_overwritten=True),
    "both_nodes": Scenario((0, 1)),
    "corrupted_copy": Scenario((1,), corrupt),
    "killed_store": Scenario((1,), kill),
    "restarted_store": Scenario((1,), is_overwritten=True, kills_first=True),
    "dtensors": Scenario((1,), is_overwritten=True, function=save_dtensors),
}


class Stage:
    """A Ray cluster of one-CPU nodes."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.folder = folder
        start_nodes_without_time_limits()
        options = {"include_dashboard": False, "no_monitor": True, "wait": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
        wait_for_nodes(self.cluster)
        self.nodes = [self.cluster.add_node(wait=False, num_cpus=1) for _ in range(NUM_WORKERS)]
        wait_for_nodes(self.cluster)
        ray.init(address=self.cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def play(self, scenario: Scenario) -> None:
        """Run a scenario, and print its sources and results."""
        from drawbar.torch import TorchTrainer

        pipe, *pipes = (str(self.folder / f"pipe {end}") for end in ("driver", 0, 1))
        for each in (pipe, *pipes):
            os.mkfifo(each)
        config = {"pipe": pipe, "pipes": pipes, "kills_first": scenario.kills_first}
        trainer = TorchTrainer if scenario.function is save_dtensors else DataParallelTrainer
        run = trainer(
            scenario.function,
            train_loop_config={**config, "is_overwritten": scenario.is_overwritten},
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=make_run_config(self.folder),
        ).start()
        with os.fdopen(os.open(pipe, os.O_RDWR)) as stream:  # does not end between two writers
            nodes = dict(stream.readline().split() for _ in range(NUM_WORKERS))
            if scenario.kills_first:
                kill(self.find_stores())
                for each in pipes:
                    open(each, "w").close()
                nodes = dict(stream.readline().split() for _ in range(NUM_WORKERS))
        scenario.before(self.find_stores())
        for rank in scenario.lost_ranks:
            self.replace(nodes[str(rank)])
        values = run.wait().return_values
        print(f"\n{SHOWN}{json.dumps([list_sources(run.path), values])}", flush=True)

    def find_stores(self) -> list[psutil.Process]:
        raylets = [node.all_processes["raylet"][0].process.pid for node in self.nodes]
        children = [child for pid in raylets for child in psutil.Process(pid).children()]
        return [child for child in children if is_store(child)]

    def replace(self, node_id: str) -> None:
        """Lose a node, and add another one."""
        lost = next(node for node in self.nodes if node.node_id == node_id)
        self.nodes.remove(lost)
        self.cluster.remove_node(lost, allow_graceful=False)
        self.nodes.append(self.cluster.add_node(wait=False, num_cpus=1))

    def end(self) -> None:
        import ray

        assert not psutil.wait_procs(self.find_stores(), timeout=30)[1]
        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here
        os._exit(0)  # Ray takes long to end a process whose cluster has ended


def is_store(process: psutil.Process) -> bool:
    try:
        return bool(process.name().startswith("ray::MemoryStor"))
    except psutil.NoSuchProcess:
        return False


def make_run_config(folder: Path) -> RunConfig:
    from fsspec.implementations.local import LocalFileSystem

    return RunConfig(
        name="run",
        storage_path=str(folder),
        # Of a local checkpoint, the driver also checks the content before a restart.
        storage_filesystem=LocalFileSystem(auto_mkdir=True),
        checkpoint_config=REPLICATION,
        failure_config=FailureConfig(max_failures=1),
    )


def list_sources(path: str) -> list[tuple[int, str, str]]:
    """Return rank, checkpoint, and source of each read."""
    events: list[dict[str, Any]] = runs.find_run(path).list_events()
    return sorted(
        (event["rank"], event["name"], event["source"])
        for event in events
        if event["event"] == "checkpoint_read"
    )


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("node", "peer"),
        pytest.param("both_nodes", "storage", marks=pytest.mark.nightly),
        pytest.param("corrupted_copy", "storage", marks=pytest.mark.nightly),
        pytest.param("killed_store", "storage", marks=pytest.mark.nightly),
        pytest.param("restarted_store", "peer", marks=pytest.mark.nightly),
        pytest.param("dtensors", "peer", marks=pytest.mark.nightly),
    ],
)
def test_memory_replication_restart_after_node_loss_reads(
    drivers: DriversFixture, tmp_path: Path, name: str, source: str
) -> None:
    def main() -> None:
        stage = Stage(tmp_path)
        stage.play(SCENARIOS[name])
        stage.end()

    with drivers(main, RAY_ADDRESS="", RAY_gcs_server_port_wait_time_s="600") as driver:
        out, err = driver.communicate()
    assert driver.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith(SHOWN)]
    sources, values = json.loads(line.removeprefix(SHOWN))
    checkpoint = "checkpoint_000002" if name == "restarted_store" else "checkpoint_000001"
    assert sources == [[rank, checkpoint, source] for rank in range(NUM_WORKERS)]
    assert values == [[True] * NUM_WORKERS] * NUM_WORKERS


def test_memory_replication_on_one_node_prints_notice(
    ray_cluster: None, run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    DataParallelTrainer(
        lambda: save_part(0, 0),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=replace(run_config, checkpoint_config=REPLICATION),
    ).fit()
    assert "there is no peer node" in capsys.readouterr().err


def test_memory_replication_without_ray_workers_raises(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, checkpoint_config=REPLICATION),
    )
    with pytest.raises(ValueError, match=r"memory_replication=True.*Ray actors.*num_workers=2"):
        trainer.fit()
    assert list(tmp_path.iterdir()) == []
