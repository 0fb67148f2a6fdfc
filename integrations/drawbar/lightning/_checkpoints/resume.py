"""An attempt goes on from the run's newest checkpoint, without a line of the user's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar.lightning._checkpoints.commits import CHECKPOINT_NAME, path_of
from drawbar.lightning._package import OfUsersPackage, Package, with_base
from drawbar.train import Checkpoint
from drawbar.train.backend import inherited_checkpoint

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
else:
    Callback = object


def go_on_from_newest_checkpoint(trainer: Any, package: Package) -> None:
    """Have the Trainer's `fit` go on from the checkpoint that this attempt starts from, if any.

    `fit(ckpt_path=...)` wins. A checkpoint that Lightning did not write is left alone.
    """
    checkpoint = inherited_checkpoint()
    if trainer.state.fn not in (None, "fit"):  # the driver has launched another call
        return
    if checkpoint is None or not _is_of_lightning(checkpoint):
        return
    trainer.ckpt_path = str(path_of(checkpoint))
    trainer.callbacks.insert(0, with_base(_LoadOnce, package)())
    # It is resumable: see _data_position.py.
    warnings.filterwarnings("ignore", "(?s).*your dataloader is not resumable")


def _is_of_lightning(checkpoint: Checkpoint) -> bool:
    manifest = checkpoint.manifest
    if manifest is not None:
        return any(Path(file.path).parts[0] == CHECKPOINT_NAME for file in manifest.files)
    with checkpoint.as_directory() as folder:  # the user's own, by `resume_from_checkpoint`
        return Path(folder, CHECKPOINT_NAME).exists()


class _LoadOnce(OfUsersPackage, Callback, base="callbacks.Callback"):
    """Has a Trainer forget its `ckpt_path` once `fit` has loaded it, so that `test` does not."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: object, checkpoint: dict[str, object]
    ) -> None:
        if trainer.state.fn == "fit":
            trainer.ckpt_path = None
