"""TorchCheckpoint: save and load one model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import nn

from drawbar.train import Checkpoint


class TorchCheckpoint(Checkpoint):
    """Checkpoint with one model, or its state dict, in the file `model.pt`.

    The file is written to a temporary directory first. To save other files, and to write them
    directly into the run's storage, use `train.checkpoint_dir()`.

    Args:
        path: Directory or URI of an existing checkpoint.
        filesystem: Filesystem of the path. Default: derived from the path.

    Example:
        ```python
        train.report({"loss": loss}, checkpoint=TorchCheckpoint.from_model(model))
        ...
        model = TorchCheckpoint(result.checkpoint.path).get_model()
        ```
    """

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, object]) -> Self:
        """Save a state dict in a new temporary directory.

        Args:
            state_dict: State dict of a model.

        Returns:
            The checkpoint.
        """
        return cls._create(dict(state_dict))

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """Save a model in a new temporary directory.

        Args:
            model: Model to pickle. The pickle contains no code, so the model's class must be
                importable when the model is loaded.

        Returns:
            The checkpoint.
        """
        return cls._create(model)

    @classmethod
    def _create(cls, value: object) -> Self:
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        torch.save(value, directory / cls.MODEL_FILENAME)
        return cls(directory)

    def get_model(self, model: nn.Module | None = None) -> nn.Module:
        """Load the model onto the CPU.

        Unpickles the file, which can execute arbitrary code. Load only files that you trust.

        Args:
            model: Model to load the state dict into. Required if a state dict was saved.

        Returns:
            The saved model, or `model` with the saved state dict.

        Raises:
            FileNotFoundError: The checkpoint has no file `model.pt`.
            ValueError: The checkpoint contains a state dict, and `model` is missing.
        """
        with self.as_directory() as directory:
            path = Path(directory, self.MODEL_FILENAME)
            if not path.exists():
                raise FileNotFoundError(
                    f"{self} has no file {self.MODEL_FILENAME!r}. Save it with "
                    "TorchCheckpoint.from_model() or from_state_dict()."
                )
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        if isinstance(loaded, nn.Module):
            return loaded
        if model is None:
            raise ValueError(
                f"{self} contains a state dict, not a model. Pass the model to load it into: "
                "get_model(model)."
            )
        model.load_state_dict(loaded)
        return model
