"""Helpers for runs with `num_workers=0` and for their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointUploadMode,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
)

ASYNC = CheckpointUploadMode.ASYNC


def fit(function: Any, storage_path: Path, config: Any = None, **run_config: Any) -> Result:
    return DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=storage_path, **run_config),
        metadata={"by": "ann"},
    ).fit()


def save(text: str, **options: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(text)
        train.report({"text": text}, checkpoint=path, **options)


def save_asynchronously(texts: str) -> None:
    for text in texts:
        save(text, checkpoint_upload_mode=ASYNC)


def content(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    checkpoint.verify()
    return (Path(checkpoint) / "model").read_text()
