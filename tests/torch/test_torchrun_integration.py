"""Tests under torchrun: `num_workers=0` in each of its processes forms one run of all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from drawbar.train.testing import check_run

SECONDS = 120
SCRIPT = """
import json, os, signal, sys
import torch, torch.distributed as dist
from drawbar import train
from drawbar.torch import TorchConfig, TorchTrainer, prepare_model
from drawbar.train.backend import Backend

folder, rank = sys.argv[1], os.environ["RANK"]

def fit(name, loop, **options):
    workers = train.ScalingConfig(num_workers=0)
    run = train.RunConfig(storage_path=folder, name=name)
    try:
        result = TorchTrainer(loop, scaling_config=workers, run_config=run, **options).fit()
    except Exception as error:
        write_results(name, [type(error).__name__, str(error)])
    else:
        seen = result.metrics_dataframe.to_dict("list")["seen"]
        write_results(name, [result.return_values, os.path.basename(result.checkpoint.path), seen])

def write_results(name, values):
    with open(f"{folder}/{name}_results_{rank}.json", "w") as file:
        json.dump(values, file)
"""

STOPPED = """
def stopped():
    rank, step = train.get_context().get_world_rank(), 0
    while True:
        step += 1
        dist.all_reduce(torch.ones(1))
        if (rank, step) == (1, 5):
            train.attach(folder + "/stopped").stop()
        if train.should_checkpoint():
            with train.checkpoint_dir() as path:
                (path / f"rank_{rank}").write_text(str(step))
                train.report({"seen": rank}, checkpoint=path)
            while True:
                train.collective.barrier()
"""


def torchrun(folder: Path, source: str, *options: str) -> None:
    """Run a script on two ranks."""
    script = folder / "script.py"
    script.write_text(SCRIPT + STOPPED + textwrap.dedent(source))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    subprocess.run([*command, str(script), str(folder)], timeout=SECONDS, check=True)


def read_results(folder: Path, name: str) -> list[Any]:
    """Return the results that each rank has written for a run."""
    files = [folder / f"{name}_results_{rank}.json" for rank in (0, 1)]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of several runs, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "closed").write_text("a file where the run's directory should be")
    torchrun(
        folder,
        """
        def together():
            context = train.get_context()
            rank = context.get_world_rank()
            model = prepare_model(torch.nn.Linear(2, 1))
            total = torch.ones(1)
            dist.all_reduce(total)
            with train.checkpoint_dir() as path:
                (path / f"rank_{rank}").write_text("its file")
                train.report({"seen": total.item()}, checkpoint=path)
            print("rank", rank, "was here")
            places = [rank, context.get_world_size(), context.get_local_rank()]
            return [*places, context.get_experiment_name(), type(model).__name__, received]

        received = []

        class RecordingBackend(Backend):
            def on_start(self, worker_group, backend_config):
                ranks = worker_group.execute(lambda: int(os.environ["RANK"]))
                worker_group.execute_single(1, receive, ranks)
                try:
                    worker_group.execute_single(1, receive)
                except RuntimeError as error:
                    receive(str(error).splitlines()[-1])

        def receive(value):
            import __main__
            __main__.received.append(value)

        class RecordingConfig(TorchConfig):
            backend_cls = RecordingBackend

        def failing():
            if train.get_context().get_world_rank() == 1:
                raise ValueError("rank 1 does not like this")
            dist.barrier()

        fit("together", together, torch_config=RecordingConfig())
        fit("split", print, datasets={"train": lambda: None})
        fit("closed", print)
        fit("failing", failing)
        fit("stopped", stopped)
        """,
    )
    return folder


def test_torchrun_processes_form_one_run(runs: Path) -> None:
    values = [
        [rank, 2, rank, "together", "DistributedDataParallel", received]
        for rank, received in enumerate(
            [["TypeError: receive() missing 1 required positional argument: 'value'"], [[0, 1]]]
        )
    ]
    assert read_results(runs, "together") == [[values, "checkpoint_000000", [2.0, 2.0]]] * 2
    run = runs / "together"
    files = {path.name for path in (run / "checkpoint_000000").iterdir()}
    assert {"rank_0", "rank_1"} <= files
    assert "rank 1 was here" in (run / "logs" / "rank_1.log").read_text()
    check_run(run)


def test_torchrun_stop_saves_same_step_on_all_ranks(runs: Path) -> None:
    checkpoint = runs / "stopped" / "checkpoint_000000"
    steps = {int((checkpoint / f"rank_{rank}").read_text()) for rank in (0, 1)}
    assert len(steps) == 1
    assert min(steps) >= 5


def test_torchrun_failure_of_one_rank_ends_all_ranks(runs: Path) -> None:
    for kind, message in read_results(runs, "failing"):
        assert kind == "WorkerGroupError"
        assert message.startswith("rank 1")
        assert "ValueError: rank 1 does not like this" in message


def test_torchrun_restart_resumes_from_latest_checkpoint(tmp_path: Path) -> None:
    torchrun(
        tmp_path,
        """
        def loop():
            before = train.get_checkpoint()
            with train.checkpoint_dir() as path:
                (path / f"rank_{rank}").write_text("its file")
                train.report({"seen": 0 if before is None else 1}, checkpoint=path)
            if before is None and rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            train.collective.barrier()

        fit("run", loop)
        """,
        *("--max-restarts", "1"),
    )
    assert read_results(tmp_path, "run") == [[[None, None], "checkpoint_000001", [0, 0, 1, 1]]] * 2


@pytest.mark.nightly
def test_torchrun_rank_that_only_prints_is_active(tmp_path: Path) -> None:
    torchrun(
        tmp_path,
        """
        import time

        def loop():
            end = time.monotonic() + 10
            while rank == "1" and time.monotonic() < end:
                print("loading")
                time.sleep(0.1)
            train.collective.barrier()

        failures = train.FailureConfig(hang_timeout=5)
        run = train.RunConfig(storage_path=folder, name="run", failure_config=failures)
        workers = train.ScalingConfig(num_workers=0)
        TorchTrainer(loop, scaling_config=workers, run_config=run).fit()
        """,
    )


def test_torchrun_error_of_rank_0_is_raised_on_all_ranks(runs: Path) -> None:
    (kind, message), other = read_results(runs, "closed")
    assert kind == "FileExistsError"
    assert other == ["ControllerError", f"rank 0 cannot open the run: {kind}: {message}"]


def test_torchrun_with_datasets_raises(runs: Path) -> None:
    for kind, message in read_results(runs, "split"):
        assert kind == "ValueError"
        assert "ScalingConfig(num_workers=2)" in message
