"""A Trainer in the driver starts workers and receives their results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from drawbar.lightning import RayDDPStrategy, RayFSDPStrategy
from drawbar.train import RunConfig, WorkerGroupError

pytestmark = pytest.mark.usefixtures("ray_cluster")


def make_trainer(
    plain: Any, folder: Path, strategy: Callable[..., Any], num_workers: int = 2, **options: Any
) -> Any:
    import lightning as L

    run_config = RunConfig(storage_path=folder / "runs")
    return L.Trainer(
        strategy=strategy(num_workers=num_workers, run_config=run_config),
        default_root_dir=folder,
        **{"max_epochs": 2, **plain.QUIET, **options},
    )


def make_callbacks() -> list[Any]:
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

    class History(Callback):
        """A callback without a state_dict()."""

        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []
            self.modules: list[object] = []

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.losses.append(trainer.callback_metrics["val_loss"])
            self.modules.append(pl_module)

    return [
        ModelCheckpoint(monitor="val_loss"),
        EarlyStopping("val_loss", patience=5),
        History(),
    ]


@pytest.fixture(scope="module")
def fitted(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a fitted Trainer and its module."""
    from lightning.pytorch.loggers import CSVLogger

    folder = tmp_path_factory.mktemp("fitted")
    trainer = make_trainer(
        plain,
        folder,
        RayDDPStrategy,
        callbacks=make_callbacks(),
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    module = plain.Digits()
    trainer.fit(module, plain.DigitsData(2))
    return trainer, module


def test_launcher_returns_metrics_progress_and_state(fitted: tuple[Any, Any]) -> None:
    trainer, _ = fitted
    assert {"loss", "val_loss"} <= trainer.callback_metrics.keys()
    assert trainer.logged_metrics["val_loss"] == trainer.callback_metrics["val_loss"]
    assert (trainer.current_epoch, trainer.global_step) == (2, 40)
    assert trainer.state.status == "finished"
    early_stopping, checkpoint = trainer.early_stopping_callback, trainer.checkpoint_callback
    assert early_stopping.best_score == checkpoint.best_model_score
    assert (Path(trainer.logger.log_dir) / "metrics.csv").read_text().count("\n") > 40


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning uses a deprecated class of torch
def test_callbacks_after_fit_have_the_public_attributes_of_plain_lightning(
    plain: Any, fitted: tuple[Any, Any], tmp_path: Path
) -> None:
    import lightning as L

    trainer, _ = fitted
    alone: Any = L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        max_epochs=2,
        callbacks=make_callbacks(),
        **plain.QUIET,
    )
    alone.fit(plain.Digits(), plain.DigitsData(1))
    for callback, expected in zip(trainer.callbacks, alone.callbacks, strict=True):
        assert type(callback).__qualname__ == type(expected).__qualname__
        for name, value in vars(expected).items():
            if name.startswith("_") or name in RUN_PATHS or name in MODULE_METHODS:
                continue
            if name == "modules":  # the driver keeps its own objects
                assert getattr(callback, name) == []
            else:
                assert getattr(callback, name) == approximately(value), name
    checkpoint = trainer.checkpoint_callback
    assert Path(checkpoint.best_model_path).exists()
    assert checkpoint.current_score == checkpoint.best_k_models[checkpoint.best_model_path]
    assert trainer.callback_metrics == approximately(alone.callback_metrics)


MODULE_METHODS = {"log", "log_dict"}  # methods of the module that Lightning attaches for `fit`
RUN_PATHS = {"dirpath", "best_model_path", "best_k_models", "kth_best_model_path"}


