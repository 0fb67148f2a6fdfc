"""Tests of data loaders that Accelerate has prepared: checkpoints contain their epochs."""

from __future__ import annotations

import warnings
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from drawbar.accelerate import launch, load_state, report_state
from drawbar.torch import prepare_data_loader
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError

HERE = ScalingConfig(num_workers=0)
BATCHES = 4  # of each epoch
EPOCHS = 4

pytestmark = pytest.mark.usefixtures("keep_environment")


def train(rows: list[list[int]], stop: int | None, limit: int) -> None:
    """Train with a checkpoint after each batch and each epoch; fail after the batch `stop`.

    An epoch ends after `limit` batches, by `break` if the loader has more.
    """
    torch.manual_seed(0)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seedable)
    data: DataLoader[int] = DataLoader(range(2 * BATCHES), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), data)
    step = (load_state(accelerator) or {"step": 0})["step"]
    first_epoch, skipped = divmod(step, limit)
    for epoch in range(first_epoch, EPOCHS):
        is_resumed = epoch == first_epoch and skipped
        batches = accelerator.skip_first_batches(loader, skipped) if is_resumed else loader
        for batch in batches:
            step += 1
            rows.append(batch.tolist())
            if step % limit:
                report_state(accelerator, {"step": step})
                if step == stop:
                    raise RuntimeError("planned failure")
            elif limit < BATCHES:
                break
        report_state(accelerator, {"step": step})
        if step == stop:
            raise RuntimeError("planned failure")


def run(run_config: RunConfig, *stops: int, limit: int = BATCHES) -> list[list[int]]:
    """Return the batches of a run that is resumed after each failure."""
    rows: list[list[int]] = []
    for stop in stops:
        with pytest.raises(TrainingFailedError, match="planned failure"):
            launch(train, (rows, stop, limit), HERE, run_config=run_config)
    launch(train, (rows, None, limit), HERE, run_config=run_config)
    return rows


def test_restart_with_seedable_sampler_continues_order_of_epochs(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def new_config() -> RunConfig:
        return RunConfig(name="run", storage_path=tmp_path_factory.mktemp("run"))

    expected = run(new_config())
    epochs = [tuple(map(tuple, expected[i : i + BATCHES])) for i in range(0, 16, BATCHES)]
    assert len(set(epochs)) == EPOCHS
    # At the end of an epoch, in an epoch, in its remainder, and after it; two epochs later.
    for stops in [(4, 6, 7, 8), (6, 13)]:
        assert run(new_config(), *stops) == expected, stops
    # Accelerate does not count an epoch that ends by `break`.
    expected = run(new_config(), limit=3)
    assert expected[:3] == expected[3:6]
    assert run(new_config(), 2, 4, limit=3) == expected


def test_report_state_with_accumulated_gradients_warns(run_config: RunConfig) -> None:
    def function() -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        for _ in range(2):
            with accelerator.accumulate(model):
                report_state(accelerator, {})

    with pytest.warns(UserWarning, match="accumulated gradients") as warned:
        launch(function, scaling_config=HERE, run_config=run_config)
    assert len([each for each in warned if "accumulated" in str(each.message)]) == 1


def test_load_state_with_sampler_of_unknown_order_warns(run_config: RunConfig) -> None:
    def function(is_seedable: bool) -> None:
        config = DataLoaderConfiguration(use_seedable_sampler=is_seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = range(4)
        accelerator.prepare(DataLoader(data, shuffle=True))  # type: ignore[arg-type]
        accelerator.prepare(DataLoader(data))  # type: ignore[arg-type]
        load_state(accelerator)

    with pytest.warns(UserWarning, match=r"RandomSampler.*use_seedable_sampler=True"):
        launch(function, (False,), HERE, run_config=run_config)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="After a restart")
        launch(function, (True,), HERE, run_config=run_config)


def test_load_state_with_stateful_loader_of_shuffle_buffer_warns(run_config: RunConfig) -> None:
    def function(buffer_size: int | None) -> None:
        accelerator = Accelerator(cpu=True)
        stream: Any = datasets.Dataset.from_dict({"x": [*range(4)]}).to_iterable_dataset()
        stream = stream.shuffle(buffer_size=buffer_size) if buffer_size else stream
        loader: Any = accelerator.prepare(DataLoader(stream))
        loader.use_stateful_dataloader = True  # as Accelerate sets it if torchdata is installed
        load_state(accelerator)

    with pytest.warns(UserWarning, match="loses the rows in the shuffle buffer"):
        launch(function, (2,), HERE, run_config=run_config)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="With use_stateful_dataloader")
        launch(function, (None,), HERE, run_config=run_config)


def test_accumulate_in_loop_over_other_loader_warns(run_config: RunConfig) -> None:
    def train_func(is_prepared: bool) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader: Any = DataLoader(torch.arange(3.0))  # type: ignore[arg-type]
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loader = accelerator.prepare(loader) if is_prepared else prepare_data_loader(loader)
        load_state(accelerator)
        for _ in loader:
            with accelerator.accumulate(model):
                pass
        assert accelerator.sync_gradients == is_prepared  # the third batch is the last one

    for is_prepared in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launch(train_func, (is_prepared,), HERE, run_config=run_config)
        found = [each for each in caught if "where an epoch ends" in str(each.message)]
        assert len(found) == (not is_prepared)
