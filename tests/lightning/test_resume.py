"""Resume from the newest checkpoint yields the results of an uninterrupted run."""

from __future__ import annotations

import argparse
import enum
import functools
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from drawbar.lightning import RayDDPStrategy, RayTrainReportCallback, prepare_trainer
from drawbar.lightning._launcher import find_newest_of_named_run
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context
from tests.lightning.digits import SAMPLES, STEPS, fit, losses, make_module
from tests.stops import stop_run

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # Lightning's
]


def every_4_steps(pl: Any) -> list[Any]:
    return [RayTrainReportCallback(every_n_train_steps=4)]


def every_epoch(pl: Any) -> list[Any]:
    return [RayTrainReportCallback()]


def stop_in_step_13(pl: Any) -> list[Any]:
    """Stop the run within an epoch. Without a report callback, `ModelCheckpoint` saves."""

    class Stop(pl.Callback):  # type: ignore[misc]  # one of two packages
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 13:
                stop_run()

    return [Stop()]


def stop_at_end_of_epoch(pl: Any) -> list[Any]:
    class Stop(pl.Callback):  # type: ignore[misc]  # one of two packages
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 2 * STEPS:
                stop_run()

    return [Stop(), RayTrainReportCallback(every_n_epochs=3)]


def saved(result: Result) -> list[tuple[int, int]]:
    return [(metrics["epoch"], metrics["step"]) for _, metrics in result.best_checkpoints]


def test_restart_after_sigkill_yields_same_losses(tmp_path: Path) -> None:
    whole = fit(tmp_path, every_4_steps, run="whole", num_workers=0)
    die_at = (18,)  # after a checkpoint in mid-epoch
    killed = fit(tmp_path, every_4_steps, run="killed", die_at=die_at, package="pytorch_lightning")
    assert losses(killed).keys() == losses(whole).keys() == set(range(3 * STEPS))
    assert losses(killed) == pytest.approx(losses(whole), abs=1e-5)
    assert saved(killed) == saved(whole)
    assert set(killed.metrics_dataframe["attempt"]) == {0, 1}
    fit(tmp_path, every_4_steps, run="resumed", num_workers=0, max_epochs=1)
    resumed = fit(tmp_path, every_4_steps, run="resumed", num_workers=0)  # from an epoch's end
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-5)
    assert saved(resumed) == saved(whole)
    for callbacks, step in ((stop_in_step_13, 14), (stop_at_end_of_epoch, 20)):
        run = f"stopped_{step}"
        stopped = fit(tmp_path, callbacks, run=run, num_workers=0)
        assert stopped.metrics is not None
        assert stopped.metrics["step"] == step
        resumed = fit(tmp_path, every_4_steps, run=run, num_workers=0)
        assert losses(resumed) == pytest.approx(losses(whole), abs=1e-5)


def test_resume_mid_epoch_reads_samples_once(tmp_path: Path) -> None:
    def no_epochs(pl: Any) -> list[Any]:
        return [RayTrainReportCallback(every_n_train_steps=4, every_n_epochs=None)]

    first = fit(tmp_path, no_epochs, num_workers=0, max_steps=4).return_value
    second = fit(tmp_path, no_epochs, num_workers=0, max_epochs=1).return_value
    assert sorted(first + second) == list(range(SAMPLES))


def test_explicit_ckpt_path_takes_precedence(tmp_path: Path) -> None:
    first = fit(tmp_path, every_epoch, num_workers=0, max_epochs=2)
    checkpoint, metrics = first.best_checkpoints[0]
    assert metrics["step"] == STEPS
    path = {"ckpt_path": f"{checkpoint.path}/checkpoint.ckpt"}
    second = fit(tmp_path, every_epoch, num_workers=0, max_epochs=3, fit_options=path)
    assert len(second.return_value) == 2 * SAMPLES


def test_resumed_trainer_tests_current_weights(tmp_path: Path) -> None:
    def after(trainer: Any, module: Any) -> Any:
        (found,) = trainer.validate(module, verbose=False)
        return trainer.ckpt_path, found["val_loss"]

    fit(tmp_path, every_epoch, num_workers=0, max_epochs=1)
    result = fit(tmp_path, every_epoch, num_workers=0, max_epochs=2, after=after)
    assert result.checkpoint is not None
    manifest = result.checkpoint.manifest
    assert manifest is not None
    assert result.return_value == (None, pytest.approx(manifest.metrics["val_loss"]))