def approximately(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return pytest.approx(value.item(), rel=1e-3)
    if isinstance(value, list):
        return [approximately(each) for each in value]
    if isinstance(value, dict):
        return {name: approximately(each) for name, each in value.items()}
    return pytest.approx(value, rel=1e-3) if isinstance(value, float) else value


def test_driver_trainer_saves_checkpoint_after_fit(fitted: tuple[Any, Any], tmp_path: Path) -> None:
    trainer, module = fitted
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    saved = torch.load(tmp_path / "final.ckpt", weights_only=False)
    assert saved["global_step"] == 40
    torch.testing.assert_close(saved["state_dict"], dict(module.state_dict()))


def test_tuner_with_num_workers_raises(plain: Any, tmp_path: Path) -> None:
    from lightning.pytorch.tuner.tuning import Tuner

    tuner = Tuner(make_trainer(plain, tmp_path, RayDDPStrategy))
    with pytest.raises(
        ValueError, match=r"Tuner does not support .* its results would stay in the workers"
    ):
        tuner.lr_find(plain.Digits(), plain.DigitsData(2))


def test_save_weights_only_raises_before_workers_start(plain: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    callbacks = [ModelCheckpoint(save_weights_only=True)]
    trainer = make_trainer(plain, tmp_path, RayDDPStrategy, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"Remove save_weights_only, or add .*RayTrainReport"):
        trainer.fit(plain.Digits(), plain.DigitsData(2))
    assert not (tmp_path / "runs").exists()


def test_launcher_weights_equal_last_checkpoint(fitted: tuple[Any, Any]) -> None:
    trainer, module = fitted
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert saved["global_step"] == 40
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, saved["state_dict"][name])


def test_best_and_last_checkpoint_are_tested_and_predicted_with(
    plain: Any, fitted: tuple[Any, Any]
) -> None:
    trainer, module = fitted
    checkpoint = trainer.checkpoint_callback
    before = {name: vars(checkpoint)[name] for name in (*RUN_PATHS, "current_score")}
    (tested,) = trainer.test(datamodule=plain.DigitsData(2), ckpt_path="best")
    untrained = plain.Digits()
    predicted = torch.cat(trainer.predict(untrained, plain.DigitsData(2), ckpt_path="last"))
    data = plain.DigitsData(2)
    data.setup("predict")
    x, y = data.rest.tensors
    assert len(predicted) == len(y)
    assert sorted(predicted.tolist()) == sorted(module(x).argmax(1).tolist())
    accuracy = (module(x).argmax(1) == y).float().mean().item()
    assert tested["accuracy"] == pytest.approx(accuracy)
    assert {name: vars(checkpoint)[name] for name in before} == before  # fit has set them


@pytest.mark.nightly
def test_launcher_returns_full_weights_of_sharded_model(
    plain: Any, tmp_path: Path, fitted: tuple[Any, Any]
) -> None:
    """`test_strategy.py` has the weights that each strategy gathers."""
    trainer = make_trainer(plain, tmp_path, RayFSDPStrategy, enable_checkpointing=False)
    module = plain.Digits()
    trainer.fit(module, plain.DigitsData(2))
    best = fitted[0].checkpoint_callback.best_model_score.item()  # of the last epoch
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(best, abs=1e-4)
    for name, value in fitted[1].state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-4, rtol=0)


@pytest.mark.nightly
def test_launcher_error_contains_user_line(plain: Any, tmp_path: Path) -> None:
    class Broken(plain.Digits):  # type: ignore[misc]  # a class of an untyped module
        def on_train_start(self) -> None:
            raise ArithmeticError("this very line")

    trainer = make_trainer(plain, tmp_path, RayDDPStrategy, 1, enable_checkpointing=False)
    with pytest.raises(WorkerGroupError, match=r"this very line \(.*test_launcher.py:\d+ in on_tr"):
        trainer.fit(Broken(), plain.DigitsData(1))
    assert trainer.state.status == "interrupted"


SCRIPT = """
import pytorch_lightning as pl, ray, sys, torch
from drawbar.lightning import RayDDPStrategy
from drawbar.train import RunConfig

class Forever(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        if self.global_step == 3:
            packages = [each for each in ("lightning", "pytorch_lightning") if each in sys.modules]
            print("imported in the worker:", *packages, flush=True)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

ray.init(logging_level="error")
strategy = RayDDPStrategy(num_workers=1, run_config=RunConfig(storage_path=sys.argv[1]))
trainer = pl.Trainer(strategy=strategy, max_epochs=10**6, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False)
try:
    trainer.fit(Forever(), torch.utils.data.DataLoader(torch.ones(64, 2), 2))
finally:
    packages = [each for each in ("lightning", "pytorch_lightning") if each in sys.modules]
    print("imported in the driver:", *packages, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """A script of PyTorch Lightning's own package, ended by Ctrl-C in its training."""

    code: int
    output: str


@pytest.fixture(scope="module")
def ended(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("script")
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        before = ""
        for line in process.stdout:
            before += line
            if "imported in the worker:" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        after, _ = process.communicate()
    return Ended(process.returncode, before + after)


@pytest.mark.nightly
def test_with_pytorch_lightning_the_other_package_is_not_imported(ended: Ended) -> None:
    for place in ("worker", "driver"):
        assert re.findall(f"imported in the {place}: (.*)", ended.output) == ["pytorch_lightning"]


@pytest.mark.nightly
def test_launcher_ctrl_c_stops_run_gracefully(ended: Ended) -> None:
    assert ended.code == 1, ended.output  # Lightning's exit code after Ctrl-C
    assert "To resume from the latest checkpoint" in ended.output
