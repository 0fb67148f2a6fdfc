"""A restart restores state that Lightning's checkpoints do not contain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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

FailAt = tuple[tuple[int, int], ...]
"""Epoch and number of the batch at which each attempt fails."""

Steps = list[tuple[int, int, list[Any]]]
"""Epoch, number of the batch, and the rows of each loader."""


def make_module(fail_at: FailAt, make_backbone: Callable[[], torch.nn.Module]) -> Any:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.backbone, self.head = make_backbone(), torch.nn.Linear(1, 1)
            self.steps: Steps = []

        def training_step(self, batch: Any, index: int) -> Any:
            parts = batch if isinstance(batch, list) else [batch]
            attempt = get_context().get_attempt()
            if fail_at[attempt : attempt + 1] == ((self.current_epoch, index),):
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


def run(tmp_path: Path, function: Any, *fail_at: tuple[int, int], num_workers: int = 0) -> Any:
    """Return the steps of the last attempt and the final weights, of rank 0."""
    return (
        TorchTrainer(
            functools.partial(function, fail_at),
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name=f"run_{len(fail_at)}",
                storage_path=tmp_path,
                failure_config=FailureConfig(max_failures=len(fail_at)),
            ),
        )
        .fit()
        .return_value
    )


def check_restart(
    tmp_path: Path, function: Any, *fail_at: tuple[int, int], **options: Any
) -> Steps:
    """Check that a run with a failure ends like one without, and return its last steps."""
    all_steps, weights = run(tmp_path, function, **options)
    steps, resumed_weights = run(tmp_path, function, *fail_at, **options)
    assert steps == all_steps[-len(steps) :]
    assert resumed_weights == pytest.approx(weights)
    return cast("Steps", steps)


def several_loaders(
    mode: str, window: int, workers: int, fail_at: FailAt
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
    steps = check_restart(tmp_path, function, fail_at)
    assert steps[0][:2] == first


@pytest.mark.nightly
def test_several_loaders_of_several_ranks_continue_at_their_own_positions(tmp_path: Path) -> None:
    function = functools.partial(several_loaders, "max_size", 2, 0)
    steps = check_restart(tmp_path, function, (1, 5), num_workers=2)
    assert steps[0][:2] == (1, 4)
    assert steps[0][2][0] is None  # the first loader ended before the restart


def saves_at_ends_of_epochs(options: dict[str, int], fail_at: FailAt) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    checkpoints = [
        pl.callbacks.ModelCheckpoint(every_n_train_steps=2),  # with the last batch of an epoch
        pl.callbacks.ModelCheckpoint(save_on_train_epoch_end=True),
    ]
    data: Any = torch.arange(4.0).reshape(4, 1)
    loader: Any = DataLoader(data, batch_size=2)
    return fit(make_module(fail_at, linear), loader, callbacks=checkpoints, **options)


@pytest.mark.parametrize("options", [{"max_epochs": 4}, {"max_steps": 8}], ids=str)
def test_second_failure_repeats_no_epoch(tmp_path: Path, options: dict[str, int]) -> None:
    function = functools.partial(saves_at_ends_of_epochs, options)
    steps = check_restart(tmp_path, function, (1, 0), (2, 0))
    assert [step[:2] for step in steps] == [(2, 0), (2, 1), (3, 0), (3, 1)]


def unresumable(fail_at: FailAt) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(8.0).reshape(8, 1))

    return fit(
        make_module(fail_at, linear),
        DataLoader(Rows(), batch_size=2),
        callbacks=[pl.callbacks.ModelCheckpoint(every_n_train_steps=1)],
        max_epochs=1,
    )


def test_loader_that_repeats_batches_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="after 3 batches of an epoch, but .* first batch"):
        run(tmp_path, unresumable, (0, 3))


def stateful_stream(num_workers: int, fail_at: FailAt) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
        row = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.row < 6:
                self.row += 1
                yield torch.tensor([float(self.row)])
            self.row = 0

        def state_dict(self) -> dict[str, int]:
            return {"row": self.row}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.row = state["row"]

    return fit(
        make_module(fail_at, linear),
        StatefulDataLoader(Rows(), batch_size=1, num_workers=num_workers),
        callbacks=[pl.callbacks.ModelCheckpoint(every_n_train_steps=1)],
        max_epochs=2,
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("fail_at", [((0, 1),), ((0, 3), (0, 5)), ((1, 4),)], ids=str)
def test_stateful_loader_without_length_trains_each_batch_once(
    tmp_path: Path, num_workers: int, fail_at: tuple[tuple[int, int], ...]
) -> None:
    """Lightning prefetches a batch of it, also in the epoch after a restart."""
    check_restart(tmp_path, functools.partial(stateful_stream, num_workers), *fail_at)


def unfreezes(fail_at: FailAt) -> tuple[Steps, list[float]]:
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
    check_restart(tmp_path, unfreezes, (2, 1))


def loader_for_each_pair_of_epochs(fail_at: FailAt) -> tuple[Steps, list[float]]:
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
        check_restart(tmp_path, loader_for_each_pair_of_epochs, (3, 1))


def scheduled_accumulation() -> Any:
    import lightning.pytorch as pl

    return pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})


def pruning() -> Any:
    import lightning.pytorch as pl

    return pl.callbacks.ModelPruning(
        "l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False
    )


def learning_rate_finder() -> Any:
    import lightning.pytorch as pl

    return pl.callbacks.LearningRateFinder(num_training_steps=4)


def with_callback(make: Callable[[], Any], fail_at: FailAt) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    module = make_module(fail_at, functools.partial(torch.nn.Linear, 1, 1))
    module.lr = 0.1
    data: Any = torch.arange(12.0).reshape(12, 1)
    every_batch = timedelta(microseconds=1)
    return fit(
        module,
        DataLoader(data, batch_size=2, shuffle=True),
        callbacks=[make(), pl.callbacks.ModelCheckpoint(train_time_interval=every_batch)],
        max_epochs=4,
    )


@pytest.mark.parametrize("make", [scheduled_accumulation, pruning, learning_rate_finder])
def test_callback_continues_in_epoch_that_resumes_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    monkeypatch.chdir(tmp_path)  # the finder saves its checkpoint in the working directory
    steps = check_restart(tmp_path, functools.partial(with_callback, make), (2, 4))
    assert steps[0][:2] == ((2, 3) if make is scheduled_accumulation else (2, 4))


def sets_value_at_start_of_epoch(fail_at: FailAt) -> tuple[Steps, list[float]]:
    import lightning.pytorch as pl

    class SetValue(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.value = trainer.current_epoch

    return with_callback(SetValue, fail_at)


def test_skipped_on_train_epoch_start_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"epoch 1\. .* call SetValue.on_train_epoch_start again"):
        run(tmp_path, sets_value_at_start_of_epoch, (1, 2))
