"""set_global_batch_size: the loss curve does not depend on the number of workers."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from drawbar.accelerate import launch, load_state, report_state, set_global_batch_size
from drawbar.torch.integration import drop_incomplete_step
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError
from drawbar.train.runs import find_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

NUM_ROWS, EPOCH_STEPS = 204, 4  # the last 12 rows of an epoch are dropped
Rows = list[tuple[int, int]]


def train_steps(max_steps: int) -> Rows:
    """Train up to a step, report the loss of all rows after each step, and return the rows."""
    from accelerate import Accelerator, DataLoaderConfiguration

    torch.manual_seed(0)
    x = torch.randn(NUM_ROWS, 8, generator=torch.Generator().manual_seed(1))
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seedable)
    data: DataLoader[int] = DataLoader(range(NUM_ROWS), 4, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(network, optimizer, data)
    accumulation_steps = set_global_batch_size(accelerator, loader, 48)
    step, seen = (load_state(accelerator) or {"step": 0})["step"], Rows()
    epoch, done = divmod(step, EPOCH_STEPS)
    batches = accelerator.skip_first_batches(loader, done * accumulation_steps) if done else loader
    while True:
        for rows in batches:
            seen += [(epoch, row) for row in rows.tolist()]
            with accelerator.accumulate(model):
                loss = (model(x[rows]) - x[rows].sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                with torch.no_grad():
                    curve = (network(x) - x.sum(1, keepdim=True)).square().mean().item()
                report_state(accelerator, {"step": step, "curve": curve})
                if step == max_steps:
                    return seen
        batches, epoch = loader, epoch + 1


def run(path: Path, name: str, num_workers: int, max_steps: int) -> Any:
    return launch(
        train_steps,
        (max_steps,),
        ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name=name, storage_path=path),
    )


@pytest.mark.nightly
def test_global_batch_size_keeps_loss_curve_with_other_numbers_of_workers(
    ray_cluster: None, tmp_path: Path
) -> None:
    run(tmp_path, "four", 4, 2 * EPOCH_STEPS)
    rows: Rows = []
    for num_workers, max_steps in ((4, 2), (2, 4), (3, 6), (4, 8)):
        rows += itertools.chain(*run(tmp_path, "changed", num_workers, max_steps).return_values)
    expected, curve = (
        find_run(str(tmp_path / name)).get_curves()["curve"] for name in ("four", "changed")
    )
    assert len(expected) == 2 * EPOCH_STEPS
    assert curve == pytest.approx(expected, rel=1e-5)
    assert len(rows) == len(set(rows)) == 2 * EPOCH_STEPS * 48


@pytest.mark.parametrize(("num_workers", "steps"), [(1, 12), (2, 6), (3, 4), (4, 3)])
def test_complete_steps_have_each_row_once(num_workers: int, steps: int) -> None:
    from accelerate.data_loader import BatchSamplerShard

    rows: list[int] = []
    for rank in range(num_workers):
        batches: Any = BatchSampler(SequentialSampler(range(NUM_ROWS)), 4, drop_last=True)
        if num_workers > 1:
            batches = BatchSamplerShard(batches, num_workers, rank)
        drop_incomplete_step(batches, 1)
        drop_incomplete_step(batches, steps)  # of another Trainer
        found = list(batches)
        assert len(found) == len(batches)
        rows += itertools.chain(*found)
    assert sorted(rows) == list(range(EPOCH_STEPS * 48))


@pytest.mark.usefixtures("keep_environment")
@pytest.mark.parametrize(
    ("is_prepared", "options", "message"),
    [
        (True, {"batch_size": 4}, "Set drop_last=True in the data loader to drop the last 12"),
        (True, {"batch_size": 5}, "must be a multiple of batch_size=5"),
        (True, {"batch_size": None}, "needs a data loader with batch_size="),
        (False, {"batch_size": 4}, "Pass the loader that prepare"),
    ],
)
def test_set_global_batch_size_with_unsuitable_loader_raises(
    is_prepared: bool, options: dict[str, Any], message: str, run_config: RunConfig
) -> None:
    def function() -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        loader: Any = DataLoader(range(NUM_ROWS), **options)  # type: ignore[arg-type]
        if is_prepared:
            loader = accelerator.prepare(loader)
        set_global_batch_size(accelerator, loader, 48)

    with pytest.raises(TrainingFailedError, match=message):
        launch(function, (), ScalingConfig(num_workers=0), run_config=run_config)
