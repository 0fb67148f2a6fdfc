"""Checkpoints with one booster, and loading a booster from any checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from drawbar.train import Checkpoint

T = TypeVar("T")


class SavableBooster(Protocol):
    """Booster of either library that can be saved to a file."""

    def save_model(self, filename: Path, /) -> object:
        """Write the model to a file."""


B = TypeVar("B", bound=SavableBooster)


class BoosterCheckpoint(Checkpoint, Generic[B]):
    """Checkpoint with one booster, as saved by the library's `RayTrainReportCallback`."""

    MODEL_FILENAME: ClassVar[str]
    CALLBACK: ClassVar[Any]
    """The library's `RayTrainReportCallback`, which loads the booster."""

    @classmethod
    def from_model(cls, booster: B, *, path: str | os.PathLike[str] | None = None) -> Self:
        """Save a booster and return its checkpoint.

        Args:
            booster: Booster to save.
            path: Directory to save it in. Default: a new temporary directory.
        """
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_") if path is None else path)
        booster.save_model(directory / cls.MODEL_FILENAME)
        return cls(directory)

    def get_model(self) -> B:
        """Load the booster.

        Raises:
            FileNotFoundError: The checkpoint has no model file.
        """
        booster: B = self.CALLBACK.get_model(self, self.MODEL_FILENAME)
        return booster


def load_model(checkpoint: Checkpoint, filename: str, load: Callable[[Path], T]) -> T:
    """Load the model of a checkpoint.

    Args:
        checkpoint: Checkpoint that contains a model.
        filename: Filename of the model, as passed to the callback that saved it.
        load: Function of the library that loads a model from a file.

    Raises:
        FileNotFoundError: The checkpoint has no such file.
    """
    with checkpoint.as_directory() as directory:
        path = Path(directory, filename)
        if not path.exists():
            names = sorted(file.name for file in Path(directory).iterdir())
            files = ", ".join(name for name in names if name[0] != ".") or "none"
            raise FileNotFoundError(
                f"{checkpoint.path} has no {filename!r}. Its files: {files}. Pass the filename "
                "that was passed to the callback."
            )
        return load(path)
