"""TensorflowCheckpoint: a checkpoint made of a model, and a model out of a checkpoint."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

from drawbar.train import Checkpoint

_FILENAME_KEY = "_model_filename"
_KERAS_MODULE_KEY = "_model_keras"


class TensorflowCheckpoint(Checkpoint):
    """A checkpoint that holds one model of Keras, of version 2 or 3.

    A directory of your own (`train.checkpoint_dir()`) holds anything, and is written where the
    checkpoint will lie; this writes to a temporary one first.
    """

    MODEL_FILENAME_KEY = _FILENAME_KEY

    @classmethod
    def from_model(cls, model: Any) -> Self:
        """Save a model as `model.keras` in a new temporary directory."""
        folder = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        model.save(str(folder / "model.keras"))
        is_keras_2 = any(kind.__module__.startswith("tf_keras") for kind in type(model).__mro__)
        return cls._create(folder, "model.keras", "tf_keras" if is_keras_2 else "keras")

    @classmethod
    def from_h5(cls, file_path: str | Path) -> Self:
        """Copy a model that was saved as an HDF5 file into a new temporary directory.

        Raises:
            ValueError: There is no such file, or its name does not end in `.h5`.
        """
        path = Path(file_path)
        if not path.is_file() or path.suffix != ".h5":
            raise ValueError(
                f"from_h5 takes the path of a file that ends in .h5, found {file_path!r}"
            )
        folder = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        shutil.copy(path, folder / path.name)
        return cls._create(folder, path.name, "tensorflow.keras")

    @classmethod
    def from_saved_model(cls, dir_path: str | Path) -> Self:
        """Copy a SavedModel's directory into a new temporary one. Only Keras 2 loads it as a model.

        Raises:
            ValueError: There is no such directory.
        """
        if not Path(dir_path).is_dir():
            raise ValueError(f"from_saved_model takes the path of a directory, found {dir_path!r}")
        folder = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        shutil.copytree(dir_path, folder, dirs_exist_ok=True)
        return cls._create(folder, ".", "tf_keras")

    @classmethod
    def _create(cls, folder: Path, name: str, keras: str) -> Self:
        checkpoint = cls(folder)
        checkpoint.update_metadata({_FILENAME_KEY: name, _KERAS_MODULE_KEY: keras})
        return checkpoint

    def get_model(self) -> Any:
        """Load the model, by the Keras that it was made with.

        Raises:
            ValueError: The checkpoint's metadata does not say which file holds the model.
        """
        metadata = self.get_metadata()
        if _FILENAME_KEY not in metadata:
            raise ValueError(
                f"{self} does not say which of its files is the model: its metadata has no "
                f"{_FILENAME_KEY!r}. Make it by TensorflowCheckpoint.from_model, or load the file "
                "yourself"
            )
        keras = importlib.import_module(metadata.get(_KERAS_MODULE_KEY, "tensorflow.keras"))
        with self.as_directory() as folder:
            return keras.models.load_model(str(Path(folder, metadata[_FILENAME_KEY])))
