"""Runs of the soak test: the training function, its interruptions, and the consumed samples."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks._soak_loaders import Item, make_eval_loader, make_train_loader
from benchmarks._soak_scenario import Attempt, Scenario
from drawbar.torch import TorchTrainer, prepare_data_loader
from drawbar.train import (
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    checkpoint_dir,
    collective,
    get_checkpoint,
    get_context,
    report,
)
from drawbar.train.testing import run_in_threads

STOP = "planned stop of the soak test"
HANG_SECONDS = 60
EVALUATION_STEP = 2  # of an evaluation inside an epoch


@dataclass
class Pass:
    """The part of one iteration over a loader that one rank consumed in one attempt.

    Attributes:
        loader: "train" or "eval".
        epoch: Number of the iteration over this loader.
        length: `len(loader)`; None if the loader has no length.
        batches: Sample ids of each batch.
        draws: Random numbers drawn for each sample in a worker process.
    """

    loader: str
    epoch: int
    length: int | None
    batches: list[list[int]] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=list)

    def add(self, batch: list[Item]) -> None:
        """Record a batch."""
        self.batches.append([index for index, _ in batch])
        self.draws += [list(draws) for _, draws in batch if draws]


Part = list[list[Pass]]
"""Samples of an attempt up to the checkpoint from which the next one resumes, by rank."""


@dataclass
class Progress:
    """Position of the training function in its loops, as it saves it in checkpoints."""

    epoch: int = 0
    step: int = 0
    evaluations: int = 0
    is_trained: bool = False  # only the evaluation of this epoch is left


class TrainLoop:
    """The training function on one rank.

    Args:
        scenario: The scenario.
    """

    def __init__(self, scenario: Scenario) -> None:
        context = get_context()
        self._scenario = scenario
        self._rank = context.get_world_rank()
        self._attempt = scenario.attempts[context.get_attempt()]
        self._progress, self._parts = _load()
        self._passes: list[Pass] = []
        self._ticks = 0
        has_new_seed = scenario.has_new_seed and get_checkpoint() is not None
        self._seed = scenario.seed + context.get_attempt() * has_new_seed
        if scenario.is_on_ray:  # threads share a generator, which is seeded before they start
            torch.manual_seed(self._seed + self._rank * (scenario.num_workers == 0))

    def run(self) -> list[Part]:
        """Run all epochs; return the parts."""
        scenario, progress = self._scenario, self._progress
        loaders = None
        while progress.epoch < scenario.epochs:
            if loaders is None or scenario.is_per_epoch:
                loaders = self._prepare()
            train, evaluation = loaders
            if not progress.is_trained:
                self._train(train, evaluation)
                progress.is_trained, progress.step = True, 0
                if scenario.evaluation != "after_epoch":
                    progress.epoch, progress.is_trained = progress.epoch + 1, False
                self._tick()
            if progress.is_trained:
                for _ in self._record(evaluation, "eval", progress.evaluations):
                    self._tick()
                progress.evaluations += 1
                progress.epoch, progress.is_trained = progress.epoch + 1, False
                self._tick()
        return [*self._parts, collective.all_gather(self._passes)]

    def _prepare(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        named = self._scenario.is_named
        train = make_train_loader(self._scenario, self._seed)
        train = prepare_data_loader(train, name="train" if named else None)
        if self._scenario.evaluation is None:
            return train, train
        evaluation = make_eval_loader(self._scenario, self._seed)
        return train, prepare_data_loader(evaluation, name="eval" if named else None)

    def _train(self, train: DataLoader[Any], evaluation: DataLoader[Any]) -> None:
        scenario, progress = self._scenario, self._progress
        if scenario.set_epoch:
            getattr(train, scenario.set_epoch).set_epoch(progress.epoch)
        for _ in self._record(train, "train", progress.epoch):
            progress.step += 1
            if scenario.evaluation == "in_epoch" and progress.step == EVALUATION_STEP:
                for _ in self._record(evaluation, "eval", progress.evaluations):
                    pass
                progress.evaluations += 1
            self._tick()

    def _record(self, loader: DataLoader[Any], name: str, epoch: int) -> Iterator[None]:
        try:
            length = len(loader)
        except TypeError:
            length = None
        found = Pass(name, epoch, length)
        self._passes.append(found)
        for batch in loader:
            if name == "train" and self._progress.step == self._scenario.steps:
                break
            found.add(batch)
            yield

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks in self._attempt.checkpoints:
            _save(self._progress, self._parts, self._passes)
        if self._ticks == self._attempt.stop:
            self._stop()

    def _stop(self) -> None:
        if self._rank == self._attempt.world_size - 1:
            if self._scenario.is_on_ray:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(STOP)
        collective.barrier()


def _save(progress: Progress, parts: list[Part], passes: list[Pass]) -> None:
    """Report a checkpoint to which every rank contributes the samples that it consumed."""
    state = {
        "progress": dataclasses.asdict(progress),
        "parts": [[[dataclasses.asdict(each) for each in rank] for rank in part] for part in parts],
        "passes": [dataclasses.asdict(each) for each in passes],
    }
    rank = get_context().get_world_rank()
    with checkpoint_dir() as path:
        (path / f"rank_{rank}.json").write_text(json.dumps(state))
        report({}, checkpoint=path)


def _load() -> tuple[Progress, list[Part]]:
    """Read the checkpoint from which this attempt starts."""
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return Progress(), []
    files = sorted(Path(checkpoint.path).glob("rank_*.json"))
    ranks = [json.loads(file.read_text()) for file in files]
    parts = [
        [[Pass(**each) for each in rank] for rank in part]
        for part in [*ranks[0]["parts"], [rank["passes"] for rank in ranks]]
    ]
    return Progress(**ranks[0]["progress"]), parts


def train(config: dict[str, Any]) -> list[Part]:
    """Run the training function of `config["scenario"]`."""
    return TrainLoop(config["scenario"]).run()


def run_scenario(scenario: Scenario) -> list[Part]:
    """Run all attempts of a scenario; return their samples.

    Raises:
        TrainingFailedError: The run failed for another reason than the planned ones.
    """
    with tempfile.TemporaryDirectory(prefix="drawbar-soak-") as folder:
        number = 0
        for attempts in scenario.fits():
            _join_ranks()
            try:
                return _fit(scenario, attempts, number, folder)
            except TrainingFailedError as error:
                if not _is_planned(error, scenario):
                    raise
            number += len(attempts)
    raise AssertionError("the last attempt of a scenario must not have a planned stop")


def _join_ranks() -> None:
    """Wait for rank threads of a failed `fit()`, which restore the random state when they end."""
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join(timeout=HANG_SECONDS)


def _fit(scenario: Scenario, attempts: list[Attempt], first: int, folder: str) -> list[Part]:
    run_config = RunConfig(
        name="run",
        storage_path=folder,
        failure_config=FailureConfig(max_failures=len(attempts) - 1, hang_timeout=HANG_SECONDS),
        logging_config=LoggingConfig("ERROR"),
    )
    config = {"scenario": scenario}
    workers = attempts[0].world_size
    if scenario.is_on_ray:
        scaling = ScalingConfig(num_workers=workers)
        trainer = TorchTrainer(
            train, train_loop_config=config, scaling_config=scaling, run_config=run_config
        )
        return trainer.fit().return_values[0]  # type: ignore[no-any-return]
    has_new_seed = scenario.has_new_seed and any(Path(folder).glob("run/checkpoint_*"))
    torch.manual_seed(scenario.seed + first * has_new_seed)
    state = torch.get_rng_state()
    result = run_in_threads(
        train, num_workers=workers, train_loop_config=config, run_config=run_config
    )
    assert torch.equal(torch.get_rng_state(), state), "a loader drew from PyTorch's own generator"
    return result.return_values[0]  # type: ignore[no-any-return]


def _is_planned(error: TrainingFailedError, scenario: Scenario) -> bool:
    text = str(error)
    return "SIGKILL" in text if scenario.is_on_ray else STOP in text


def read_orders(scenario: Scenario, epochs: dict[str, int], limit: int) -> dict[str, list[Pass]]:
    """Iterate the loaders of a scenario in an uninterrupted run with one rank.

    Args:
        scenario: The scenario.
        epochs: Number of iterations over each loader, by its name.
        limit: Number of samples after which an endless epoch is left.

    Returns:
        The iterations over each loader, by its name.
    """
    make = {"train": make_train_loader, "eval": make_eval_loader}

    def read() -> dict[str, list[Pass]]:
        passes: dict[str, list[Pass]] = {}
        for name, count in epochs.items():
            loader = prepare_data_loader(make[name](scenario, scenario.seed))
            passes[name] = [Pass(name, epoch, None) for epoch in range(count)]
            for each in passes[name]:
                read = 0
                for batch in loader:
                    each.add(batch)
                    read += len(batch)
                    if scenario.sampler == "endless" and name == "train" and read >= limit:
                        break
        return passes

    # The complete order: the ranks drop the last samples after the split.
    scenario = dataclasses.replace(
        scenario,
        drop_last=scenario.drop_last and scenario.has_batch_sampler,
        num_workers=0,
        persistent_workers=False,
    )
    torch.manual_seed(scenario.seed)
    with tempfile.TemporaryDirectory(prefix="drawbar-soak-") as folder:
        run_config = RunConfig(
            name="orders", storage_path=folder, logging_config=LoggingConfig("ERROR")
        )
        result = run_in_threads(read, num_workers=1, run_config=run_config)
    return result.return_value  # type: ignore[no-any-return]