class Size(enum.Enum):
    SMALL = 1


HYPERPARAMETERS: dict[str, Any] = {
    "path": Path("data"),
    "size": Size.SMALL,
    "rate": np.float64(0.1),
    "options": argparse.Namespace(depth=2),
    "date": datetime(2026, 1, 1),
    "activation": torch.nn.ReLU,
    "reduce": functools.partial(sum, start=1),
    "layers": (slice(2), range(3), frozenset({1}), defaultdict(list), deque([1])),
}


def train_and_fail_once(
    ckpt_path: str | None, hyperparameters: dict[str, Any], callback: bool = False
) -> dict[str, Any]:
    """Train three epochs with a Trainer without `prepare_trainer`, which fails in the second."""
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self, **hyperparameters: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.epochs: list[int] = []

        def configure_callbacks(self) -> Any:
            return [pl.callbacks.ModelCheckpoint(save_top_k=-1)] if callback else []

        def on_train_epoch_start(self) -> None:
            self.epochs.append(self.current_epoch)
            if self.current_epoch == 2 and get_context().get_attempt() == 0:
                raise ValueError("once")

        def training_step(self, batch: Any, index: int) -> Any:
            return (self.weight - batch).square().mean()

        def test_step(self, batch: Any, index: int) -> None:
            self.log("weight", self.weight.sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def make_trainer() -> Any:
        return pl.Trainer(
            max_epochs=3,
            accelerator="cpu",
            strategy=RayDDPStrategy(),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    data: Any = torch.utils.data.DataLoader(cast("Any", torch.ones(4, 1)), 2)
    net = Net(**hyperparameters)
    make_trainer().fit(net, data, ckpt_path=ckpt_path)
    (tested,) = make_trainer().test(Net(), data, ckpt_path="last", verbose=False)
    return {"epochs": net.epochs, "weight": net.weight.item(), "tested": tested["weight"]}


def fail_once(folder: Path, name: str, *arguments: Any) -> Result:
    run_config = RunConfig(
        name=name, storage_path=folder, failure_config=FailureConfig(max_failures=1)
    )
    return TorchTrainer(
        lambda: train_and_fail_once(*arguments),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()


@pytest.mark.parametrize("arguments", [("last", HYPERPARAMETERS), (None, HYPERPARAMETERS, True)])
def test_strategy_alone_resumes_and_reports(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    """A restart and a new Trainer's `test("last")` load the run's newest checkpoint."""
    result = fail_once(tmp_path, "run", *arguments)
    assert result.return_value["epochs"] == [2]
    assert result.return_value["tested"] == pytest.approx(result.return_value["weight"])
    assert result.metrics is not None
    assert result.metrics["step"] == 6
    assert result.checkpoint is not None
    run_config = RunConfig(name="run", storage_path=tmp_path)
    assert find_newest_of_named_run(run_config) == result.checkpoint


def test_ckpt_path_starts_only_the_first_attempt(tmp_path: Path) -> None:
    """The path is of a checkpoint at an epoch's end; the failure comes an epoch later."""
    first = fail_once(tmp_path, "first", None, {}, True)
    path = f"{first.best_checkpoints[0][0].path}/checkpoint.ckpt"
    second = fail_once(tmp_path, "second", path, {}, True)
    assert second.return_value["epochs"] == [2]
    assert {metrics["step"] for _, metrics in second.best_checkpoints} == {4, 6}


def learning_rates(fails: bool) -> list[tuple[int, float]]:
    """Train four epochs with a scheduler that monitors a metric of the epoch's first batch."""
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.rates: list[tuple[int, float]] = []

        def training_step(self, batch: Any, index: int) -> Any:
            if fails and (self.current_epoch, index) == (1, 2) and not get_context().get_attempt():
                raise ValueError("once")
            optimizer = cast("Any", self.optimizers())
            self.rates.append((self.current_epoch, optimizer.param_groups[0]["lr"]))
            if index == 0:
                self.log("metric", 1.0)
            return (self.weight - batch).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "metric"},
            }

    data: Any = torch.utils.data.DataLoader(cast("Any", torch.ones(4, 1)))
    net = Net()
    callback = pl.callbacks.ModelCheckpoint(every_n_train_steps=1)
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=4, strategy=RayDDPStrategy(), callbacks=[callback], **options).fit(
        net, data
    )
    return net.rates


def test_resume_mid_epoch_steps_scheduler_on_plateau(tmp_path: Path) -> None:
    runs = [
        TorchTrainer(
            functools.partial(learning_rates, fails),
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(
                name=str(fails), storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
        for fails in (False, True)
    ]
    complete, resumed = (run.return_value for run in runs)
    assert resumed == complete[-len(resumed) :]
    assert len(resumed) == 4 * 4 - 6


def by_model_checkpoint(pl: Any) -> list[Any]:
    return [pl.callbacks.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)]


def by_report_callback(pl: Any) -> list[Any]:
    return [RayTrainReportCallback(every_n_train_steps=2, every_n_epochs=None)]


@pytest.mark.parametrize("callbacks", [by_model_checkpoint, by_report_callback])
def test_resume_with_accumulation_saves_step_once(
    tmp_path: Path, callbacks: Callable[[Any], list[Any]]
) -> None:
    ends: list[dict[str, Any]] = [{"max_steps": 2}, {"max_epochs": 2}]
    for options in ends:
        result = fit(tmp_path, callbacks, num_workers=0, accumulate_grad_batches=4, **options)
    assert [step for _, step in saved(result)] == [2, 4, 6]


def two_folds(pl: Any, make_trainer: Callable[..., Any]) -> list[Any]:
    modules = []
    for fold in range(2):
        torch.manual_seed(fold)
        modules.append(make_module(pl))
        make_trainer(fold == 1, max_epochs=2).fit(modules[-1])
    return modules


def more_epochs_later(pl: Any, make_trainer: Callable[..., Any]) -> list[Any]:
    trainer, module = make_trainer(True, max_epochs=1), make_module(pl)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return [module]


def tuned_before(pl: Any, make_trainer: Callable[..., Any]) -> list[Any]:
    from lightning.pytorch.tuner.tuning import Tuner

    trainer, module = make_trainer(True, max_epochs=2), make_module(pl)
    assert Tuner(trainer).lr_find(module, num_training=5, update_attr=False) is not None
    module.seen.clear()
    trainer.fit(module)
    return [module]


@pytest.mark.parametrize(
    ("trained", "seen_again"),
    [(two_folds, 2 * SAMPLES), (more_epochs_later, SAMPLES - 48), (tuned_before, SAMPLES - 48)],
)
def test_several_fits_resume_from_their_own_checkpoints(
    tmp_path: Path, trained: Callable[..., list[Any]], seen_again: int
) -> None:
    """A failure at step 14 leaves a checkpoint of step 12; at the end all is as without it."""

    def function(config: dict[str, bool]) -> tuple[list[torch.Tensor], int]:
        import lightning.pytorch as pl

        class Fails(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 14 and get_context().get_attempt() == 0:
                    raise ValueError("once")

        def make_trainer(fails: bool, **options: Any) -> Any:
            fails = fails and config["fails"]
            trainer = pl.Trainer(
                accelerator="cpu",
                strategy=RayDDPStrategy(),
                callbacks=[*by_model_checkpoint(pl), *([Fails()] if fails else [])],
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                default_root_dir=tmp_path,
                **options,
            )
            return prepare_trainer(trainer)

        pl.seed_everything(1, verbose=False)
        modules = trained(pl, make_trainer)
        return [next(each.parameters()).detach() for each in modules], len(modules[-1].seen)

    def run(name: str, **config: bool) -> tuple[list[torch.Tensor], int]:
        failures = FailureConfig(max_failures=1)
        weights: tuple[list[torch.Tensor], int] = (
            TorchTrainer(
                function,
                train_loop_config=config,
                scaling_config=ScalingConfig(num_workers=0),
                run_config=RunConfig(name=name, storage_path=tmp_path, failure_config=failures),
            )
            .fit()
            .return_value
        )
        return weights

    whole, _ = run("whole", fails=False)
    failed, seen = run("failed", fails=True)
    assert seen == seen_again
    for one, other in zip(whole, failed, strict=True):
        torch.testing.assert_close(one, other)
