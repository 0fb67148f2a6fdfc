"""A script of a user's who runs `mypy --strict`: `make check` does, which finds lost types too."""

import os
from pathlib import Path
from typing import Any, assert_type

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    ReportedCheckpoint,
    Result,
    RunConfig,
    ScalingConfig,
    UserCallback,
)


class Tracker(UserCallback):
    """Watches the run."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_report(
        self,
        run_context: train.RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Keep the losses."""
        self.seen += [each["loss"] for each in metrics]


def train_func(config: dict[str, Any]) -> str:
    assert_type(train.get_context().get_world_rank(), int)
    assert_type(train.get_checkpoint(), Checkpoint | None)
    for step in range(config["steps"]):
        with train.checkpoint_dir() as path:
            assert_type(path, Path)
            (path / "model").write_text(str(step))
            train.report({"loss": 1 / (step + 1)}, checkpoint=path)
    assert_type(train.get_all_reported_checkpoints(), list[ReportedCheckpoint])
    return "done"


tracker = Tracker()
trainer = DataParallelTrainer(
    train_func,
    train_loop_config={"steps": 3},
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(
        name="typed",
        storage_path=Path("runs").absolute(),
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(2, "loss", "min"),
        callbacks=[tracker],
    ),
)
result = trainer.fit()
assert_type(result, Result)
assert_type(result.checkpoint, Checkpoint | None)
assert_type(result.metrics, dict[str, Any] | None)
assert result.checkpoint is not None
assert_type(os.fspath(result.checkpoint), str)
assert Path(result.checkpoint, "model").read_text() == "2"
assert tracker.seen == [1, 0.5, 1 / 3]
assert len(result.best_checkpoints) == 2

try:
    ScalingConfig(num_workers="2")  # type: ignore[arg-type]  # strict mypy asks for each of these
    CheckpointConfig(checkpoint_score_order="up")  # type: ignore[arg-type]
    train.report({"loss": 1.0}, checkpoint=3)  # type: ignore[arg-type]
except TypeError as wrong:
    assert "num_workers" in str(wrong)  # a user would see this message
