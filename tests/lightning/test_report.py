"""Reports of RayTrainReportCallback and DrawbarLogger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar import train
from drawbar.lightning import RayTrainReportCallback
from drawbar.train import Checkpoint, CheckpointUploadMode, Result, runs
from tests.lightning.digits import STEPS, fit

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # Lightning's
]


def steps_saved(result: Result) -> list[int]:
    return [metrics["step"] for _, metrics in result.best_checkpoints]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_train_steps": 0}, "every_n_train_steps must be a positive integer"),
        ({"every_n_epochs": 1.5}, "every_n_epochs must be a positive integer"),
        ({"every_n_epochs": None}, "are both None"),
        ({"checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD}, "SYNC or ASYNC"),
        ({"save_checkpoints": False, "validation": True}, "Set save_checkpoints=True"),
    ],
)
def test_report_callback_with_invalid_arguments_raises(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RayTrainReportCallback(**arguments)


def test_report_callback_reports_by_steps_and_epochs(tmp_path: Path) -> None:
    def callbacks(pl: Any) -> list[Any]:
        return [RayTrainReportCallback(every_n_train_steps=5)]

    result = fit(tmp_path, callbacks, num_workers=0, max_epochs=2)
    assert steps_saved(result) == [5, STEPS, 15, 2 * STEPS]  # step 10 is the end of the epoch
    last = result.metrics
    assert last is not None
    assert (last["epoch"], last["step"]) == (1, 2 * STEPS)
    assert {"loss", "val_loss"} < last.keys()
    progress = runs.find_run(result.path).progress
    assert progress is not None
    assert (progress.done, progress.total, progress.unit) == (2 * STEPS, 2 * STEPS, "batches")
    checkpoint = result.checkpoint
    assert checkpoint is not None
    assert [path.name for path in Path(checkpoint).glob("[!.]*")] == ["checkpoint.ckpt"]
    assert not Path(result.path, ".staging").exists()


def test_report_callback_async_reports_every_second_epoch(tmp_path: Path) -> None:
    def callbacks(pl: Any) -> list[Any]:
        asynchronous = CheckpointUploadMode.ASYNC
        return [RayTrainReportCallback(every_n_epochs=2, checkpoint_upload_mode=asynchronous)]

    result = fit(tmp_path, callbacks, num_workers=0, max_epochs=4)
    assert steps_saved(result) == [2 * STEPS, 4 * STEPS]


def test_report_callback_with_accumulation_counts_steps(tmp_path: Path) -> None:
    def callbacks(pl: Any) -> list[Any]:
        return [RayTrainReportCallback(every_n_train_steps=2, every_n_epochs=None)]

    result = fit(tmp_path, callbacks, num_workers=0, max_epochs=1, accumulate_grad_batches=2)
    assert steps_saved(result) == [2, 4]


def read_step(checkpoint: Checkpoint) -> dict[str, int]:
    saved = torch.load(Path(checkpoint, "checkpoint.ckpt"), weights_only=False)
    return {"found_step": saved["global_step"]}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two epochs, whose checkpoints are stored and validated during training.

    A `ModelCheckpoint` saves its own files, too; the best is validated once more in the end.
    """
    folder = tmp_path_factory.mktemp("run")

    class OnRankZeroAlone:
        """Reports on rank 0 alone, as a hook of the user's might."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.is_global_zero:
                train.report({"mine": trainer.global_step})

    def callbacks(pl: Any) -> list[Any]:
        mine = type("Mine", (OnRankZeroAlone, pl.Callback), {})
        asynchronous = CheckpointUploadMode.ASYNC
        return [
            mine(),
            RayTrainReportCallback(checkpoint_upload_mode=asynchronous, validation=True),
            pl.callbacks.ModelCheckpoint(folder / "mine", "{epoch}", monitor="val_loss"),
        ]

    def after(trainer: Any, module: Any) -> tuple[str, int]:
        trainer.validate(module, ckpt_path="best", verbose=False)
        return trainer.checkpoint_callback.best_model_path, trainer.world_size

    return fit(folder, callbacks, max_epochs=2, validation=read_step, after=after)


def test_report_callback_validates_checkpoints(on_two_ranks: Result) -> None:
    assert steps_saved(on_two_ranks) == [STEPS, 2 * STEPS]
    found = [metrics["found_step"] for _, metrics in on_two_ranks.best_checkpoints]
    assert found == steps_saved(on_two_ranks)


def test_logger_reports_steps_of_all_ranks_and_validation(on_two_ranks: Result) -> None:
    rows = on_two_ranks.metrics_dataframe
    logged = rows[rows["loss"].notna() & rows["val_loss"].isna()]
    for rank in range(2):
        assert list(logged[logged["rank"] == rank]["step"]) == list(range(2 * STEPS))
    validated = rows[rows["loss"].isna() & rows["val_loss"].notna()]
    assert list(validated["rank"].value_counts()) == [3, 3]  # of the epochs, and in the end


def test_default_model_checkpoint_is_removed(tmp_path: Path) -> None:
    def after(trainer: Any, module: Any) -> Any:
        return trainer.checkpoint_callback

    def callbacks(pl: Any) -> list[Any]:
        return [RayTrainReportCallback()]

    result = fit(tmp_path, callbacks, num_workers=0, max_epochs=1, after=after)
    assert result.return_value is None
    assert len(result.best_checkpoints) == 1


def test_model_checkpoint_with_report_callback_saves_own_files(on_two_ranks: Result) -> None:
    (saved,) = (Path(on_two_ranks.path).parent / "mine").iterdir()
    assert on_two_ranks.return_values == [(str(saved), 2)] * 2
    assert len(on_two_ranks.best_checkpoints) == 2
    assert saved.name in {"epoch=0.ckpt", "epoch=1.ckpt"}
