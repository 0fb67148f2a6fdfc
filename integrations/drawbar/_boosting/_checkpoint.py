"""A checkpoint that holds one booster, and the way out of any checkpoint that has one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from drawbar.train import Checkpoint

T = TypeVar("T")


class SavableBooster(Protocol):
    """What both libraries' boosters can."""

    def save_model(self, filename: Path, /) -> object:
        """Write the model into a file."""


B = TypeVar("B", bound=SavableBooster)


class BoosterCheckpoint(Checkpoint, Generic[B]):
    """A checkpoint that holds one booster, as a library's `RayTrainReportCallback` saves it."""

    MODEL_FILENAME: ClassVar[str]

    @classmethod
    def from_model(cls, booster: B, *, path: str | os.PathLike[str] | None = None) -> Self:
        """Save a booster.

        Args:
            booster: The booster.
            path: The directory to save it in. Default: a new temporary one.
        """
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_") if path is None else path)
        booster.save_model(directory / cls.MODEL_FILENAME)
        return cls(directory)


def load_model(checkpoint: Checkpoint, filename: str, load: Callable[[Path], T]) -> T:
    """Load the model of a checkpoint.

    Args:
        checkpoint: Of a run whose callback saved it.
        filename: As the callback had it.
        load: Makes the library's model of a file.

    Raises:
        FileNotFoundError: The checkpoint has no such file.
    """
    with checkpoint.as_directory() as directory:
        path = Path(directory, filename)
        if not path.exists():
            names = sorted(each.name for each in Path(directory).iterdir())
            files = ", ".join(name for name in names if name[0] != ".") or "none"
            raise FileNotFoundError(
                f"{checkpoint.path} has no {filename!r}; its files: {files}. Pass the "
                "filename that the callback was made with"
            )
        return load(path)
