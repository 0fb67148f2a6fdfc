"""What torchrun starts: `num_workers=0` in each of its processes is one run of all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from drawbar.train.testing import check_run

SECONDS = 120


def torchrun(folder: Path, function: str, *options: str, trainer: str = "") -> tuple[Any, str]:
    """Run a script on two ranks; gives what each has told, and all that was printed."""
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent("""
            import json, os, signal, sys
            import torch, torch.distributed as dist
            from drawbar import train
            from drawbar.torch import TorchConfig, TorchTrainer, prepare_model
            from drawbar.train.backend import Backend

            folder, rank = sys.argv[1], os.environ["RANK"]

            def tell(told):
                with open(f"{folder}/told_{rank}.json", "w") as file:
                    json.dump(told, file)
            """)
        + textwrap.dedent(function)
        + textwrap.dedent(f"""
            def fit():
                return TorchTrainer(
                    loop,
                    scaling_config=train.ScalingConfig(num_workers=0),
                    run_config=train.RunConfig(storage_path=folder, name="run"),
                    {trainer}
                ).fit()

            try:
                result = fit()
            except Exception as error:
                tell([type(error).__name__, str(error)])
                store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                store.set(f"told by {{rank}}", "")  # torchrun ends the others as soon as one fails
                store.wait(["told by 0", "told by 1"])
                raise
            metrics = result.metrics_dataframe.to_dict("list")
            tell([result.return_values, os.path.basename(result.checkpoint.path), metrics["seen"]])
            """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    done = subprocess.run(
        [*command, str(script), str(folder)], capture_output=True, text=True, timeout=SECONDS
    )
    output = done.stdout + done.stderr
    files = [folder / f"told_{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), output
    return [json.loads(file.read_text()) for file in files], output


def test_two_processes_are_one_run_of_two_ranks(tmp_path: Path) -> None:
    told, output = torchrun(
        tmp_path,
        """
        def loop():
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
            return [*places, context.get_experiment_name(), type(model).__name__, heard]

        heard = []

        class Telling(Backend):
            def on_start(self, worker_group, backend_config):
                ranks = worker_group.execute(lambda: int(os.environ["RANK"]))
                worker_group.execute_single(1, hear, ranks)
                try:
                    worker_group.execute_single(1, hear)
                except RuntimeError as error:
                    hear(str(error).splitlines()[-1])

        def hear(what):
            import __main__
            __main__.heard.append(what)

        class TellingConfig(TorchConfig):
            backend_cls = Telling
        """,
        trainer="torch_config=TellingConfig(),",
    )
    values = [
        [rank, 2, rank, "run", "DistributedDataParallel", heard]
        for rank, heard in enumerate(
            [["TypeError: hear() missing 1 required positional argument: 'what'"], [[0, 1]]]
        )
    ]
    assert told == [[values, "checkpoint_000000", [2.0, 2.0]]] * 2, output
    files = {path.name for path in (tmp_path / "run" / "checkpoint_000000").iterdir()}
    assert {"rank_0", "rank_1"} <= files
    assert "rank 1 was here" in (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    check_run(tmp_path / "run")


def test_a_rank_that_fails_ends_all_with_its_error(tmp_path: Path) -> None:
    told, output = torchrun(
        tmp_path,
        """
        def loop():
            if train.get_context().get_world_rank() == 1:
                raise ValueError("rank 1 does not like this")
            dist.barrier()
        """,
    )
    for kind, message in told:
        assert kind == "WorkerGroupError", output
        assert message.startswith("rank 1"), output
        assert "ValueError: rank 1 does not like this" in message


def test_what_torchrun_restarts_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    told, output = torchrun(
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
        """,
        *("--max-restarts", "1"),
    )
    assert told == [[[None, None], "checkpoint_000001", [0, 0, 1, 1]]] * 2, output


def test_what_keeps_rank_0_from_opening_the_run_is_said_by_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run's directory should be")
    told, output = torchrun(tmp_path, "def loop(): pass")
    kind, message = told[0]
    assert kind == "FileExistsError", output
    assert told[1] == ["ControllerError", f"rank 0 cannot open the run: {kind}: {message}"], output


def test_datasets_are_refused(tmp_path: Path) -> None:
    told, output = torchrun(
        tmp_path, "def loop(): pass", trainer='datasets={"train": lambda: None},'
    )
    for kind, message in told:
        assert kind == "ValueError", output
        assert "ScalingConfig(num_workers=2)" in message
