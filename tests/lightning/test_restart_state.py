"""A restart restores state that Lightning's checkpoints do not contain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from drawbar.lightning import RayDDPStrategy
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, RunConfig, ScalingConfig, get_context

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval"),
]

Steps = list[tuple[int, int, list[Any]]]
"""Epoch, number of the batch, and the rows of each loader."""


def make_module(
    fail_at: tuple[int, int] | None, make_backbone: Callable[[], torch.nn.Module]
) -> Any:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.backbone, self.head = make_backbone(), torch.nn.Linear(1, 1)
            self.steps: Steps = []

        def training_step(self, batch: Any, index: int) -> Any:
            parts = batch if isinstance(batch, list) else [batch]
            if fail_at == (self.current_epoch, index) and get_context().get_attempt() == 0:
                raise ValueError("once")
            rows = [None if part is None else part.flatten().tolist() for part in parts]
            self.steps.append((self.current_epoch, index, rows))
            outputs = [self.head(self.backbone(part / 100)) for part in parts if part is not None]
            return torch.cat(outputs).square().mean()

        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            return torch.optim.SGD(trained, lr=0.1)

    return Net()


def linear() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def normalized() -> torch.nn.Module:
    backbone = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    return torch.nn.Sequential(backbone, torch.nn.Linear(2, 1))


def fit(module: Any, loaders: Any, **options: Any) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    defaults: Any = {
        "strategy": RayDDPStrategy(),
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(**{**defaults, **options}).fit(module, loaders)
    return module.steps, torch.cat(
        [each.flatten() for each in module.state_dict().values()]
    ).tolist()


def run(tmp_path: Path, function: Any, *fail_at: int, num_workers: int = 0) -> Any:
    """Return the steps of the last attempt and the final weights, of rank 0."""
    return (
        TorchTrainer(
            functools.partial(function, fail_at or None),
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name=f"run_{fail_at}",
                storage_path=tmp_path,
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        .fit()
        .return_value
    )


def check_restart(tmp_path: Path, function: Any, *fail_at: int, **options: Any) -> Steps:
    """Check that a run with a failure ends like one without, and return its last steps."""
    all_steps, weights = run(tmp_path, function, **options)
    steps, resumed_weights = run(tmp_path, function, *fail_at, **options)
    assert steps == all_steps[-len(steps) :]
    assert resumed_weights == pytest.approx(weights)
    return cast("Steps", steps)


def several_loaders(
    mode: str, window: int, workers: int, fail_at: tuple[int, int] | None
) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    def make_loader(rows: int, **options: Any) -> Any:
        data: Any = torch.arange(float(rows)).reshape(rows, 1)
        return DataLoader(data, batch_size=2, shuffle=True, **options)

    every_batch = timedelta(microseconds=1)  # also between the steps of the optimizer
    return fit(
        make_module(fail_at, linear),
        CombinedLoader([make_loader(8, num_workers=workers), make_loader(28)], cast("Any", mode)),
        accumulate_grad_batches=window,
        callbacks=[pl.callbacks.ModelCheckpoint(train_time_interval=every_batch)],
        max_epochs=3,
    )


@pytest.mark.parametrize(
    ("mode", "window", "workers", "fail_at", "first"),
    [
        ("max_size", 1, 0, (1, 9), (1, 9)),
        ("max_size", 1, 1, (1, 9), (1, 9)),
        ("max_size_cycle", 1, 0, (1, 8), (1, 8)),
        ("max_size_cycle", 3, 0, (1, 5), (1, 3)),
        ("max_size_cycle", 6, 0, (1, 11), (1, 6)),
        ("min_size", 1, 0, (1, 2), (1, 2)),
        ("min_size", 3, 0, (2, 1), (2, 0)),
    ],
)
def test_several_loaders_continue_at_their_own_positions(
    tmp_path: Path,
    mode: str,
    window: int,
    workers: int,
    fail_at: tuple[int, int],
    first: tuple[int, int],
) -> None:
    """The first loader has 4 batches per epoch, the second one 14."""
    function = functools.partial(several_loaders, mode, window, workers)
    steps = check_restart(tmp_path, function, *fail_at)
    assert steps[0][:2] == first


def test_several_loaders_of_several_ranks_continue_at_their_own_positions(tmp_path: Path) -> None:
    function = functools.partial(several_loaders, "max_size", 2, 0)
    steps = check_restart(tmp_path, function, 1, 5, num_workers=2)
    assert steps[0][:2] == (1, 4)
    assert steps[0][2][0] is None  # the first loader ended before the restart


def unfreezes(fail_at: tuple[int, int] | None) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    def double_the_rate(epoch: int) -> float:
        return 2.0

    module = make_module(fail_at, normalized)
    unfreezing = pl.callbacks.BackboneFinetuning(1, double_the_rate)
    checkpoints = pl.callbacks.ModelCheckpoint(every_n_train_steps=1)
    data: Any = torch.arange(8.0).reshape(8, 1)
    return fit(
        module,
        DataLoader(data, batch_size=4, shuffle=True),
        callbacks=[unfreezing, checkpoints],
        max_epochs=4,
    )


def test_unfrozen_backbone_stays_unfrozen(tmp_path: Path) -> None:
    check_restart(tmp_path, unfreezes, 2, 1)


def loader_for_each_pair_of_epochs(fail_at: tuple[int, int] | None) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    module = make_module(fail_at, linear)

    def train_dataloader() -> Any:
        data: Any = torch.full((4, 1), float(module.current_epoch // 2))
        return DataLoader(data, batch_size=2)

    module.train_dataloader = train_dataloader
    return fit(
        module,
        None,
        callbacks=[pl.callbacks.ModelCheckpoint(every_n_train_steps=1)],
        max_epochs=6,
        reload_dataloaders_every_n_epochs=2,
    )


def test_loaders_are_created_again_in_the_same_epochs(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="called in epoch 2 and, after the restart, .* epoch 3"):
        check_restart(tmp_path, loader_for_each_pair_of_epochs, 3, 1)
