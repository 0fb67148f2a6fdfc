"""Resume from the newest checkpoint yields the results of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.lightning import RayDDPStrategy, RayTrainReportCallback, prepare_trainer
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context
from tests.lightning.digits import SAMPLES, STEPS, fit, losses, make_module

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # Lightning's
]


def every_4_steps(pl: Any) -> list[Any]:
    return [RayTrainReportCallback(every_n_train_steps=4)]


def every_epoch(pl: Any) -> list[Any]:
    return [RayTrainReportCallback()]


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
