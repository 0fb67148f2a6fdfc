"""Kill ranks at random times, and compare the weights with the weights of a run without kills.

    python -m benchmarks._in_place_kills --runs 25 --seed 1

The ranks are processes that are forked from this one, without Ray, so that a run takes seconds.
They have real sessions, process groups, and loaders. This process replaces the controller: it
completes collectives, and passes messages to an `AttemptRecovery`. A rank records the samples of a
step after the step, so a kill may leave a step unrecorded, but no step may be recorded twice.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar._process.rank_assignment import assign_ranks
from drawbar._process.ranks import WorkerInfo
from drawbar._recovery.attempt_recovery import AttemptRecovery, Declined, Recovered
from drawbar._recovery.messages import (
    RanksLost,
    RecoveryDeclined,
    RecoveryFinished,
    RecoveryReady,
)
from drawbar._storage.run_directory import RunDirectory
from drawbar.torch import TorchConfig, prepare_data_loader, prepare_model, prepare_optimizer
from drawbar.train import get_context
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._controller.rank_progress import collect_payloads
from drawbar.train._protocol.assignment import WorkerAssignment, WorkerSpec
from drawbar.train._protocol.commands import CollectiveResult
from drawbar.train._protocol.messages import CollectiveCalled, RankFinished
from drawbar.train._worker.active_session import use_session
from drawbar.train._worker.session import Session

importlib.import_module("torch._dynamo")  # once, because the optimizers of each rank import it

NUM_WORKERS = 3
WORKER = WorkerInfo(node_id="n", node_ip="127.0.0.1", hostname="h", pid=1)
NUM_SAMPLES = 72
BATCH_SIZE = 4
EPOCHS = 25
MAX_SECONDS = 120.0


def _train(directory: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    model: Any = prepare_model(nn.Sequential(*layers))
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.99)
    x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(torch.arange(NUM_SAMPLES), x, x.sum(1, keepdim=True))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True))
    with (directory / f"steps_{get_context().get_world_rank()}").open("a") as file:
        for _ in range(EPOCHS):
            for samples, inputs, targets in loader:
                loss: Any = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                print(json.dumps(samples.tolist()), file=file, flush=True)
    return dict(model.module.state_dict())


def _run_rank(rank: int, directory: Path, connection: Any, replaced: RanksLost | None) -> None:
    """Run the training in a forked process, as a worker does."""
    assignment = WorkerAssignment(
        spec=WorkerSpec(env_vars={}, driver_env=None, metadata={}),
        run_id="run",
        run_directory=RunDirectory(directory),
        attempt=0,
        first_report_index=0,
        ranks=assign_ranks([WORKER] * NUM_WORKERS)[rank],
        is_recovered_in_place=True,
        replaced=replaced,
    )
    lock = threading.Lock()

    def send(message: object) -> None:
        with lock:
            connection.send(message)

    def receive() -> None:
        while True:
            session.handle_command(connection.recv())

    session = Session(assignment, send, {})
    session.interrupt_scope.begin()
    threading.Thread(target=receive, daemon=True).start()
    try:
        with use_session(session, is_process_wide=True):
            os.environ.update(assignment.make_worker_env())
            with TorchConfig(backend="gloo").train_func_context():
                torch.save(_train(directory), directory / f"weights_{rank}.pt")
        send(RankFinished(time=time.time()))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Run:
    """One run, with this process as its controller.

    Args:
        directory: Directory for the weights and steps.

    Attributes:
        processes: Latest process of each rank.
        recoveries: Recoveries that were completed.
    """

    def __init__(self, directory: Path) -> None:
        self.processes: dict[int, BaseProcess] = {}
        self.recoveries: list[Recovered[str]] = []
        self._directory = directory
        self._context = multiprocessing.get_context("fork")
        self._connections: dict[int, Connection] = {}
        self._recovery = AttemptRecovery[str](
            NUM_WORKERS,
            self._broadcast,
            lambda rank, lost, death: self._start(rank, lost),
            self.recoveries.append,
        )
        self._progress = AttemptProgress(NUM_WORKERS, 0)
        self._finished: set[int] = set()
        for rank in range(NUM_WORKERS):
            self._start(rank, None)

    def _start(self, rank: int, lost: RanksLost | None) -> None:
        own, other = self._context.Pipe()
        process = self._context.Process(
            target=_run_rank, args=(rank, self._directory, other, lost), daemon=True
        )
        process.start()
        other.close()
        self.processes[rank], self._connections[rank] = process, own

    def _broadcast(self, ranks: Collection[int], command: object) -> None:
        for rank in ranks:
            try:
                self._connections[rank].send(command)
            except OSError:
                continue  # the process is dead

    def wait(self) -> str:
        """Return why the run did not finish, "" if it did."""
        deadline = time.monotonic() + MAX_SECONDS
        try:
            while len(self._finished) < NUM_WORKERS:
                if time.monotonic() > deadline:
                    return "it hangs"
                for connection in wait(list(self._connections.values()), timeout=1):
                    if reason := self._receive(connection):
                        return reason
        finally:
            for process in self.processes.values():
                process.kill() if len(self._finished) < NUM_WORKERS else process.join()
        return ""

    def _receive(self, connection: object) -> str:
        ranks = [rank for rank, other in self._connections.items() if other is connection]
        if not ranks:
            return ""  # replaced in the meantime
        rank = ranks[0]
        try:
            message = self._connections[rank].recv()
        except (EOFError, OSError):
            return self._on_end(rank)
        declined: Declined | None = None
        match message:
            case CollectiveCalled():
                declined = self._on_collective(rank, message)
            case RecoveryReady() | RecoveryDeclined() | RecoveryFinished():
                declined = self._recovery.on_message(rank, message)
            case RankFinished():
                self._finished.add(rank)
                declined = self._recovery.on_returned(rank)
        return "" if declined is None else declined.reason

    def _on_end(self, rank: int) -> str:
        process = self.processes[rank]
        process.join()
        del self._connections[rank]
        if rank in self._finished:
            return ""
        if process.exitcode != -signal.SIGKILL:
            return f"rank {rank} exited with {process.exitcode}"
        obstacle = "a rank has returned" if self._finished else ""
        declined = self._recovery.on_death(rank, "killed", obstacle)
        return "" if declined is None else declined.reason

    def _on_collective(self, rank: int, call: CollectiveCalled) -> Declined | None:
        if self._progress.has_left_collective(rank, call.sequence):
            payloads = self._recovery.repeat_collective(call.sequence, rank, call.location)
            if isinstance(payloads, Declined):
                return payloads
            result = CollectiveResult(sequence=call.sequence, payloads=payloads)
            self._broadcast([rank], result)
        elif calls := self._progress.on_collective(rank, call):
            collected = collect_payloads(calls)
            lines = {other: called.location for other, called in calls.items()}
            self._recovery.collectives.record(call.sequence, lines, collected)
            result = CollectiveResult(sequence=call.sequence, payloads=collected)
            self._broadcast(calls, result)
        return None


def _kill(run: _Run, rng: random.Random, has_ended: threading.Event) -> None:
    """Kill one or two ranks at intervals."""
    while not has_ended.wait(rng.uniform(0.3, 1.5)):
        for _ in range(rng.choice([1, 1, 1, 2])):
            process = run.processes.get(rng.randrange(NUM_WORKERS))
            if process is not None and process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)


def _train_with_kills(rng: random.Random | None) -> tuple[str, _Run, list[Any], Counter[int]]:
    """Return why a run did not finish, the run, its weights by rank, and its samples."""
    with tempfile.TemporaryDirectory(prefix="in_place_kills_") as folder:
        directory = Path(folder)
        run, has_ended = _Run(directory), threading.Event()
        killer = threading.Thread(target=_kill, args=(run, rng, has_ended), daemon=True)
        if rng is not None:
            killer.start()
        reason = run.wait()
        has_ended.set()
        lines = [line for file in directory.glob("steps_*") for line in file.open()]
        samples = Counter(
            sample for line in lines if line[-1] == "\n" for sample in json.loads(line)
        )
        files = [] if reason else sorted(directory.glob("weights_*.pt"))
        return reason, run, [torch.load(file) for file in files], samples


def _is_equal(weights: list[Any], expected: list[Any]) -> bool:
    """Compare the weights of all ranks, and the buffers of rank 0, which DDP copies last."""
    return all(
        torch.allclose(value, expected[rank][name])
        for rank, values in enumerate(weights)
        for name, value in values.items()
        if rank == 0 or not name.startswith("1.running")
    )


def main() -> None:
    """Run the training with kills, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._in_place_kills")
    parser.add_argument("--runs", type=int, default=25, help="number of runs (25)")
    parser.add_argument("--seed", type=int, default=1, help="selects times and ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in TorchConfig().forkserver_preload:  # once, and not in each rank
        importlib.import_module(name)
    rng = random.Random(options.seed)
    _, _, expected, _ = _train_with_kills(None)
    seconds: list[float] = []
    outcomes = Counter[str]()
    for _ in range(options.runs):
        reason, run, weights, samples = _train_with_kills(rng)
        seconds += [recovered.stopped_seconds for recovered in run.recoveries]
        if max(samples.values(), default=0) > EPOCHS:
            reason = "FAILED: a sample was used twice"
        elif not reason:
            reason = "equal weights" if _is_equal(weights, expected) else "FAILED: other weights"
        outcomes[reason] += 1
    for reason, count in outcomes.most_common():
        print(f"{count:4} runs: {reason}")
    seconds.sort()
    if seconds:
        median = seconds[len(seconds) // 2]
        print(f"{len(seconds)} recoveries, stopped for {median:.2f} s, at most {seconds[-1]:.2f} s")
    raise SystemExit(any(reason.startswith(("FAILED", "it hangs", "rank")) for reason in outcomes))


if __name__ == "__main__":
    main()
