"""TorchCheckpoint: a checkpoint made of a model, and a model out of a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import nn

from drawbar.train import Checkpoint


class TorchCheckpoint(Checkpoint):
    """A checkpoint that holds one model, or its state dict, as the file `model.pt`.

    A directory of your own (`train.checkpoint_dir()`) holds anything, and is written where the
    checkpoint will lie; this writes to a temporary one first.
    """

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, object]) -> Self:
        """Save a state dict in a new temporary directory."""
        return cls._create(dict(state_dict))

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """Save a model, its code by reference, in a new temporary directory."""
        return cls._create(model)

    @classmethod
    def _create(cls, value: object) -> Self:
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        torch.save(value, directory / cls.MODEL_FILENAME)
        return cls(directory)

    def get_model(self, model: nn.Module | None = None) -> nn.Module:
        """Load the model, onto the CPU.

        Args:
            model: Gets the state dict, if that is what was saved. Without it the file is unpickled,
                which runs whatever its writer wanted to run.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
            ValueError: It has a state dict, and no model was given.
        """
        with self.as_directory() as folder:
            path = Path(folder, self.MODEL_FILENAME)
            if not path.exists():
                raise FileNotFoundError(f"{self} has no file {self.MODEL_FILENAME!r}")
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        if isinstance(loaded, nn.Module):
            return loaded
        if model is None:
            raise ValueError(f"{self} has a state dict; give the model that it is for")
        model.load_state_dict(loaded)
        return model
