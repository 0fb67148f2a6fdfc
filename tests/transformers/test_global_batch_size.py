"""prepare_trainer(global_batch_size=): the loss curve does not depend on the number of workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drawbar.train import WorkerGroupError

EPOCH_STEPS = 2
VERIFY = sys.executable, "-m", "drawbar.cli", "verify"
SAVES = {"save_strategy": "steps", "save_steps": 1}


def make_function(tiny: Any, path: Path, max_steps: int, num_rows: int = 102) -> Any:
    """Return a function that trains up to a step. The last 6 rows of an epoch are dropped."""

    def function() -> None:
        from drawbar.transformers import prepare_trainer

        trainer = tiny.trainer(
            path / "output",
            model=tiny.gpt(dropout=0.0),
            train_dataset=tiny.windows(num_rows),
            max_steps=max_steps,
            lr_scheduler_type="constant",
            dataloader_drop_last=True,
            **SAVES,
        )
        prepare_trainer(trainer, global_batch_size=48).train()

    return function


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_global_batch_size_keeps_loss_curve_with_other_numbers_of_workers(
    tiny: Any, runs: Any, tmp_path: Path
) -> None:
    four, changed = tmp_path / "four", tmp_path / "changed"
    runs.fit(make_function(tiny, four, 6), four, num_workers=4)
    for num_workers, max_steps in ((4, 1), (2, 3), (3, 5), (4, 6)):
        runs.fit(make_function(tiny, changed, max_steps), changed, num_workers=num_workers)
    options = ["--metric", "loss", "--step", "step", "--tolerance", "1e-4"]
    verified = subprocess.run(
        [*VERIFY, changed / "run", "--trajectory", four / "run", *options],
        capture_output=True,
        text=True,
    )
    assert verified.stdout.startswith(f"loss: equal at {3 * EPOCH_STEPS} steps"), verified
    assert verified.returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_dataset": "rows"}, "Set drop_last=True in the data loader to drop the last 6"),
        ({"per_device_train_batch_size": 5}, "must be a multiple of batch_size=5"),
        ({"train_dataset": "stream"}, "needs a train_dataset with a length"),
    ],
)
def test_prepare_trainer_with_unsuitable_global_batch_raises(
    tiny: Any, runs: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def function() -> None:
        import datasets

        from drawbar.transformers import prepare_trainer

        data = {"rows": tiny.windows(102), "stream": datasets.IterableDataset.from_generator(list)}
        chosen = data[options.get("train_dataset", "rows")]
        trainer = tiny.trainer(tmp_path / "output", **{**options, "train_dataset": chosen})
        prepare_trainer(trainer, global_batch_size=48).train()

    with pytest.raises(WorkerGroupError, match=message):
        runs.fit(function, tmp_path, num_workers=0, max_failures=0)
