"""Kill a rank again and again, and compare a full restart with in-place recovery.

    python -m benchmarks fault_tolerance --seconds 120 --every 15

Each mode trains the same model on the same data until all epochs are complete. A step computes for
`STEP_S`, as on a device. Each rank writes the time, the number, and the samples of its steps to a
file, from which all figures are computed, without the journal. The model has double precision:
training increases differences of rounding, within 6,000 steps from 1e-7 to 1e-3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import TorchTrainer, prepare_data_loader, prepare_model, prepare_optimizer
from drawbar.train import FailureConfig, RunConfig, ScalingConfig

NUM_WORKERS = 4
BATCH_SIZE = 4
STEPS_PER_EPOCH = 100
STEP_S = 0.1
CHECKPOINT_STEPS = 50
MODES = ("restart", "in_place")


def train_func(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train, and record each step."""
    directory, rank = Path(config["directory"]), train.get_context().get_world_rank()
    (directory / f"pid_{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    layers = nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1)
    model: Any = prepare_model(nn.Sequential(*layers).double())
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = prepare_data_loader(_make_loader())
    start = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            state = torch.load(os.path.join(path, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["epoch"]
    with (directory / f"steps_{rank}.jsonl").open("a") as file:
        for epoch in range(start, config["epochs"]):
            for samples, x, y in loader:
                time.sleep(STEP_S)  # a device computes
                # If the rank dies in this step, a later record of the same step replaces this one.
                step = [time.time(), scheduler.last_epoch, samples.tolist()]
                print(json.dumps(step), file=file, flush=True)
                loss: Any = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                # Counted by a scheduler, whose state a new process receives.
                if scheduler.last_epoch % CHECKPOINT_STEPS == 0:
                    _save(model, optimizer, scheduler, epoch, loss)
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def _save(model: Any, optimizer: Any, scheduler: Any, epoch: int, loss: torch.Tensor) -> None:
    metrics = {"loss": loss.item()}
    if train.get_context().get_world_rank() > 0:
        train.report(metrics)
        return
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    with train.checkpoint_dir() as path:
        torch.save({**state, "epoch": epoch}, path / "state.pt")
        train.report(metrics, checkpoint=path)


def _make_loader() -> DataLoader[Any]:
    number = STEPS_PER_EPOCH * BATCH_SIZE * NUM_WORKERS
    x = torch.randn(number, 16, generator=torch.Generator().manual_seed(1)).double()
    dataset = TensorDataset(torch.arange(number), x, x.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)


class _Killer(threading.Thread):
    """Kills a random rank at intervals, while the run trains."""

    def __init__(self, directory: Path, every: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self._directory, self._every = directory, every
        self._random = random.Random(seed)
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Wait for the first step, and kill until the end."""
        while len(list(self._directory.glob("steps_*.jsonl"))) < NUM_WORKERS:
            if self._has_ended.wait(0.1):
                return
        while not self._has_ended.wait(self._every):
            rank = self._random.randrange(NUM_WORKERS)
            try:
                os.kill(int((self._directory / f"pid_{rank}").read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.times.append(time.time())

    def stop(self) -> None:
        """End the thread."""
        self._has_ended.set()
        self.join()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of one run.

    Attributes:
        mode: Mode of the run.
        kills: Number of kills.
        seconds: Time from the first to the last step.
        lost_steps: Steps that were made a second time, per kill.
        stopped: Longest time between two steps of any rank, for each kill, without the usual one.
        wrong_samples: Samples that were not consumed once per epoch, without replaced steps.
        weights: Final weights.
    """

    mode: str
    kills: int
    seconds: float
    lost_steps: float
    stopped: list[float]
    wrong_samples: int
    weights: dict[str, torch.Tensor]


def _measure(mode: str, epochs: int, every: float, seed: int) -> Outcome:
    """Run one mode; "undisturbed" without kills."""
    with tempfile.TemporaryDirectory(prefix="fault_tolerance_") as folder:
        directory = Path(folder) / "steps"
        directory.mkdir()
        recovery: Any = "in_place" if mode == "in_place" else "restart"
        killer = _Killer(directory, every, seed)
        if mode != "undisturbed":
            killer.start()
        result = TorchTrainer(
            train_func,
            train_loop_config={"directory": str(directory), "epochs": epochs},
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=RunConfig(
                name=mode,
                storage_path=folder,
                failure_config=FailureConfig(max_failures=-1, recovery=recovery),
            ),
        ).fit()
        if mode != "undisturbed":
            killer.stop()
        return _make_outcome(mode, epochs, directory, killer.times, result.return_values[0])


def _make_outcome(
    mode: str, epochs: int, directory: Path, kills: list[float], weights: dict[str, torch.Tensor]
) -> Outcome:
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(directory.glob("steps_*.jsonl"))
    ]
    latest = [{number: samples for _, number, samples in steps} for steps in ranks]
    counts = Counter(sample for steps in latest for samples in steps.values() for sample in samples)
    repeated = sum(map(len, ranks)) - sum(map(len, latest))
    times = sorted(time for steps in ranks for time, _, _ in steps)
    of_rank = [time for time, _, _ in ranks[0]]
    usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(of_rank))
    return Outcome(
        mode=mode,
        kills=len(kills),
        seconds=times[-1] - times[0],
        lost_steps=repeated / NUM_WORKERS / max(len(kills), 1),
        stopped=[_find_gap(times, kill) - usual for kill in kills if kill < times[-1]],
        wrong_samples=sum(abs(count - epochs) for count in counts.values()),
        weights=weights,
    )


def _find_gap(times: Sequence[float], kill: float) -> float:
    """Return the longest time between two steps of any rank, from shortly before a kill."""
    later = [each for each in times if kill - 2 * STEP_S < each < kill + 30]
    return max((b - a for a, b in itertools.pairwise(later)), default=0.0)


def main(arguments: Sequence[str]) -> None:
    """Measure all modes, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fault_tolerance")
    parser.add_argument("--seconds", type=float, default=600, help="time of an undisturbed run")
    parser.add_argument("--every", type=float, default=15, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0, help="selects the ranks that are killed")
    parser.add_argument("--mode", choices=MODES, help="measure this mode only")
    options = parser.parse_args(arguments)
    epochs = max(1, round(options.seconds / STEP_S / STEPS_PER_EPOCH))
    console = Console(highlight=False, soft_wrap=True)
    ray.init(address="local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    outcomes = [
        _measure(mode, epochs, options.every, options.seed)
        for mode in ("undisturbed", *([options.mode] if options.mode else MODES))
    ]
    undisturbed = outcomes[0]
    console.print("| mode | kills | goodput | lost steps per kill | stopped per kill | samples |")
    console.print("|---|---|---|---|---|---|")
    for outcome in outcomes:
        goodput = undisturbed.seconds / outcome.seconds
        stopped = "-"
        if outcome.stopped:
            median = statistics.median(outcome.stopped)
            stopped = f"{median:.2f} s, at most {max(outcome.stopped):.2f} s"
        samples = "once" if not outcome.wrong_samples else f"{outcome.wrong_samples} wrong"
        console.print(
            f"| {outcome.mode} | {outcome.kills} | {goodput:.1%} | {outcome.lost_steps:.2f} | "
            f"{stopped} | {samples} |"
        )
    for outcome in outcomes[1:]:
        difference = max(
            float((outcome.weights[name] - value).abs().max())
            for name, value in undisturbed.weights.items()
        )
        console.print(
            f"{outcome.mode}: weights differ by {difference:.1e} from the undisturbed run"
        )
