"""Inject thirty faults of ten kinds, and check how the runs react.

    python -m benchmarks faults [--only KIND] [--results DIR]

Each fault happens in a run of two workers on a cluster of three nodes, with `max_failures=6`. It is
classified right if the causes in the journal and the end of the run are the expected ones
(`_fault_kinds`). The table is also written to `faults.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_nodes
from benchmarks._fault_kinds import (
    CHECKPOINT_STEP,
    FAULTS,
    FAULTY_STEP,
    NUM_STEPS,
    Fault,
    Site,
)

NUM_NODES = 3
MAX_FAILURES = 6
MIN_RIGHT = 29
RESULTS = Path(__file__).parent / "results"
DRAIN_SECONDS = 120


def make_function(fault: Fault, folder: Path) -> Callable[[], int]:
    """Return a training function with a fault. It returns its number of attempts."""

    def train_func() -> int:
        import ray

        from drawbar import train
        from drawbar.train.backend import measure_data_wait

        context, checkpoint = train.get_context(), train.get_checkpoint()
        resume_step = int((Path(checkpoint.path) / "step").read_text()) + 1 if checkpoint else 0
        rank, attempt = context.get_world_rank(), context.get_attempt()
        node = ray.get_runtime_context().get_node_id()
        (folder / f"node_of_rank_{rank}").write_text(node)

        def make_site(step: int) -> Site:
            return Site(step, rank, attempt, resume_step, node, folder)

        fault.inject(make_site(-1))
        batches = read_rows(resume_step) if fault.uses_torch else range(resume_step, NUM_STEPS)
        for step, _ in enumerate(measure_data_wait(batches), start=resume_step):
            fault.inject(make_site(step))
            if fault.action and step == FAULTY_STEP and attempt == 0:
                (folder / f"waiting_{rank}").touch()
                wait_for_driver(train)
            train.collective.barrier()
            if step == CHECKPOINT_STEP or train.should_checkpoint():
                with train.checkpoint_dir() as path:
                    (path / "step").write_text(str(step))
                    train.report({"step": step}, checkpoint=path)
        return attempt + 1

    return train_func


def wait_for_driver(train: Any) -> None:
    """Wait until the node of the worker is lost or drained."""
    while not train.should_checkpoint():
        time.sleep(0.05)
    with train.checkpoint_dir() as path:
        (path / "step").write_text(str(FAULTY_STEP))
        train.report({}, checkpoint=path)


def read_rows(resume_step: int) -> Any:
    """Return a DataLoader whose dataset fails at one row."""
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[int]):
        def __len__(self) -> int:
            return NUM_STEPS - resume_step

        def __getitem__(self, row: int) -> int:
            if row + resume_step == FAULTY_STEP:
                raise ValueError(f"row {row} is damaged")
            return row

    return DataLoader(Rows(), batch_size=None, num_workers=1)


@dataclass(frozen=True)
class Reaction:
    """Reaction of a run to a fault.

    Attributes:
        verdicts: Causes of its failed attempts.
        outcome: "finished" or "failed".
        num_attempts: Number of attempts.
        seconds: Duration of the run.
    """

    verdicts: list[str]
    outcome: str
    num_attempts: int
    seconds: float

    def is_right(self, fault: Fault) -> bool:
        """Return whether this is the expected reaction."""
        # Ray may place workers on a lost node for a while, which is a preemption again.
        verdicts = list(self.verdicts)
        while verdicts[-2:] == ["preemption", "preemption"]:
            verdicts.pop()
        return (verdicts, self.outcome) == (fault.verdicts, fault.outcome)


def run_fault(fault: Fault, folder: Path, cluster: Any) -> Reaction:
    """Run a training function with a fault, and read the reaction from the journal."""
    from drawbar import train
    from drawbar.train import runs

    folder.mkdir()
    trainer = train.DataParallelTrainer(
        make_function(fault, folder),
        scaling_config=train.ScalingConfig(num_workers=fault.num_workers),
        run_config=train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=train.FailureConfig(MAX_FAILURES, hang_timeout=fault.hang_timeout),
            logging_config=train.LoggingConfig("ERROR"),
        ),
    )
    start = time.monotonic()
    handle = trainer.start()
    if fault.action:
        remove_node(fault, folder, cluster)
    with contextlib.suppress(train.TrainingFailedError):
        handle.wait()
    seconds = time.monotonic() - start
    record = runs.find_run(folder / "run")
    events: list[dict[str, Any]] = record.list_events()
    ended = [event for event in events if event["event"] == "attempt_ended"]
    verdicts = [(event["verdict"] or {}).get("kind", event["cause"]) for event in ended]
    return Reaction(verdicts, record.status, len(record.timeline.attempts), seconds)


def remove_node(fault: Fault, folder: Path, cluster: Any) -> None:
    """Lose or drain the node of rank 1 when it waits, and add another node."""
    ranks = range(fault.num_workers)
    while not all((folder / f"waiting_{rank}").exists() for rank in ranks):
        time.sleep(0.05)
    node_id = (folder / "node_of_rank_1").read_text()
    node = next(node for node in cluster.list_all_nodes() if node.node_id == node_id)
    if fault.action == "drain_node":
        drain(node_id, cluster.address)
        while (folder / "node_of_rank_1").read_text() == node_id:
            time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)


def drain(node_id: str, address: str) -> None:
    """Announce that a node will end."""
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", address]
    options = {
        "--node-id": node_id,
        "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "fault",
        "--deadline-remaining-seconds": str(DRAIN_SECONDS),
    }
    arguments = itertools.chain.from_iterable(options.items())
    subprocess.run([*command, *arguments], check=True, capture_output=True)


def run_faults(faults: Sequence[Fault]) -> Iterator[tuple[Fault, Reaction]]:
    """Run the faults one after another on one cluster, and yield the reactions."""
    with fresh_nodes(NUM_NODES) as (folder, cluster):
        for number, fault in enumerate(faults):
            yield fault, run_fault(fault, folder / str(number), cluster)


def format_table(results: Sequence[tuple[Fault, Reaction]]) -> str:
    """Return a Markdown table with a row for each fault."""
    rows = [
        f"| {fault.kind} | {fault.title} | {', '.join(reaction.verdicts)} | {reaction.outcome} "
        f"| {reaction.num_attempts} | {'yes' if reaction.is_right(fault) else 'no'} |"
        for fault, reaction in results
    ]
    head = "| kind | fault | causes found | end | attempts | right |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows]) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Run the faults, and print and write the table.

    Exits with 1 if more than one is wrong, or if a deterministic one was retried more than once.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    kinds = list(dict.fromkeys(fault.kind for fault in FAULTS))
    parser.add_argument("--only", action="append", choices=kinds, metavar="KIND")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not options.only or fault.kind in options.only]
    results = []
    for fault, reaction in run_faults(faults):
        results.append((fault, reaction))
        mark = "right" if reaction.is_right(fault) else f"WRONG, expected {fault.verdicts}"
        print(f"{fault.kind}, {fault.title}: {reaction} {mark}", flush=True)
    num_right = sum(reaction.is_right(fault) for fault, reaction in results)
    retried = [
        fault.title
        for fault, reaction in results
        if fault.is_deterministic and len(reaction.verdicts) > len(fault.verdicts)
    ]
    table = f"{num_right} of {len(results)} right\n\n{format_table(results)}"
    print(table)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "faults.md").write_text(table)
    if num_right < len(results) - (len(FAULTS) - MIN_RIGHT) or retried:
        sys.exit(1)
