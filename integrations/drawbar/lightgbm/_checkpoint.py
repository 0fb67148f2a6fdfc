"""LightGBMCheckpoint: a checkpoint made of a booster, and a booster out of a checkpoint."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Self

from lightgbm import Booster

from drawbar.lightgbm._report import RayTrainReportCallback
from drawbar.train import Checkpoint


class LightGBMCheckpoint(Checkpoint):
    """A checkpoint that holds one booster, as `RayTrainReportCallback` saves it."""

    MODEL_FILENAME = RayTrainReportCallback.CHECKPOINT_NAME

    @classmethod
    def from_model(cls, booster: Booster, *, path: str | os.PathLike[str] | None = None) -> Self:
        """Save a booster.

        Args:
            booster: The booster.
            path: The directory to save it in. Default: a new temporary one.
        """
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_") if path is None else path)
        booster.save_model(directory / cls.MODEL_FILENAME)
        return cls(directory)

    def get_model(self) -> Booster:
        """Load the booster.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
        """
        return RayTrainReportCallback.get_model(self, self.MODEL_FILENAME)
