"""TensorflowCheckpoint: save and load one Keras model."""

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
    """Checkpoint with one Keras 2 or Keras 3 model.

    The model is first written to a temporary directory. To save other files, or to write directly
    to the run's storage, use `train.checkpoint_dir()`.

    Args:
        path: Directory or URI of the checkpoint.
        filesystem: Filesystem of `path`. Default: derived from the path.

    Example:
        ```python
        checkpoint = TensorflowCheckpoint.from_model(model)
        drawbar.train.report({"loss": loss}, checkpoint=checkpoint)
        model = TensorflowCheckpoint(result.checkpoint.path).get_model()
        ```
    """

    MODEL_FILENAME_KEY = _FILENAME_KEY

    @classmethod
    def from_model(cls, model: Any) -> Self:
        """Save a model as `model.keras` in a new temporary directory."""
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        model.save(str(directory / "model.keras"))
        is_keras_2 = any(kind.__module__.startswith("tf_keras") for kind in type(model).__mro__)
        return cls._create(directory, "model.keras", "tf_keras" if is_keras_2 else "keras")

    @classmethod
    def from_h5(cls, file_path: str | Path) -> Self:
        """Copy a model in an HDF5 file to a new temporary directory.

        Raises:
            ValueError: The file does not exist, or its name does not end in `.h5`.
        """
        path = Path(file_path)
        if not path.is_file() or path.suffix != ".h5":
            raise ValueError(
                f"from_h5 needs the path of an existing .h5 file, found {file_path!r}."
            )
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        shutil.copy(path, directory / path.name)
        return cls._create(directory, path.name, "tensorflow.keras")

    @classmethod
    def from_saved_model(cls, dir_path: str | Path) -> Self:
        """Copy a SavedModel directory to a new temporary directory. Only Keras 2 can load it.

        Raises:
            ValueError: The directory does not exist.
        """
        if not Path(dir_path).is_dir():
            raise ValueError(
                f"from_saved_model needs the path of an existing directory, found {dir_path!r}."
            )
        directory = Path(tempfile.mkdtemp(prefix="checkpoint_"))
        shutil.copytree(dir_path, directory, dirs_exist_ok=True)
        return cls._create(directory, ".", "tf_keras")

    @classmethod
    def _create(cls, directory: Path, name: str, keras: str) -> Self:
        checkpoint = cls(directory)
        checkpoint.update_metadata({_FILENAME_KEY: name, _KERAS_MODULE_KEY: keras})
        return checkpoint

    def get_model(self) -> Any:
        """Load the model with the Keras version that saved it.

        Raises:
            ValueError: The checkpoint's metadata does not name the model file.
        """
        metadata = self.get_metadata()
        if _FILENAME_KEY not in metadata:
            raise ValueError(
                f"{self} does not name its model file (no {_FILENAME_KEY!r} in the metadata). "
                "Create it with TensorflowCheckpoint.from_model()."
            )
        keras = importlib.import_module(metadata.get(_KERAS_MODULE_KEY, "tensorflow.keras"))
        with self.as_directory() as directory:
            return keras.models.load_model(str(Path(directory, metadata[_FILENAME_KEY])))
