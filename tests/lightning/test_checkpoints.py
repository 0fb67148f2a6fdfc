"""ModelCheckpoint saves into the run, shards load anywhere, and Lightning needs no Drawbar."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.lightning import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayModelParallelStrategy,
    RayTrainReportCallback,
    _checkpoint,
)
from drawbar.train import Checkpoint, Result, WorkerGroupError
from drawbar.train.runs import find_run
from tests.lightning.digits import STEPS, fit, losses

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings(  # Lightning's, torch's, DeepSpeed's
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": RayDDPStrategy,
    "fsdp": lambda: RayFSDPStrategy(state_dict_type="sharded"),
    "fsdp2": lambda: RayModelParallelStrategy(tensor_parallel_size=1),
    "zero3": lambda: RayDeepSpeedStrategy(stage=3),
}


def every_7_steps(pl: Any) -> list[Any]:
    return [RayTrainReportCallback(every_n_train_steps=7, every_n_epochs=None)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of three uninterrupted epochs on one worker."""
    return losses(fit(tmp_path_factory.mktemp("whole"), every_7_steps, num_workers=0))


def rest_of(whole: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in whole.items() if step >= 14}


@pytest.mark.nightly
class TestWorldSizes:
    @pytest.fixture(scope="class")
    def begun(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
        """Return the checkpoint of each strategy on two workers at step 14, in mid-epoch."""
        strategies = list(STRATEGIES.values())
        folder = tmp_path_factory.mktemp("begun")
        result = fit(folder, every_7_steps, strategies=strategies, max_steps=14)
        at_14 = [each for each, metrics in result.best_checkpoints if metrics["step"] == 14]
        return dict(zip(STRATEGIES, at_14, strict=True))

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_resume_restores_weights_optimizer_and_data(
        self,
        strategy: str,
        begun: dict[str, Checkpoint],
        whole: dict[int, float],
        tmp_path: Path,
    ) -> None:
        run = self.resume(tmp_path, strategy, begun[strategy], num_workers=0)
        assert losses(run) == pytest.approx(rest_of(whole), abs=1e-5)

    @pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
    @pytest.mark.nightly
    def test_resume_on_more_workers_has_losses_of_one_process(
        self, strategy: str, whole: dict[int, float], tmp_path: Path
    ) -> None:
        begun = fit(
            tmp_path / "begun",
            every_7_steps,
            strategies=[STRATEGIES[strategy]],
            num_workers=0,
            max_steps=14,
        )
        assert begun.checkpoint is not None
        run = self.resume(tmp_path, strategy, begun.checkpoint, num_workers=2)
        assert losses(run) == pytest.approx(rest_of(whole), abs=1e-5)

    def resume(self, folder: Path, strategy: str, begun: Checkpoint, *, num_workers: int) -> Result:
        """Resume from step 14 in another run, and check the samples that it reads."""
        run = fit(
            folder / "resumed",
            every_7_steps,
            strategies=[STRATEGIES[strategy]],
            num_workers=num_workers,
            begin=begun,
        )
        seen = sorted(chain(*run.return_values))
        assert len(seen) == (3 * STEPS - 14) * 24
        assert {seen.count(each) for each in set(seen)} <= {1, 2}  # of one epoch and a part
        return run

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_sharded_checkpoint_has_files_of_all_ranks(
        self, strategy: str, begun: dict[str, Checkpoint]
    ) -> None:
        manifest = begun[strategy].manifest
        assert manifest is not None
        files = sorted(file.path.removeprefix("checkpoint.ckpt") for file in manifest.files)
        if strategy == "ddp":
            assert files == [""]
        else:
            shards = "__{}_0.distcp" if "fsdp" in strategy else "zero_pp_rank_{}_mp_rank_00_optim"
            for rank in range(2):
                assert any(shards.format(rank) in file for file in files), files


def test_save_checkpoint_on_one_rank_raises(tmp_path: Path) -> None:
    def callbacks(pl: Any) -> list[Any]:
        _checkpoint.SAVE_TIMEOUT_S = 2.0  # this process is the worker

        class OnlyRankZero(pl.callbacks.Callback):  # type: ignore[misc]  # one of two packages
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                if trainer.is_global_zero:
                    trainer.save_checkpoint(tmp_path / "alone.ckpt")
                train.report({"epoch": trainer.current_epoch})

        return [OnlyRankZero()]

    with pytest.raises(WorkerGroupError, match=r"save_checkpoint\(.*alone.ckpt.*was called"):
        fit(tmp_path, callbacks, max_epochs=2)


class TestModelCheckpoint:
    @pytest.fixture(scope="class")
    def result(self, tmp_path_factory: pytest.TempPathFactory) -> Result:
        """Return a run whose ModelCheckpoint keeps the two best."""

        def callbacks(pl: Any) -> list[Any]:
            checkpoint = pl.callbacks.ModelCheckpoint(
                "elsewhere", "{epoch}-{val_loss:.2f}", monitor="val_loss", save_top_k=2
            )
            return [checkpoint, RayTrainReportCallback(save_checkpoints=False)]

        def after(trainer: Any, module: Any) -> Any:
            callback = trainer.checkpoint_callback
            (found,) = trainer.validate(module, ckpt_path="best", verbose=False)
            scores = {path: float(score) for path, score in callback.best_k_models.items()}
            return callback.best_model_path, scores, found["val_loss"]

        return fit(tmp_path_factory.mktemp("run"), callbacks, max_epochs=4, after=after)

    def test_model_checkpoint_paths_equal_committed_checkpoints(self, result: Result) -> None:
        best, scores, _ = result.return_value
        kept = {f"{checkpoint.path}/checkpoint.ckpt" for checkpoint, _ in result.best_checkpoints}
        assert scores.keys() == kept
        assert best == min(scores, key=lambda path: scores[path])
        assert Path(best).parent.name.startswith("epoch=3-val_loss=0.")
        assert Path(best).parent.name.endswith(f"-step={4 * STEPS}")
        assert Path(best).parent.parent == Path(result.path)

    def test_model_checkpoint_loads_best_checkpoint(self, result: Result) -> None:
        best, scores, found = result.return_value
        assert found == pytest.approx(scores[best])

    def test_model_checkpoint_commits_metrics(self, result: Result) -> None:
        _, scores, _ = result.return_value
        for checkpoint, metrics in result.best_checkpoints:
            found = scores[f"{checkpoint.path}/checkpoint.ckpt"]
            assert metrics["val_loss"] == pytest.approx(found)
        best = result.get_best_checkpoint("val_loss", "min")
        assert best is not None
        assert metrics["step"] == 4 * STEPS

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"save_last": "link"}, "a committed checkpoint has only one name"),
            ({"save_weights_only": True}, "from which a restart cannot resume"),
            ({"filename": "{val/loss}"}, "would create nested directories"),
            ({"filename": "a/{epoch}", "auto_insert_metric_name": False}, "nested directories"),
        ],
    )
    def test_model_checkpoint_with_unsupported_setting_raises(
        self, arguments: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(WorkerGroupError, match=message):
            fit(tmp_path, lambda pl: [pl.callbacks.ModelCheckpoint(**arguments)], num_workers=0)

    def test_save_on_exception_keeps_original_error(self, tmp_path: Path) -> None:
        """One rank fails, the other waits for it in a collective of torch."""

        def callbacks(pl: Any) -> list[Any]:
            class Fails(pl.Callback):  # type: ignore[misc]  # one of two packages
                def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                    if trainer.global_rank == 1:
                        raise ValueError("the cause") from KeyError("behind it")

            _checkpoint.SAVE_TIMEOUT_AFTER_ERROR_S = 0.1  # this process is the worker
            return [pl.callbacks.ModelCheckpoint(save_on_exception=True), Fails()]

        with pytest.raises(WorkerGroupError, match=r"^rank 1: ValueError: the cause") as raised:
            fit(tmp_path, callbacks)
        assert "KeyError: 'behind it'" in str(raised.value)
        assert "because not all ranks called save_checkpoint() within 0.1 s" in str(raised.value)

    def test_resume_with_save_last_uses_last_checkpoint(self, tmp_path: Path) -> None:
        def callbacks(pl: Any) -> list[Any]:
            return [pl.callbacks.ModelCheckpoint(filename="best", save_last=True, save_top_k=0)]

        fit(tmp_path, callbacks, num_workers=0, max_epochs=1)
        result = fit(tmp_path, callbacks, num_workers=0, max_epochs=2)
        assert len(result.return_value) == 240  # one epoch of two
        names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
        assert names == [f"last-step={2 * STEPS}"]

    def test_clean_keeps_best_checkpoint_of_monitor_after_resume(self, tmp_path: Path) -> None:
        def callbacks(pl: Any) -> list[Any]:
            # The first epoch is the best, since the loss goes down.
            return [pl.callbacks.ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=-1)]

        fit(tmp_path, callbacks, num_workers=0, max_epochs=1)
        result = fit(tmp_path, callbacks, num_workers=0, max_epochs=3)
        unused = find_run(result.path).find_unused_files(num_to_keep=1)
        assert [Path(file.path).name for file in unused] == [f"epoch=1-step={2 * STEPS}"]

    def test_model_checkpoint_works_with_remote_storage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        def callbacks(pl: Any) -> list[Any]:
            return [pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2)]

        def after(trainer: Any, module: Any) -> Any:
            (found,) = trainer.validate(module, ckpt_path="best", verbose=False)
            return len(module.seen), found["val_loss"]

        storage = f"memory://{uuid.uuid4().hex}"
        fit(storage, callbacks, num_workers=0, max_epochs=2)
        result = fit(storage, callbacks, num_workers=0, max_epochs=3, after=after)
        seen, found = result.return_value
        assert seen == STEPS * 24  # the third epoch alone
        assert [metrics["step"] for _, metrics in result.best_checkpoints] == [20, 30]
        assert found == pytest.approx(result.best_checkpoints[1][1]["val_loss"])


PLAIN = """
import sys

sys.modules["drawbar"] = None  # cannot be imported

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


path = sys.argv[1]
weight = Plain.load_from_checkpoint(path).net[0].weight
data = TensorDataset(torch.zeros(240, 64), torch.zeros(240, dtype=torch.long))
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, **options)
trainer.fit(Plain(), DataLoader(data, 24), ckpt_path=path)
print("steps", trainer.global_step, "weights", tuple(weight.shape))
"""


def test_checkpoint_resumes_in_plain_lightning(tmp_path: Path) -> None:
    result = fit(tmp_path, lambda pl: [RayTrainReportCallback()], num_workers=0, max_epochs=1)
    assert result.checkpoint is not None
    path = Path(result.checkpoint, "checkpoint.ckpt")
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert f"steps {2 * STEPS} weights (32, 64)" in done.stdout
