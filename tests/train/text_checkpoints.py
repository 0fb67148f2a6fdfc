"""Checkpoints that contain a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawbar import train
from drawbar.train import Checkpoint, CheckpointUploadMode

ASYNC = CheckpointUploadMode.ASYNC


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
